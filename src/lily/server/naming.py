"""The names under which the one loaded model answers. Nothing is looked up anywhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lily.server.errors import ApiError

DEFAULT = "default"


class Names:
    """The source as it was given, its last part, the aliases and "default"; the first of `listed` is the model's own."""

    def __init__(self, source: str, aliases: Sequence[str] = (), *, any_model: bool = False) -> None:
        path = source.rstrip("/\\")
        last = os.path.basename(path) or "model"
        hub_id = [] if os.path.isdir(source) or source == last else [source]
        self.listed = list(dict.fromkeys([*aliases, last, *hub_id, DEFAULT]))
        self._known = {name.lower() for name in (*self.listed, source, path)}
        self._any = any_model

    @property
    def own(self) -> str:
        """The name that answers bear."""
        return self.listed[0]

    def check(self, name: str | None) -> str:
        """The name for the answer: the one asked for. Raises `ApiError` 404 with the list."""
        if not name:
            return self.own
        if self._any or name.rstrip("/\\").lower() in self._known or name.lower() in self._known:
            return name
        listed = ", ".join(self.listed)
        raise ApiError(404, f"model {name[:200]!r} is not loaded; this server has {listed}", param="model", code="model_not_found")
