"""Tool calls as the model writes them, read piece by piece into JSON.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The form has no escaping, so a closing tag ends a value only where the grammar allows one: on a line of its own (or, for a
value that began on the tag's line, anywhere) and followed by another parameter or the end of the function.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lily.tools import Tool, convert, kinds_of

_log = logging.getLogger(__name__)

CALL, CALL_END = "<tool_call>", "</tool_call>"
_PARAMETER, _VALUE_END, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
_STRUCTURE = (_PARAMETER, _FUNCTION_END)


@dataclass(frozen=True)
class ToolCall:
    """A finished call: `arguments` by name, of the types that the tool's schema asks for.

    >>> import lily
    >>> call = lily.ToolCall("call_1", "get_time", {"city": "Oslo"})
    >>> call.to_dict()["function"]["arguments"]
    '{"city": "Oslo"}'
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The call in OpenAI's form, its arguments as JSON text."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the call number `index`. The first has `id` and `name`; the joined `arguments` are JSON text, whole only
    when a piece with `done` has come: a call without one was cut and must not be run.

    >>> import lily
    >>> lily.ToolCallDelta(0, arguments='{"city": "Os').done
    False
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    done: bool = False


@dataclass(frozen=True)
class Opening:
    """The beginning of a call: the tool's name and the length of the text up to its first parameter or end."""

    name: str
    length: int


def match_opening(text: str, names: Iterable[str]) -> Opening | bool:
    """Whether a call of a declared tool begins with `text`: an `Opening`, or True while that is open, or False."""
    if CALL.startswith(text):
        return True
    at = _skip_space(text, len(CALL)) if text.startswith(CALL) else 0
    rest, undecided = text[at:], False
    for name in names:
        tag = f"<function={name}>"
        if rest.startswith(tag):
            body = _skip_space(rest, len(tag))
            if rest.startswith(_STRUCTURE, body):
                return Opening(name, at + body)
            undecided = undecided or _begins_one(rest[body:], _STRUCTURE)
        undecided = undecided or tag.startswith(rest)
    return undecided


class CallReader:
    """Reads the text of one call behind its opening."""

    def __init__(self, tool: Tool) -> None:
        self._root = tool.parameters
        self._name = tool.name
        properties = tool.parameters.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._buffer = ""
        self._key: str | None = None  # of the value being read
        self._value: list[str] = []  # its text, unless it is sent on at once
        self._is_text = False
        self._closer: str | None = None  # what ends the value; depends on its first character
        self._lead = False  # the newline behind the opening tag is still to be left out
        self._count = 0
        self.done = False

    def push(self, text: str) -> str:
        """Take more text; return the JSON text of the arguments that it completes. Text behind the end is in `rest()`."""
        self._buffer += text
        out: list[str] = []
        while not self.done and (self._read_value(out) if self._key is not None else self._read_structure(out)):
            pass
        return "".join(out)

    def rest(self) -> str:
        """What came behind the end of the call."""
        rest, self._buffer = self._buffer, ""
        return rest

    def _read_structure(self, out: list[str]) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_FUNCTION_END):
            out.append("}" if self._count else "{}")
            self._buffer = text[len(_FUNCTION_END) :]
            self.done = True
            return False
        if text.startswith(_PARAMETER):
            end = text.find(">")
            line = text.find("\n")
            if 0 <= end and not 0 <= line < end:
                self._begin(text[len(_PARAMETER) : end].strip(), out)
                self._buffer = text[end + 1 :]
                return True
            if line < 0:
                return False
        elif _begins_one(text, _STRUCTURE):
            return False
        following = text.find("<", 1)
        dropped, self._buffer = (text, "") if following < 0 else (text[:following], text[following:])
        _log.warning("%d characters between the parameters of a call of %s were dropped", len(dropped), self._name)
        return following >= 0

    def _begin(self, key: str, out: list[str]) -> None:
        self._key, self._value, self._closer = key, [], None
        self._is_text = kinds_of(self._properties.get(key), self._root) == {"string"}
        out.append(f"{', ' if self._count else '{'}{json.dumps(key, ensure_ascii=False)}: {chr(34) if self._is_text else ''}")
        self._count += 1

    def _read_value(self, out: list[str]) -> bool:
        if not self._buffer:
            return False
        if self._closer is None:
            self._lead = self._buffer[0] == "\n"
            self._closer = "\n" + _VALUE_END if self._lead else _VALUE_END
        start = 0
        while (at := self._buffer.find(self._closer, start)) >= 0:
            behind = self._buffer[_skip_space(self._buffer, at + len(self._closer)) :]
            if behind.startswith(_STRUCTURE):
                inline_break = self._closer == _VALUE_END and self._buffer[at - 1 : at] == "\n"
                self._add(self._buffer[: at - inline_break], out)
                self._end(out)
                self._buffer = behind
                return True
            if _begins_one(behind, _STRUCTURE):
                break
            start = at + 1
        else:
            at = len(self._buffer) - overlap(self._buffer, self._closer)
        if self._closer == _VALUE_END and self._buffer[at - 1 : at] == "\n":
            at -= 1
        self._add(self._buffer[:at], out)
        self._buffer = self._buffer[at:]
        return False

    def _add(self, text: str, out: list[str]) -> None:
        if self._lead and text:
            self._lead, text = False, text[1:]
        if self._is_text:
            out.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end(self, out: list[str]) -> None:
        if self._is_text:
            out.append('"')
        else:
            value = convert("".join(self._value), self._properties.get(self._key), self._root)
            out.append(json.dumps(value, ensure_ascii=False))
        self._key = None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _begins_one(text: str, tags: Iterable[str]) -> bool:
    return any(tag.startswith(text) for tag in tags)


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)
