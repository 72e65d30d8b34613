"""POST /v1/responses: OpenAI's newer form, translated into a chat. Nothing is stored: each request brings its whole input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lily.server.body import checked, json_object
from lily.server.chat_completions import SAME_ANYWAY, TIERS, sampling_options
from lily.server.errors import ApiError, bad_request
from lily.server.exchange import Server, exchange, prepare
from lily.server.fields import check_stream_options, known, only, strict_messages, strict_tools, without_effect
from lily.server.responses_reply import ResponsesReply
from lily.server.schema import ResponsesRequest
from lily.server.translation import Translated
from lily.stepping import ChatSteps

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")


async def responses(request: Request) -> Response:
    """The endpoint."""
    server: Server = request.app.state.server
    body = checked(ResponsesRequest, await json_object(request, server.settings))
    model = server.names.check(body.model)
    without_effect(body, (*SAME_ANYWAY, "store"))
    only(body, {
        "service_tier": TIERS, "truncation": ("disabled",), "background": (False,), "previous_response_id": (), "conversation": (),
        "prompt": (), "max_tool_calls": (), "context_management": (),
    })  # fmt: skip
    check_stream_options(body)
    for i, name in enumerate(body.include or ()):
        if name not in _INCLUDED:
            raise bad_request(f"is {name!r}, expected one of {', '.join(_INCLUDED)}", f"include[{i}]")
    translated = _messages(body)
    strict_messages(translated.messages)
    options = _options(body, server)
    try:
        prepared = await prepare(server, lambda: ChatSteps(server.model, translated.messages, options))
    except ApiError as error:
        raise translated.relocated(error) from error
    server.show_prompt(prepared.prompt_text)
    reply = ResponsesReply(server.model.tokenizer if options.get("logprobs") else None, _echo(body, model))
    return await exchange(request, prepared, reply, stream=bool(body.stream))


def _options(body: ResponsesRequest, server: Server) -> dict[str, Any]:
    options = sampling_options(body, server) | {"max_tokens": body.max_output_tokens}
    if body.tools:
        options["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
        strict_tools(options["tools"])
    for name in ("tool_choice", "parallel_tool_calls"):
        if getattr(body, name) is not None:
            options[name] = getattr(body, name)
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type", "function") != "function":
        raise bad_request(f"is {body.tool_choice['type']!r}, expected 'function'", "tool_choice.type")
    if body.reasoning is not None:
        if body.reasoning.effort is not None:
            options["reasoning_effort"] = body.reasoning.effort
        for name in ("summary", "generate_summary"):
            if getattr(body.reasoning, name) not in (None, "auto"):
                raise bad_request("is not done here: the thoughts themselves come back; leave it out", f"reasoning.{name}")
    if body.text is not None:
        if body.text.verbosity not in (None, "medium"):
            raise bad_request(f"is {body.text.verbosity!r}; the value that works is 'medium'", "text.verbosity")
        options["response_format"] = _format(body.text.format)
    wants = _LOGPROBS in (body.include or ())
    if body.top_logprobs is not None and not wants:
        raise bad_request(f"needs include to hold {_LOGPROBS!r}", "top_logprobs")
    if wants:
        options["logprobs"] = body.top_logprobs or True
    return options


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        known(given or {}, ("type",), "text.format")
        return given
    known(given, ("type", "schema", "strict"), "text.format", ("name", "description"))
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _tool(given: Any, path: str) -> Any:
    if isinstance(given, Mapping) and given.get("type") != "function":
        raise bad_request(f"is {given.get('type')!r}, which this server does not have; the type that works is 'function'", f"{path}.type")
    return given


def _messages(body: ResponsesRequest) -> Translated:
    translated = Translated()
    if body.instructions:
        translated.add({"role": "system", "content": body.instructions}, "instructions")
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not items:
        raise bad_request("is empty, expected at least one item", "input")
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise bad_request("must be an object", f"input[{i}]")
        _add_item(translated, item, "input" if isinstance(body.input, str) else f"input[{i}]")
    return translated


def _add_item(translated: Translated, item: Mapping[str, Any], path: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        known(item, ("type", "role", "content"), path, ("id", "status", "phase"))
        if item.get("role") == "assistant":
            message = translated.assistant(path)
            if message["content"] or message.get("tool_calls"):
                translated.add({"role": "assistant", "content": item.get("content")}, path)
            else:
                message["content"] = item.get("content")
        else:
            translated.add({"role": item.get("role"), "content": item.get("content")}, path)
    elif kind == "reasoning":
        known(item, ("type", "content", "summary"), path, ("id", "status", "encrypted_content"))
        texts = [part.get("text") for part in item.get("content") or item.get("summary") or () if isinstance(part, Mapping)]
        if not all(isinstance(text, str) for text in texts):
            raise bad_request("must hold parts with text", f"{path}.content")
        # Thoughts begin a turn.
        translated.add({"role": "assistant", "content": "", "reasoning_content": "\n".join(map(str, texts)) or None}, path)
    elif kind == "function_call":
        known(item, ("type", "call_id", "name", "arguments"), path, ("id", "status"))
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = translated.assistant(path).setdefault("tool_calls", [])
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "function_call_output":
        known(item, ("type", "call_id", "output"), path, ("id", "status"))
        translated.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}, path)
    else:
        raise bad_request(f"is {kind!r}, expected message, reasoning, function_call or function_call_output", f"{path}.type")


def _echo(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """What the response object repeats of the request."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "model": model, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None, "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None}, "store": False, "temperature": body.temperature, "top_p": body.top_p,
        "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "truncation": "disabled", "user": body.user,
    }  # fmt: skip
