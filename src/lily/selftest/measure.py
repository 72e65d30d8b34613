"""How far two results are apart, and how far they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.affine import from_bf16

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Error:
    """A distance and its bound, both in `unit`."""

    value: float
    bound: float
    unit: str
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.value <= self.bound  # a NaN fails

    @property
    def share(self) -> float:
        """Of the bound that is used up; the greatest of several errors is the one to show."""
        if np.isnan(self.value):
            return np.inf
        return self.value / self.bound if self.bound else (np.inf if self.value else 0.0)

    def __str__(self) -> str:
        return f"{self.value:.2g} {self.unit}, at most {self.bound:.2g}"


class Check:
    """A rule for one written array; `errors` compares what the device wrote with what the reference wrote."""

    def errors(self, got: Array, want: Array) -> list[Error]:
        raise NotImplementedError


class Same(Check):
    """Every bit: ids, offsets, copies, exact look-ups."""

    def errors(self, got: Array, want: Array) -> list[Error]:
        return [differing(got, want)]


def differing(got: Array, want: Array) -> Error:
    """How many values differ in a bit."""
    bits = np.dtype(f"u{got.dtype.itemsize}")
    count = int(np.count_nonzero(got.view(bits) != want.view(bits)))
    return Error(count, 0, "values differ")


@dataclass(frozen=True)
class Near(Check):
    """float32 sums: the greatest difference, as a share of the root mean square of the reference.

    Each device is within 1e-5 of float64 (the bar of the kernel tests), so two of them are within 2e-5 of each other.
    `value`: what one value's own size adds to its bound, as a share of it, for outputs with a few values far above the others.
    """

    bound: float = 2e-5
    value: float = 4e-6

    def errors(self, got: Array, want: Array) -> list[Error]:
        difference, scale, size = _compared(got, want)
        share = difference / (scale + self.value / self.bound * size)
        return [Error(float(np.max(share, initial=0)), self.bound, "of the RMS")]


@dataclass(frozen=True)
class Rms(Check):
    """Root mean square of the differences, as a share of that of the reference: where something inside is rounded to bfloat16
    and a value near the middle of two of its steps may go either way."""

    bound: float

    def errors(self, got: Array, want: Array) -> list[Error]:
        difference, scale, _ = _compared(got, want)
        return [Error(float(np.sqrt(np.mean(difference**2))) / scale if difference.size else 0.0, self.bound, "RMS")]


@dataclass(frozen=True)
class Rounded(Check):
    """bfloat16 outputs of float32 sums: no value is more than a step off, and nearly none is off at all.

    `sums` is the bound of the sums before they are rounded, as a share of the RMS: the step of small values is below it.
    `rms` bounds all differences together; a kernel that cuts off instead of rounding has 2.3e-3.
    """

    sums: float = 2e-5
    rms: float = 3e-4

    def errors(self, got: Array, want: Array) -> list[Error]:
        difference, scale, size = _compared(got, want)
        step = 2.0 ** (np.floor(np.log2(np.maximum(size, 1e-30))) - 7)
        steps = difference / (step + 2 * self.sums * scale)
        return [Error(float(np.max(steps, initial=0)), 1.0, "bf16 steps"), *Rms(self.rms).errors(got, want)]


def _compared(got: Array, want: Array) -> tuple[Array, float, Array]:
    """|got - want| in float64, the RMS of `want` and |want|. What neither wrote is left out; what one wrote counts as infinite."""
    got, want = _floats(got), _floats(want)
    gone = np.isnan(want)
    same = gone & np.isnan(got)
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - want)
    difference[(got == want) & ~gone] = 0  # infinities of one sign
    difference[np.isnan(difference)] = np.inf
    live = ~same
    known = want[live & np.isfinite(want)]
    scale = float(np.sqrt(np.mean(known**2))) if known.size else 1.0
    return difference[live], scale or 1.0, np.abs(np.nan_to_num(want[live], posinf=0, neginf=0))


def _floats(values: Array) -> Array:
    values = from_bf16(values) if values.dtype == np.uint16 else values
    return values.astype(np.float64).reshape(-1)
