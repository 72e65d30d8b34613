"""An answer as the items of OpenAI's Responses interface, whole or as its events."""

from __future__ import annotations

import time
from typing import Any

from lily.results import MessageDelta
from lily.server.errors import ApiError
from lily.server.exchange import event, new_id
from lily.server.logprobs import ContentLogprobs
from lily.stepping import Piece, Reading
from lily.tokenizer import Tokenizer

_TEXT, _THOUGHTS = "message", "reasoning"


class ResponsesReply:
    """Items open one after the other: thoughts, text, calls, as they come in the answer."""

    def __init__(self, tokenizer: Tokenizer | None, echo: dict[str, Any]) -> None:
        self._base = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), **echo}
        self._logprobs = ContentLogprobs(tokenizer) if tokenizer is not None else None
        self._items: list[dict[str, Any]] = []
        self._open: str | int | None = None  # the kind of the item that is being written, or the number of its call
        self._last: MessageDelta | None = None
        self._sequence = 0

    def opening(self) -> bytes:
        started = self._response("in_progress")
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def add(self, step: Reading | Piece) -> bytes:
        if isinstance(step, Reading):
            return b""
        delta: MessageDelta = step.delta
        logprobs = self._logprobs.add(delta) if self._logprobs is not None else []
        events = []
        for kind, piece in delta.order:
            if kind == "call":
                events.append(self._call(piece))
            else:
                events.append(self._text(_TEXT if kind == "content" else _THOUGHTS, piece, logprobs if kind == "content" else []))
                logprobs = [] if kind == "content" else logprobs
        if delta.finish_reason is not None:
            self._last = delta
            events.append(self._close(cut=delta.finish_reason == "length"))
        return b"".join(events)

    def closing(self) -> bytes:
        whole = self.whole()
        return self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: ApiError) -> bytes:
        failed = self._response("failed") | {"error": {"code": error.code or "server_error", "message": error.message}}
        return self._event("response.failed", response=failed)

    def whole(self) -> dict[str, Any]:
        assert self._last is not None
        return self._response("incomplete" if self._last.finish_reason == "length" else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        response = self._base | {
            "status": status, "error": None, "output": list(self._items), "usage": self._usage(),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }  # fmt: skip
        if self._last is not None and self._last.message is not None and self._last.message.sampling is not None:
            for name in ("temperature", "top_p"):
                response[name] = getattr(self._last.message.sampling, name)
        return response

    def _usage(self) -> dict[str, Any] | None:
        usage = self._last.usage if self._last is not None else None
        if usage is None:
            return None
        return {
            "input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": usage.reused_tokens},
            "output_tokens": usage.generated_tokens, "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        found = event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return found

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, kind: str | int, item: dict[str, Any]) -> bytes:
        events = self._close()
        self._open = kind
        self._items.append(item)
        bare = item | {name: [] for name in ("content", "summary") if name in item}
        return events + self._event("response.output_item.added", output_index=len(self._items) - 1, item=bare)

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> bytes:
        events = b""
        name = "output_text" if kind == _TEXT else "reasoning_text"
        if self._open != kind:
            part: dict[str, Any] = {"type": name, "text": ""} | ({"annotations": [], "logprobs": []} if kind == _TEXT else {})
            item = {"id": new_id("msg_" if kind == _TEXT else "rs_"), "type": kind, "status": "in_progress", "content": [part]}
            item |= {"role": "assistant"} if kind == _TEXT else {"summary": []}
            events = self._begin(kind, item)
            events += self._event("response.content_part.added", **self._where(), content_index=0, part=dict(part))
        part = self._items[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == _TEXT:
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        return events + self._event(f"response.{name}.delta", **self._where(), content_index=0, delta=text, **more)

    def _call(self, piece: Any) -> bytes:
        events = b""
        if self._open != piece.index:
            item = {
                "id": new_id("fc_"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            events = self._begin(piece.index, item)
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            events += self._event("response.function_call_arguments.delta", **self._where(), delta=piece.arguments)
        return events + (self._close() if piece.done else b"")

    def _close(self, *, cut: bool = False) -> bytes:
        """End the open item; one that was cut is incomplete."""
        if self._open is None:
            return b""
        item, kind = self._items[-1], self._open
        item["status"] = "incomplete" if cut else "completed"
        if isinstance(kind, int):
            events = self._event(
                "response.function_call_arguments.done", **self._where(), name=item["name"], arguments=item["arguments"]
            )  # fmt: skip
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if kind == _TEXT else {}
            name = f"response.{part['type']}.done"
            events = self._event(name, **self._where(), content_index=0, text=part["text"], **more)
            events += self._event("response.content_part.done", **self._where(), content_index=0, part=part)
        self._open = None
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
