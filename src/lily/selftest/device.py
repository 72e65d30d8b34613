"""An open device that runs the launches of a case; a variant that LILY_KERNEL forces is a device of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lily._engine import native
from lily.errors import GPUError
from lily.selftest.case import Launch

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

#: Seconds after which a device that gives no answer counts as failed; the simulator is given ten times as many.
TIMEOUT_SECONDS = 60.0


class NoAnswerError(GPUError):
    """The device did not end a submission in time, and may never."""


@dataclass(frozen=True)
class Outcome:
    """What a run wrote, by name; `repeats`: whether a second run gave the same bits; `seconds`: of all launches, when they were timed."""

    arrays: dict[str, Array]
    repeats: bool
    seconds: float | None
    prepare_seconds: float


class OpenDevice:
    """A device by name, opened under a value of LILY_KERNEL (None: none is forced)."""

    def __init__(self, name: str, kernels: str | None = None) -> None:
        self.name, self.kernels = name, kernels
        begin = time.perf_counter()
        with forced(kernels):
            self._native = native().selftest.Device(name)
        self.open_seconds = time.perf_counter() - begin
        self.timeout_seconds = TIMEOUT_SECONDS * (10 if self.simulated else 1)

    @property
    def info(self) -> dict[str, Any]:
        return dict(self._native.info)

    @property
    def simulated(self) -> bool:
        """Whether the simulator of the Metal kernels runs what it is given."""
        return "simulat" in self.info["isa"] + self.info["description"]

    @property
    def gpu(self) -> bool:
        """Whether it takes the GPU's forms of dispatches."""
        return bool(self._native.tile_map)

    def run(self, arrays: dict[str, Array], launches: Sequence[Launch], *, again: bool = False, timed: bool = False) -> Outcome:
        """Runs the launches in order on copies of the arrays they name. Raises `DeviceError`, `GPUError`, `OutOfMemoryError`, `ValueError`."""
        names = list(dict.fromkeys(name for launch in launches for name in launch.buffers if name is not None))
        index = {name: i for i, name in enumerate(names)}
        with forced(self.kernels):
            try:
                found = self._native.run(
                    [launch.to_dict(index) for launch in launches],
                    [np.ascontiguousarray(arrays[name]) for name in names],
                    again=again,
                    timed=timed,
                    timeout_seconds=self.timeout_seconds,
                )
            except GPUError as error:
                if self._native.in_flight:
                    raise NoAnswerError(str(error)) from None
                raise
        written = {
            name: data.view(arrays[name].dtype).reshape(arrays[name].shape)
            for name, data in zip(names, found["buffers"], strict=True)
            if data is not None
        }
        return Outcome(written, found["repeats"], found["seconds"], found["prepare_seconds"])

    def fail_at(self, step: int, stage: int) -> None:
        self._native.fail_at(step, stage)

    def close(self, wait: bool = True) -> None:
        """Gives its memory back. Without `wait` it keeps it: for a device that gives no answer, which closing would wait for."""
        if wait:
            self._native.close()
        else:
            self._native.abandon()


@contextmanager
def forced(kernels: str | None) -> Iterator[None]:
    """LILY_KERNEL for as long as this lasts; the user's own value is back afterwards."""
    before = os.environ.get("LILY_KERNEL")
    if kernels is None:
        os.environ.pop("LILY_KERNEL", None)
    else:
        os.environ["LILY_KERNEL"] = kernels
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("LILY_KERNEL", None)
        else:
            os.environ["LILY_KERNEL"] = before


def user_kernels() -> str | None:
    """What the user's own LILY_KERNEL forces: the device under test obeys it, the reference does not."""
    return os.environ.get("LILY_KERNEL") or None


def variants() -> dict[str, list[str]]:
    """Every kernel with a form for GPUs, and the variants of it that may be forced."""
    return {kernel: list(names) for kernel, names in native().selftest.variants().items()}


class Variants:
    """The devices of forced variants, opened when first asked for.

    As few as possible, for each compiles its kernels: one for the first variant of every kernel, one for the second, and so on.
    Tensor operations, which a GPU may lack, have one to themselves.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: dict[str, OpenDevice] = {}

    def get(self, variant: str) -> OpenDevice:
        """`variant` is "kernel=name", or "*=instruction set" on the CPU."""
        kernels = setting(variant)
        if kernels not in self._open:
            self._open[kernels] = OpenDevice(self.name, kernels)
        return self._open[kernels]

    def close(self, wait: bool = True) -> None:
        for device in self._open.values():
            device.close(wait)
        self._open.clear()


_NO_TENSOR = ("this GPU has no matrix units", "they need macOS", "switched off", "activations in float32")


def may_lack_tensor(description: str) -> bool:
    """Whether a device may have no tensor operations: those of a GPU that has matrix units, on a system that knows them, must work."""
    return "tensor operations: off (" not in description or any(reason in description for reason in _NO_TENSOR)


def setting(variant: str) -> str:
    """The value of LILY_KERNEL, for many kernels together, that holds "kernel=name"."""
    kernel, name = variant.split("=")
    if kernel == "*":
        return variant  # an instruction set of the CPU
    if name.startswith("tensor"):
        return ",".join(f"{k}={name}" for k, names in variants().items() if name in names)
    table = {k: [v for v in names if not v.startswith("tensor")] for k, names in variants().items()}
    at = table[kernel].index(name)
    return ",".join(f"{k}={names[at]}" for k, names in table.items() if len(names) > at)
