"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form, translated into a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lily.server.body import checked, json_object
from lily.server.errors import ApiError, bad_request
from lily.server.exchange import Server, exchange, in_thread, json_response, prepare
from lily.server.fields import known, note_once, only, without_effect
from lily.server.messages_reply import MessagesReply
from lily.server.schema import MessagesRequest
from lily.server.translation import Translated
from lily.stepping import ChatSteps

_NOTED = ("cache_control", "citations")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    server: Server = request.app.state.server
    body = checked(MessagesRequest, await json_object(request, server.settings))
    model = server.names.check(body.model)
    if body.max_tokens is None:
        raise bad_request("is missing", "max_tokens")
    translated, options = _translated(body, server)
    try:
        prepared = await prepare(server, lambda: ChatSteps(server.model, translated.messages, options))
    except ApiError as error:
        raise translated.relocated(error) from error
    server.show_prompt(prepared.prompt_text)
    return await exchange(request, prepared, MessagesReply(model), stream=bool(body.stream))


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    server: Server = request.app.state.server
    body = checked(MessagesRequest, await json_object(request, server.settings))
    server.names.check(body.model)
    translated, options = _translated(body, server)
    try:
        counted = await in_thread(lambda: ChatSteps(server.model, translated.messages, options))
    except ApiError as error:
        raise translated.relocated(error) from error
    return json_response({"input_tokens": counted.prompt_tokens})


def _translated(body: MessagesRequest, server: Server) -> tuple[Translated, dict[str, Any]]:
    without_effect(body, ("metadata", "cache_control"))
    only(body, {
        "service_tier": ("auto", "standard_only"), "container": (), "mcp_servers": ([],), "inference_geo": (), "speed": ("standard",),
    })  # fmt: skip
    _check_context_management(body.context_management)
    translated = Translated()
    if body.system:
        translated.add({"role": "system", "content": _texts(body.system, "system")}, "system")
    for i, message in enumerate(body.messages):
        _add_message(translated, message, f"messages[{i}]")
    return translated, _options(body, server)


