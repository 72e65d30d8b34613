"""Fields of requests that the structures cannot judge alone: those without effect here, and those inside messages and tools."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lily.server.errors import bad_request

_log = logging.getLogger("lily.server")
_seen: set[str] = set()
_INDEX = re.compile(r"\[\d+\]")

_MESSAGE = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
# `parsed` and `parsed_arguments`: official clients put what they made of an answer beside it, and send that back.
_MESSAGE_WITHOUT_EFFECT = {"refusal", "annotations", "cache_control", "id", "name", "parsed"}
_OF_ONE_ROLE = {"tool_calls": "assistant", "reasoning_content": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}
_PART = {"type", "text"}
_CALL = {"id", "type", "function", "index"}
_CALLED = {"name", "arguments"}
_TOOL = {"type", "function", "name", "description", "parameters", "strict"}
_FUNCTION = {"name", "description", "parameters", "strict"}


def without_effect(request: Any, names: Sequence[str]) -> None:
    """Log, once in the life of the process, each of the fields that was given: it is accepted and changes nothing."""
    for name in names:
        if getattr(request, name) is not None:
            note_once(name)


def note_once(name: str) -> None:
    """Log once that a field changes nothing."""
    if name not in _seen:
        _seen.add(name)
        _log.info("the field %s is accepted and has no effect", name)


def only(request: Any, allowed: Mapping[str, Sequence[Any]]) -> None:
    """Refuse fields with other values than those that say what happens anyway."""
    for name, values in allowed.items():
        value = getattr(request, name)
        if value is not None and value not in values:
            expected = f"; the values that work are {', '.join(map(repr, values))}" if values else "; leave it out"
            raise bad_request(f"is {str(value)[:80]!r}, which this server does not do{expected}", name)


def check_stream_options(request: Any) -> None:
    """Refuse options of a stream for an answer that is none."""
    if request.stream_options is None:
        return
    if not request.stream:
        raise bad_request("needs stream to be true", "stream_options")
    without_effect(request.stream_options, ("include_obfuscation",))


def strict_messages(messages: Sequence[Any]) -> None:
    """Refuse what stands in messages and would be dropped; a null is nothing."""
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue  # the library says what is wrong with it
        path = f"messages[{i}]"
        known(message, _MESSAGE, path, _MESSAGE_WITHOUT_EFFECT)
        for name, role in _OF_ONE_ROLE.items():
            if message.get(name) and message.get("role") != role:
                raise bad_request(
                    f"belongs to messages of the role {role!r}, this one's is {str(message.get('role'))[:40]!r}", f"{path}.{name}"
                )
        if isinstance(message.get("content"), list):
            for j, part in enumerate(message["content"]):
                if isinstance(part, Mapping) and "text" in str(part.get("type")):
                    known(part, _PART, f"{path}.content[{j}]", ("cache_control", "annotations", "logprobs"))
        if isinstance(message.get("tool_calls"), list):
            for j, call in enumerate(message["tool_calls"]):
                if isinstance(call, Mapping):
                    if call.get("type", "function") != "function":
                        raise bad_request(f"is {call['type']!r}, expected 'function'", f"{path}.tool_calls[{j}].type")
                    known(call, _CALL, f"{path}.tool_calls[{j}]")
                    if isinstance(call.get("function"), Mapping):
                        known(call["function"], _CALLED, f"{path}.tool_calls[{j}].function", ("parsed_arguments",))


def strict_tools(tools: Any) -> None:
    """Refuse what stands in tools and would be dropped. `strict` is noted: arguments get the schema's types, no more."""
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise bad_request(f"is {type(tool).__name__}, expected an object", f"tools[{i}]")
        known(tool, _TOOL, f"tools[{i}]", ("cache_control",))
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            if function is not tool:
                known(function, _FUNCTION, f"tools[{i}].function")
            if not isinstance(function.get("description"), (str, type(None))):
                raise bad_request("must be text", f"tools[{i}].function.description")
            if function.get("strict"):
                note_once("tools[].function.strict")


def note_format(given: Mapping[str, Any] | None) -> None:
    """Note what a JSON schema is called: only the schema itself holds the answer."""
    outer = (given or {}).get("json_schema")
    for name in ("name", "description"):
        if isinstance(outer, Mapping) and outer.get(name) is not None:
            note_once(f"response_format.json_schema.{name}")


def known(value: Mapping[str, Any], names: Collection[str], path: str, noted: Collection[str] = ()) -> None:
    """Refuse other keys than `names`, unless their value is null. Those of `noted` are only logged."""
    for key, entry in value.items():
        if key in names or entry is None:
            continue
        if key not in noted:
            raise bad_request("is unknown here", f"{path}.{key}")
        note_once(f"{_INDEX.sub('[]', path)}.{key}")
