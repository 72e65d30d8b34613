"""One incremental parser of answers: thoughts, content and tool calls, whatever the pieces in which the text arrives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lily.tool_calls import CALL_END, CallReader, Opening, ToolCall, ToolCallDelta, match_opening, overlap
from lily.tools import Tool

_THINK, _THINK_END = "<think>", "</think>"


@dataclass
class Pieces:
    """What one piece of text added."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    #: The same in the order of the text: ("content", text), ("reasoning", text) and ("call", delta).
    order: list[tuple[str, Any]] = field(default_factory=list, repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ReplyParser:
    """Splits an answer as it arrives. How the text is cut into pieces makes no difference to the sums.

    With `thinking` it begins inside the thoughts, as after a prompt that ended with an open `<think>`. Inside thoughts, and
    without tools, nothing is read as a call. A call must start a line and name a declared tool.

    >>> from lily.reasoning import ReplyParser
    >>> parser = ReplyParser(thinking=True)
    >>> parser.push("Two and two.\\n</th"), parser.push("ink>\\n\\n4")
    (Pieces(content='', reasoning='Two and two.', calls=[]), Pieces(content='4', reasoning='', calls=[]))
    """

    def __init__(self, tools: Sequence[Tool] = (), *, thinking: bool = False) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._state = self._thoughts if thinking else self._start
        self._buffer = ""
        self._space = ""  # white space that is dropped before a call and at the end of the thoughts
        self._blank_line = True  # only white space stands on the current line
        self._reasoning, self._content = "", ""
        self._text_since_call = False
        self._reader: CallReader | None = None
        self._raw = ""  # text of the open call
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, JSON pieces
        self._done = 0
        #: The text of a call that was cut off, once `finish` was called.
        self.unfinished: str | None = None

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to the thoughts."""
        return self._state == self._thoughts

    @property
    def settled(self) -> bool:
        """Whether a call has just been read to its closing tag, and nothing behind it yet."""
        return self._done > 0 and self._state == self._answer and not self._text_since_call

    @property
    def reasoning(self) -> str:
        """All thoughts so far."""
        return self._reasoning

    @property
    def content(self) -> str:
        """All content so far."""
        return self._content

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that are complete."""
        return [ToolCall(id, name, json.loads("".join(pieces))) for id, name, pieces in self._calls[: self._done]]

    def push(self, text: str) -> Pieces:
        """Take more text; return what it adds."""
        self._buffer += text
        pieces = Pieces()
        while self._buffer and self._state(pieces):
            pass
        return pieces

    def finish(self) -> Pieces:
        """The end of the text: what was held back and turned out to be no tag. A cut call goes to `unfinished`."""
        pieces = Pieces()
        if self._state == self._call:
            self.unfinished = self._raw
        elif self._state == self._thoughts:
            self._add_reasoning(self._space + self._buffer, pieces)
        elif self._state in (self._start, self._answer):
            if self._tools and ">" in self._buffer and match_opening(self._buffer, self._tools) is True:
                self.unfinished = self._buffer
            else:
                self._add_content(self._buffer, pieces)
                if self._text_since_call:
                    self._emit(self._space, pieces)
        self._buffer = self._space = ""
        return pieces

    # Each state consumes what it can of the buffer, and returns whether another state may go on.

    def _start(self, pieces: Pieces) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_THINK):
            self._buffer, self._state = text[len(_THINK) :], self._thoughts
        elif _THINK.startswith(text):
            return False
        else:
            self._state = self._answer
        return True

    def _thoughts(self, pieces: Pieces) -> bool:
        end = self._buffer.find(_THINK_END)
        if end < 0:
            end = len(self._buffer) - overlap(self._buffer, _THINK_END)
            self._think(self._buffer[:end], pieces)
            self._buffer = self._buffer[end:]
            return False
        self._think(self._buffer[:end], pieces)
        self._buffer, self._space, self._blank_line = self._buffer[end + len(_THINK_END) :], "", True
        self._state = self._answer
        return True

    def _answer(self, pieces: Pieces) -> bool:
        at = self._buffer.find("<") if self._tools else -1
        while at >= 0:
            if self._starts_line(at):
                opening = match_opening(self._buffer[at:], self._tools)
                if opening:
                    self._add_content(self._buffer[:at], pieces)
                    self._buffer = self._buffer[at:]
                    if isinstance(opening, Opening):
                        self._open(opening, pieces)
                    return isinstance(opening, Opening)
            at = self._buffer.find("<", at + 1)
        self._add_content(self._buffer, pieces)
        self._buffer = ""
        return False

    def _call(self, pieces: Pieces) -> bool:
        assert self._reader is not None
        self._raw += self._buffer
        arguments = self._reader.push(self._buffer)
        self._buffer = self._reader.rest() if self._reader.done else ""
        if arguments or self._reader.done:
            self._add_call(arguments, pieces, done=self._reader.done)
        if self._reader.done:
            self._done += 1
            self._state, self._reader = self._after_call, None
        return True

    def _after_call(self, pieces: Pieces) -> bool:
        text = self._buffer.lstrip()
        if CALL_END.startswith(text) and text != CALL_END:
            return False
        self._buffer = text.removeprefix(CALL_END) if text.startswith(CALL_END) else self._buffer
        self._space, self._blank_line, self._text_since_call = "", True, False
        self._state = self._answer
        return True

    def _open(self, opening: Opening, pieces: Pieces) -> None:
        self._space = ""
        self._raw, self._buffer = self._buffer[: opening.length], self._buffer[opening.length :]
        self._reader, self._state = CallReader(self._tools[opening.name]), self._call
        import uuid

        id = f"call_{uuid.uuid4().hex[:24]}"
        self._calls.append((id, opening.name, []))
        opened = ToolCallDelta(len(self._calls) - 1, id, opening.name)
        pieces.calls.append(opened)
        pieces.order.append(("call", opened))

    def _starts_line(self, at: int) -> bool:
        line = self._buffer.rfind("\n", 0, at)
        return not self._buffer[line + 1 : at].strip(" \t") and (line >= 0 or self._blank_line)

    def _think(self, text: str, pieces: Pieces) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._add_reasoning(shown, pieces)

    def _add_reasoning(self, text: str, pieces: Pieces) -> None:
        text = text if self._reasoning else text.lstrip("\r\n")
        pieces.reasoning += text
        if text:
            pieces.order.append(("reasoning", text))
        self._reasoning += text

    def _add_content(self, text: str, pieces: Pieces) -> None:
        line = text.rfind("\n")
        self._blank_line = not text[line + 1 :].strip(" \t") and (line >= 0 or self._blank_line)
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._emit(shown if self._content else shown.lstrip("\r\n"), pieces)
            self._text_since_call = True

    def _emit(self, text: str, pieces: Pieces) -> None:
        pieces.content += text
        if text:
            pieces.order.append(("content", text))
        self._content += text

    def _add_call(self, arguments: str, pieces: Pieces, *, done: bool) -> None:
        index = len(self._calls) - 1
        self._calls[index][2].append(arguments)
        last = pieces.calls[-1] if pieces.calls and pieces.calls[-1].index == index else None
        if last is not None:
            pieces.calls.pop()
            pieces.order.pop()  # the same piece: nothing else is added while a call is open
            added = ToolCallDelta(index, last.id, last.name, last.arguments + arguments, done)
        else:
            added = ToolCallDelta(index, arguments=arguments, done=done)
        pieces.calls.append(added)
        pieces.order.append(("call", added))
