"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lily
from lily.results import MessageDelta, Timing, Usage
from lily.server.body import checked, json_object
from lily.server.errors import ApiError, bad_request
from lily.server.exchange import Server, event, exchange, new_id, prepare
from lily.server.fields import check_stream_options, note_format, only, strict_messages, strict_tools, without_effect
from lily.server.logprobs import ContentLogprobs
from lily.server.schema import ChatRequest, Sampled
from lily.stepping import ChatSteps, Piece, Reading

DONE = b"data: [DONE]\n\n"
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "ignore_eos",
)  # fmt: skip
_PASSED = (
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "enable_thinking", "chat_template_kwargs",
    "reuse_generated", "drop_volatile", "stop",
)  # fmt: skip
SAME_ANYWAY = ("user", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
TIERS = ("auto", "default")


async def chat_completions(request: Request) -> Response:
    """The endpoint."""
    server: Server = request.app.state.server
    body = checked(ChatRequest, await json_object(request, server.settings))
    model = server.names.check(body.model)
    without_effect(body, (*SAME_ANYWAY, "store"))
    only(body, {
        "service_tier": TIERS, "verbosity": ("medium",), "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (),
        "functions": (), "function_call": (),
    })  # fmt: skip
    check_stream_options(body)
    strict_messages(body.messages)
    strict_tools(body.tools)
    note_format(body.response_format)
    options, n = chat_options(body, server), body.n or 1
    prepared = await prepare(server, lambda: ChatSteps(server.model, body.messages, options, n))
    server.show_prompt(prepared.prompt_text)
    wanted = body.stream_options
    reply = ChatReply(
        server, model, n, logprobs=bool(body.logprobs),
        usage=bool(wanted and wanted.include_usage), progress=bool(wanted and wanted.include_progress),
    )  # fmt: skip
    return await exchange(request, prepared, reply, stream=bool(body.stream))


def sampling_options(body: Sampled, server: Server) -> dict[str, Any]:
    """The fields of sampling that were given, over the server's own."""
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    return {"sampling": server.settings.sampling} | given


def chat_options(body: ChatRequest, server: Server) -> dict[str, Any]:
    """The request as options of `Model.chat`."""
    options = sampling_options(body, server) | {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
    options["max_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    options["logit_bias"] = token_bias(body.logit_bias)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("needs logprobs to be true", "top_logprobs")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or True
    return options


def token_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """`logit_bias` with its keys as numbers."""
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise bad_request(f"has the key {key[:40]!r}, expected token ids", "logit_bias")
    return {int(key): value for key, value in given.items()}


def usage_object(usages: list[Usage]) -> dict[str, Any]:
    """OpenAI's usage of answers to one prompt."""
    written = sum(usage.generated_tokens for usage in usages)
    return {
        "prompt_tokens": usages[0].prompt_tokens,
        "completion_tokens": written,
        "total_tokens": usages[0].prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": usages[0].reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }


def timing_object(timing: Timing) -> dict[str, Any]:
    """Seconds and rates of the first answer."""
    return {
        "prefill_seconds": timing.prefill_seconds,
        "decode_seconds": timing.decode_seconds,
        "first_token_seconds": timing.first_token_seconds,
        "prefill_tokens_per_second": timing.prefill_tokens_per_second,
        "decode_tokens_per_second": timing.decode_tokens_per_second,
    }


def progress_object(reading: Reading, begun: float) -> dict[str, Any]:
    """How far a prompt is read, `begun` by the clock of `time.perf_counter`."""
    milliseconds = round(1000 * (time.perf_counter() - begun))
    return {"total": reading.total, "cached": reading.reused, "processed": reading.done, "milliseconds": milliseconds}


class ChatReply:
    """The answer as a `chat.completion`, or as chunks of one."""

    def __init__(self, server: Server, model: str, n: int, *, logprobs: bool, usage: bool, progress: bool) -> None:
        self._base = {
            "id": new_id("chatcmpl-"), "object": "chat.completion.chunk", "created": int(time.time()), "model": model,
            "system_fingerprint": f"lily-{lily.__version__}",
        }  # fmt: skip
        self._choices = [_Choice(i, ContentLogprobs(server.model.tokenizer) if logprobs else None) for i in range(n)]
        self._wants_usage, self._wants_progress = usage, progress
        self._usages: list[Usage] = []
        self._timing: Timing | None = None
        self._begun = time.perf_counter()

    def opening(self) -> bytes:
        """Each choice's role, before any work."""
        return b"".join(self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in self._choices)

    def add(self, step: Reading | Piece) -> bytes:
        if isinstance(step, Reading):
            return self._progress(step) if self._wants_progress else b""
        choice, delta = self._choices[step.index], step.delta
        shown, logprobs = choice.add(delta)
        events = self._chunk(step.index, shown, logprobs) if shown else b""
        if delta.finish_reason is not None:
            self._usages.append(delta.usage)
            self._timing = self._timing or delta.timing
            events += self._chunk(step.index, {}, None, delta.finish_reason, choice.unfinished)
        return events

    def closing(self) -> bytes:
        return (event(self._base | {"choices": []} | self._totals()) if self._wants_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.to_openai()) + DONE

    def whole(self) -> dict[str, Any]:
        choices = [choice.whole() for choice in self._choices]
        return self._base | {"object": "chat.completion", "choices": choices} | self._totals()

    def _totals(self) -> dict[str, Any]:
        assert self._timing is not None
        return {"usage": usage_object(self._usages), "timing": timing_object(self._timing)}

    def _progress(self, reading: Reading) -> bytes:
        return event(self._base | {"choices": [], "prompt_progress": progress_object(reading, self._begun)})

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: list[Any] | None = None, reason: str | None = None, unfinished: str | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if logprobs:
            choice["logprobs"] = {"content": logprobs, "refusal": None}
        if unfinished is not None:
            choice["unfinished_tool_call"] = unfinished
        usage = {"usage": None} if self._wants_usage else {}
        return event(self._base | {"choices": [choice]} | usage)


class _Choice:
    """One answer: what each delta adds to it, and its sum."""

    def __init__(self, index: int, logprobs: ContentLogprobs | None) -> None:
        self.index = index
        self.unfinished: str | None = None
        self._logprobs = logprobs
        self._entries: list[Any] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._done: set[int] = set()
        self._reason: str | None = None

    def add(self, delta: MessageDelta) -> tuple[dict[str, Any], list[Any]]:
        """The delta in OpenAI's form, and the log-probabilities of the content that it completes."""
        shown: dict[str, Any] = {}
        if delta.reasoning:
            shown["reasoning_content"] = delta.reasoning
            self._reasoning.append(delta.reasoning)
        if delta.content:
            shown["content"] = delta.content
            self._content.append(delta.content)
        if delta.tool_calls:
            shown["tool_calls"] = [self._call(piece) for piece in delta.tool_calls]
        entries = self._logprobs.add(delta) if self._logprobs is not None else []
        self._entries += entries
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            self.unfinished = delta.message.unfinished_call if delta.message is not None else None
        return shown, entries

    def whole(self) -> dict[str, Any]:
        calls = [call for i, call in enumerate(self._calls) if i in self._done]
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if calls:
            message["tool_calls"] = calls
        logprobs = {"content": self._entries, "refusal": None} if self._logprobs is not None else None
        choice = {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self._reason}
        return choice if self.unfinished is None else choice | {"unfinished_tool_call": self.unfinished}

    def _call(self, piece: Any) -> dict[str, Any]:
        if piece.index == len(self._calls):
            self._calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        self._calls[piece.index]["function"]["arguments"] += piece.arguments
        if piece.done:
            self._done.add(piece.index)
        function = {"arguments": piece.arguments}
        if piece.id is None:
            return {"index": piece.index, "function": function}
        return {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name, **function}}
