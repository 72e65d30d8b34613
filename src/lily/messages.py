"""Chat messages in the forms that clients send, brought into the one form that templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lily.errors import MessageError

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_OTHER_PARTS = ("image", "video", "audio", "file")
# Header lines that some clients put above the system prompt, with a value that changes with every request.
_VOLATILE = re.compile(r"(?:[ \t]*x-[\w-]*billing-header:[^\n]*(?:\n|$))+", re.IGNORECASE)


@dataclass(frozen=True)
class Conversation:
    """Messages ready for a template; `places` has the index in the caller's list of each."""

    messages: list[dict[str, Any]]
    places: list[int]


def normalise(messages: Sequence[Any], *, drop_volatile: bool = True) -> Conversation:
    """Check messages and bring them into one form.

    - `developer` is `system`; all system texts are joined in one message at the front, an empty one is left out.
    - Content that is None, missing, "" or [] is ""; a list of text parts is their joined text.
    - Arguments of tool calls are objects; JSON strings are parsed, in their order of keys.
    - Known header lines with a value that changes with every request (`x-...-billing-header: ...`) are dropped from the
      head of the system text, so that they do not spoil the reuse of what was read; `drop_volatile=False` keeps them.

    Raises `MessageError` with the place of what cannot be used.

    >>> from lily.messages import normalise
    >>> normalise([{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]}]).messages
    [{'role': 'user', 'content': 'What is 2+2?'}]
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError("messages must be a list of objects such as {'role': 'user', 'content': 'Hi'}")
    if not messages:
        raise MessageError("is empty, expected at least one message", path="messages")
    system: list[str] = []
    first_system = 0
    turns: list[dict[str, Any]] = []
    places: list[int] = []
    called = False
    for index, given in enumerate(messages):
        path = f"messages[{index}]"
        message = _message(given, path)
        if message["role"] == "system":
            first_system = first_system if system else index
            if message["content"].strip():
                system.append(message["content"])
            continue
        called = called or bool(message.get("tool_calls"))
        if message["role"] == "tool" and not called:
            raise MessageError("is 'tool', but no assistant message before it calls a tool", path=f"{path}.role")
        turns.append(message)
        places.append(index)
    head = _without_volatile("\n\n".join(system)) if drop_volatile else "\n\n".join(system)
    if head.strip():
        return Conversation([{"role": "system", "content": head}, *turns], [first_system, *places])
    return Conversation(turns, places)


def _message(given: Any, path: str) -> dict[str, Any]:
    if hasattr(given, "to_message"):  # an answer of `chat`, put back into the list
        given = given.to_message()
    if not isinstance(given, Mapping):
        raise TypeError(f"{path} is {type(given).__name__}, expected an object such as {{'role': 'user', 'content': 'Hi'}}")
    role = given.get("role")
    if role not in ROLES:
        raise MessageError(f"is {role!r}, expected one of {', '.join(ROLES)}", path=f"{path}.role")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = _content(given.get("content"), f"{path}.content")
    if role == "assistant":
        thoughts = given.get("reasoning_content") or given.get("reasoning")
        if thoughts is not None and not isinstance(thoughts, str):
            raise MessageError(f"is {type(thoughts).__name__}, expected text", path=f"{path}.reasoning_content")
        if thoughts:
            message["reasoning_content"] = thoughts
        calls = _calls(given.get("tool_calls"), f"{path}.tool_calls")
        if calls:
            message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = given[name]
    return message


def _content(content: Any, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise MessageError(f"is {type(content).__name__}, expected text or a list of text parts", path=path)
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(f"is {type(part).__name__}, expected {{'type': 'text', 'text': ...}}", path=path)
    kind = str(part.get("type", "text" if "text" in part else None))
    if kind not in _TEXT_PARTS:
        what = next((name for name in _OTHER_PARTS if name in kind), None)
        raise MessageError(f"has type {kind!r}{f' ({what})' if what else ''}; this model reads text only", path=path)
    if not isinstance(part.get("text"), str):
        raise MessageError(f"is {type(part.get('text')).__name__}, expected text", path=f"{path}.text")
    return part["text"]


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise MessageError(f"is {type(calls).__name__}, expected a list of calls", path=path)
    return [_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, path: str) -> dict[str, Any]:
    if hasattr(call, "to_dict"):
        call = call.to_dict()
    if not isinstance(call, Mapping):
        raise MessageError(f"is {type(call).__name__}, expected an object", path=path)
    nested = isinstance(call.get("function"), Mapping)
    function, place = (call["function"], f"{path}.function") if nested else (call, path)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"is {name!r}, expected the name of a tool", path=f"{place}.name")
    result: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        result = {"id": call["id"], **result}
    return result | {"function": {"name": name, "arguments": _arguments(function.get("arguments"), f"{place}.arguments")}}


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"is no JSON: {error}", path=path) from error
    if not isinstance(arguments, Mapping):
        raise MessageError(f"is {type(arguments).__name__}, expected an object of arguments by name", path=path)
    return dict(arguments)


def _without_volatile(text: str) -> str:
    found = _VOLATILE.match(text)
    return text[found.end() :] if found else text
