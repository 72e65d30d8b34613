"""What the endpoints have in common that are translated into the messages of a chat."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from lily.server.errors import ApiError

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass
class Translated:
    """Messages in OpenAI's form, and for each the place that it came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def assistant(self, place: str) -> dict[str, Any]:
        """The assistant's message at the end, begun when another stands there; thoughts, text and calls of one turn share it."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": ""}, place)
        return self.messages[-1]

    def relocated(self, error: ApiError) -> ApiError:
        """The error with the place in the caller's body."""
        found = _MESSAGE.match(error.param or "")
        if not found or int(found[1]) >= len(self.places):
            return error
        place = self.places[int(found[1])]
        return ApiError(
            error.status, error.message.replace(found[0], place), param=(error.param or "").replace(found[0], place),
            code=error.code, headers=error.headers, extra=error.extra,
        )  # fmt: skip
