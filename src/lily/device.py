"""The devices of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lily._engine import native


@dataclass(frozen=True)
class DeviceInfo:
    """A device that `from_pretrained(device=name)` accepts. `storage` is the type of activations kept in memory; `threads` is 0 for a GPU, and
    `memory_bytes` what models may use: all of the machine's on a CPU, the working set that macOS recommends on a GPU.

    >>> import lily
    >>> lily.devices()[0].memory_bytes > 0
    True
    """

    name: str
    kind: str
    description: str
    isa: str
    threads: int
    memory_bytes: int
    storage: str

    def __str__(self) -> str:
        threads = f"{self.threads} threads, " if self.threads else ""
        return f"{self.name}: {self.description} ({self.isa}, {threads}{self.memory_bytes / (1 << 30):.0f} GiB, {self.storage})"


def devices() -> list[DeviceInfo]:
    """The devices that are present, the default one first. Raises `DeviceError` when the extension did not load.

    >>> import lily
    >>> "cpu" in [device.name for device in lily.devices()]
    True
    """
    return [device_info(entry) for entry in native().devices()]


def device_info(entry: dict[str, Any]) -> DeviceInfo:
    """From the engine's dict; keys that only some devices have may be absent."""
    return DeviceInfo(
        name=entry["name"],
        kind=entry["kind"],
        description=entry.get("description", entry["name"]),
        isa=entry.get("isa", ""),
        threads=entry.get("threads", 0),
        memory_bytes=entry.get("memory_bytes", 0),
        storage=entry.get("storage", "bfloat16"),
    )
