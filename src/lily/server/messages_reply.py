"""An answer as the content blocks of Anthropic's Messages interface, whole or as its events."""

from __future__ import annotations

import json
from typing import Any

from lily.results import MessageDelta
from lily.server.errors import ApiError
from lily.server.exchange import event, new_id
from lily.stepping import Piece, Reading

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply:
    """Blocks open one after the other: thinking, text, tool_use, as they come in the answer."""

    def __init__(self, model: str) -> None:
        self._base = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the open call
        self._open: str | int | None = None  # the kind of the open block, or the number of its call
        self._cut = False  # the last block is a call that the end of the answer cut
        self._begun = False
        self._last: MessageDelta | None = None

    def opening(self) -> bytes:
        return b""  # the first event says how much of the prompt was there already

    def add(self, step: Reading | Piece) -> bytes:
        if isinstance(step, Reading):
            return self._start(step)
        delta: MessageDelta = step.delta
        events = []
        for kind, piece in delta.order:
            events.append(self._call(piece) if kind == "call" else self._text("text" if kind == "content" else "thinking", piece))
        if delta.finish_reason is not None:
            self._last, self._cut = delta, isinstance(self._open, int)
            events.append(self._close())
        return b"".join(events)

    def closing(self) -> bytes:
        whole = self.whole()
        stopped = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        return event({"type": "message_delta", "delta": stopped, "usage": whole["usage"]}, "message_delta") + event(
            {"type": "message_stop"}, "message_stop"
        )

    def failure(self, error: ApiError) -> bytes:
        return event(error.to_anthropic(), "error")

    def whole(self) -> dict[str, Any]:
        last = self._last
        assert last is not None and last.message is not None and last.usage is not None
        stop = last.message.stop_string if last.finish_reason == "stop" else None
        blocks = self._blocks[:-1] if self._cut else self._blocks  # a call that was cut must not be run
        return self._base | {
            "content": blocks,
            "stop_reason": "stop_sequence" if stop is not None else _REASONS.get(last.finish_reason or "", "end_turn"),
            "stop_sequence": stop,
            "usage": self._usage(last.usage.prompt_tokens, last.usage.reused_tokens, last.usage.generated_tokens),
        }

    def _usage(self, total: int, reused: int, written: int) -> dict[str, Any]:
        return {
            "input_tokens": total - reused, "cache_read_input_tokens": reused, "cache_creation_input_tokens": 0, "output_tokens": written,
        }  # fmt: skip

    def _start(self, reading: Reading) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = self._base | {
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(reading.total, reading.reused, 0),
        }  # fmt: skip
        return event({"type": "message_start", "message": message}, "message_start")

    def _begin(self, kind: str | int, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._open = kind
        self._blocks.append(block)
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        return events + event(start, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}, "content_block_delta")

    def _text(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open != kind:
            events = self._begin(kind, {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += text
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, piece: Any) -> bytes:
        events = b""
        if self._open != piece.index:
            events = self._begin(piece.index, {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            self._arguments = ""
        if piece.arguments:
            self._arguments += piece.arguments
            events += self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.done:
            self._blocks[-1]["input"] = json.loads(self._arguments)
            events += self._close()
        return events

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return event({"type": "content_block_stop", "index": len(self._blocks) - 1}, "content_block_stop")
