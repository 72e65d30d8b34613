"""The bodies of requests, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_ANSWERS = 16
MAX_PROMPTS = 64
_Answers = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]
_Alternatives = Annotated[int, Meta(ge=0, le=20)]
_Limit = Annotated[int, Meta(ge=0)]
_Stops = str | Annotated[list[str], Meta(max_length=16)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_progress: bool | None = None
    include_obfuscation: bool | None = None


class ResponsesStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Usage comes with the last event of that interface anyway."""

    include_obfuscation: bool | None = None


class Sampled(Struct, kw_only=True, forbid_unknown_fields=True):
    """What every endpoint of OpenAI's and our own extensions share."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None


class ChatRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    stream_options: StreamOptions | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    n: _Answers | None = None
    stop: _Stops | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reuse_generated: bool | None = None
    drop_volatile: bool | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None


class CompletionRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    stream_options: StreamOptions | None = None
    max_tokens: _Limit | None = None
    n: _Answers | None = None
    best_of: int | None = None
    echo: bool | None = None
    stop: _Stops | None = None
    logprobs: _Alternatives | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: _Limit | None = None
    max_tool_calls: int | None = None
    top_logprobs: _Alternatives | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None


class MessagesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages, and /v1/messages/count_tokens, which needs no `max_tokens`."""

    messages: list[Any]
    model: str | None = None
    max_tokens: _Limit | None = None
    system: str | list[Any] | None = None
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Any = None
    service_tier: str | None = None
    context_management: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tokenize: a text, or messages as /v1/chat/completions takes them."""

    model: str | None = None
    text: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    drop_volatile: bool | None = None
    pieces: bool | None = None
