"""What this machine can do at most: its memory, its arithmetic and its table lookups, measured with Lily's own loops."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lily._engine import native

# Kinds of arithmetic on floats; the best of them bounds an engine that keeps its activations in bf16 or fp32. The others bound any engine.
FLOAT_KINDS = ("fma", "amx_bf16")
UNITS = {"read": "GB/s", "lookup": "G codes/s", "fma": "GFLOP/s", "int8": "GOP/s", "amx_bf16": "GFLOP/s", "amx_int8": "GOP/s"}
_MEANING = {
    "read": "memory read",
    "lookup": "4-bit codes turned into floats by table",
    "fma": "fp32 multiply-add",
    "int8": "8-bit dot products",
    "amx_bf16": "matrix unit, bf16",
    "amx_int8": "matrix unit, int8",
}
# Beyond this a working set is memory on any machine.
MOST_BYTES = 2 << 30


@dataclass(frozen=True)
class Limit:
    """Rates of one kind in several windows, per second; `nbytes` is the working set of "read".

    `windows` are by the clock; `running` by the time that the threads really ran, which other processes on the same cores hardly touch.
    """

    kind: str
    threads: int
    nbytes: int
    windows: tuple[float, ...]
    running: tuple[float, ...]

    @property
    def best(self) -> float:
        """The fastest window by the clock: what results are compared with."""
        return max(self.windows)

    @property
    def ceiling(self) -> float:
        """The fastest window by either clock: no honest result is above it."""
        return max(*self.windows, *self.running)

    @property
    def median(self) -> float:
        """The middle window: what the machine gave while others used it too."""
        return median(self.windows)

    def merged(self, other: Limit) -> Limit:
        """The windows of both."""
        return Limit(self.kind, self.threads, self.nbytes, self.windows + other.windows, self.running + other.running)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {"kind": self.kind, "threads": self.threads, "bytes": self.nbytes, "best": self.best, "median": self.median,
                "ceiling": self.ceiling, "windows": list(self.windows), "running": list(self.running)}  # fmt: skip

    def __str__(self) -> str:
        where = f" over {self.nbytes / 1e6:,.0f} MB" if self.kind == "read" else ""
        unit = UNITS[self.kind]
        return f"{_MEANING[self.kind]}{where}: {self.best / 1e9:,.1f} {unit} at best, {self.median / 1e9:,.1f} in the middle, ceiling {self.ceiling / 1e9:,.1f}"


def kinds() -> list[str]:
    """What can be measured on this machine: keys of `UNITS`."""
    return native().limit_kinds()


def measure(kind: str, *, nbytes: int = 0, threads: int | None = None, windows: int = 5, seconds: float = 0.1) -> Limit:
    """Rates of one kind on the CPU. `nbytes` is the working set that "read" reads again and again, shared by the threads.

    Raises `ValueError` for a kind that this machine lacks.
    """
    threads = threads or default_threads()
    size = min(max(nbytes, 1 << 16), MOST_BYTES, memory_bytes() // 4) if kind == "read" else 0
    rates = native().measure_limit(kind, size, threads, windows, seconds)
    return Limit(kind, threads, size, tuple(wall for wall, _ in rates), tuple(running for _, running in rates))


def measure_all(*, working_sets: tuple[int, ...], threads: int | None = None, seconds: float = 0.1) -> list[Limit]:
    """Every kind once, "read" for each working set in bytes."""
    found = [measure("read", nbytes=nbytes, threads=threads, seconds=seconds) for nbytes in working_sets]
    return found + [measure(kind, threads=threads, seconds=seconds) for kind in kinds() if kind != "read"]


def default_threads() -> int:
    """Threads that the engine uses here."""
    return next((entry["threads"] for entry in native().devices() if entry["kind"] == "cpu"), 1)


def memory_bytes() -> int:
    """Memory of this machine."""
    return next((entry["memory_bytes"] for entry in native().devices() if entry["kind"] == "cpu"), 1 << 32)


def machine() -> dict[str, Any]:
    """What this machine is, for reports."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "units": [kind for kind in kinds() if kind not in ("read", "lookup")],
        "instruction_sets": native().testing.instruction_sets(),
        "system": f"{platform.system()} {platform.release()}",
        "load": list(os.getloadavg()),
    }
