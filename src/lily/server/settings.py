"""The settings of a server, checked when made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from lily.sampling import Sampling


@dataclass(frozen=True)
class Settings:
    """How a server listens and what it allows; `lily.serve` says what each means."""

    host: str = "127.0.0.1"
    port: int = 8000
    aliases: Sequence[str] = ()
    any_model: bool = False
    api_key: str | None = field(default=None, repr=False)
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    max_active: int = 16
    max_queue: int = 128
    max_body_bytes: int = 32 << 20
    max_depth: int = 64
    keep_alive_seconds: float = 5.0
    drain_seconds: float = 30.0
    sampling: Sampling | None = None
    log_prompts: bool = False
    page: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ValueError(f"host is {self.host!r}, expected an address such as '127.0.0.1'")
        for name, low, high in (
            ("port", 0, 65535), ("max_active", 1, 1024), ("max_queue", 0, 1 << 20), ("max_body_bytes", 1024, 1 << 40), ("max_depth", 8, 512),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}, expected {low} to {high}")
        for name in ("keep_alive_seconds", "drain_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value <= 86400:
                raise ValueError(f"{name} is {value!r}, expected a number of seconds above 0")
        for name in ("aliases", "cors_origins", "allowed_hosts"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
                raise ValueError(f"{name} is {value!r}, expected a list of texts")
        if self.api_key is not None and (not isinstance(self.api_key, str) or not self.api_key.isascii() or len(self.api_key) < 8):
            raise ValueError("api_key must have at least 8 characters, all of them ASCII")
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling is {type(self.sampling).__name__}, expected lily.Sampling")