def _options(body: MessagesRequest, server: Server) -> dict[str, Any]:
    options: dict[str, Any] = {"sampling": server.settings.sampling, "max_tokens": body.max_tokens, "stop": body.stop_sequences}
    options |= {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(body, name)) is not None}
    thinking = body.thinking or {"type": "disabled"}
    if thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        raise bad_request(f"is {thinking.get('type')!r}, expected enabled, adaptive or disabled", "thinking.type")
    known(thinking, ("type",), "thinking", ("budget_tokens", "display"))
    options["enable_thinking"] = thinking["type"] != "disabled"
    output = body.output_config or {}
    known(output, ("effort", "format"), "output_config")
    if output.get("effort") is not None:
        if output["effort"] not in _EFFORTS:
            raise bad_request(f"is {output['effort']!r}, expected one of {', '.join(_EFFORTS)}", "output_config.effort")
        options["reasoning_effort"] = output["effort"]
    form, place = output.get("format"), "output_config.format"
    if body.output_format is not None:
        if form is not None:
            raise bad_request("and output_config.format say the same; give one of them", "output_format")
        form, place = body.output_format, "output_format"
    if form is not None:
        if not isinstance(form, Mapping) or form.get("type") != "json_schema":
            raise bad_request("must have the type 'json_schema'", place)
        known(form, ("type", "schema"), place, ("name",))
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    if body.tools:
        options["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is not None:
        known(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
        if choice.get("type") == "tool":
            options["tool_choice"] = {"function": {"name": choice.get("name")}}
        elif choice.get("type") in _CHOICES:
            known(choice, ("type", "disable_parallel_tool_use"), "tool_choice")
            options["tool_choice"] = _CHOICES[choice["type"]]
        else:
            raise bad_request(f"is {choice.get('type')!r}, expected auto, any, tool or none", "tool_choice.type")
        if not isinstance(choice.get("disable_parallel_tool_use", False), bool):
            raise bad_request("must be true or false", "tool_choice.disable_parallel_tool_use")
        options["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    return options


def _tool(given: Any, path: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise bad_request("must be an object", path)
    if given.get("type", "custom") not in ("custom", None):
        raise bad_request(f"is {given['type']!r}, which this server does not have; the type that works is 'custom'", f"{path}.type")
    known(
        given, ("type", "name", "description", "input_schema"), path, ("cache_control", "strict", "eager_input_streaming", "defer_loading")
    )
    if not isinstance(given.get("input_schema"), Mapping):
        raise bad_request("must be a JSON schema", f"{path}.input_schema")
    if not isinstance(given.get("description"), (str, type(None))):
        raise bad_request("must be text", f"{path}.description")
    described = {"description": given["description"]} if given.get("description") else {}
    return {"type": "function", "function": {"name": given.get("name"), **described, "parameters": given["input_schema"]}}


def _check_context_management(given: dict[str, Any] | None) -> None:
    """Templates of this family leave earlier thoughts out anyway; other edits are not done."""
    known(given or {}, ("edits",), "context_management")
    edits = (given or {}).get("edits") or ()
    if not isinstance(edits, Sequence) or isinstance(edits, str):
        raise bad_request("must be a list", "context_management.edits")
    for i, edit in enumerate(edits):
        kind = str(edit.get("type")) if isinstance(edit, Mapping) else None
        if kind is None or not kind.startswith("clear_thinking_"):
            raise bad_request(f"is {kind!r}, which this server does not do; leave it out", f"context_management.edits[{i}].type")
        known(edit, ("type",), f"context_management.edits[{i}]", ("keep",))
        note_once("context_management")


def _add_message(translated: Translated, message: Any, path: str) -> None:
    if not isinstance(message, Mapping):
        raise bad_request("must be an object", path)
    known(message, ("role", "content"), path, ("id", "type"))
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"is {str(role)[:40]!r}, expected user, assistant or system", f"{path}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise bad_request("must be text or a list of blocks", f"{path}.content")
    turn: dict[str, Any] = {"role": role, "content": []}
    for i, block in enumerate(blocks):
        place = f"{path}.content" if isinstance(content, str) else f"{path}.content[{i}]"
        if not isinstance(block, Mapping):
            raise bad_request("must be an object", place)
        if role == "assistant":
            _add_to_answer(turn, block, place)
        elif block.get("type") == "tool_result" and role == "user":
            translated.add(_tool_result(block, place), place)  # results stand before what the user says
        else:
            turn["content"].append(_text(block, place))
    if turn["content"] or role == "assistant":
        turn["content"] = "".join(turn["content"])
        translated.add(turn, path)
    elif not blocks:
        raise bad_request("is empty", f"{path}.content")


def _add_to_answer(turn: dict[str, Any], block: Mapping[str, Any], place: str) -> None:
    kind = block.get("type")
    if kind == "tool_use":
        known(block, ("type", "id", "name", "input"), place, (*_NOTED, "caller"))
        function = {"name": block.get("name"), "arguments": block.get("input")}
        turn.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
    elif kind == "thinking":
        known(block, ("type", "thinking"), place, ("signature", *_NOTED))
        if not isinstance(block.get("thinking"), str):
            raise bad_request("must be text", f"{place}.thinking")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
    elif kind == "redacted_thinking":
        note_once("redacted_thinking")
    else:
        turn["content"].append(_text(block, place))


def _tool_result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    known(block, ("type", "tool_use_id", "content", "is_error"), place, _NOTED)
    text = _texts(block.get("content") or "", f"{place}.content")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": f"Error: {text}" if block.get("is_error") else text}


def _texts(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("must be text or a list of blocks", place)
    return "\n\n".join(_text(block, f"{place}[{i}]") for i, block in enumerate(content))


def _text(block: Any, place: str) -> str:
    if not isinstance(block, Mapping):
        raise bad_request("must be an object", place)
    if block.get("type") != "text":
        raise bad_request(f"has type {str(block.get('type'))[:40]!r}; this model reads text only", place)
    known(block, ("type", "text"), place, _NOTED)
    if not isinstance(block.get("text"), str):
        raise bad_request("must be text", f"{place}.text")
    return block["text"]
