"""One row of the selftest before it runs: the arrays, the dispatches over them, and what must hold for what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.affine import from_bf16, to_bf16
from lily.selftest.contract import contracts, structs
from lily.selftest.measure import Check, Near, Rms, Rounded

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

#: The weight formats that a checkpoint may hold; the first is that of the released 4-bit ones.
FORMATS = ("4g64", "8g64", "bf16", "2g32", "3g64", "4g32", "4g128", "5g128", "6g32", "8g32", "f16", "f32")
EPS = 1e-6
_WEIGHT_PARTS = (".codes", ".scales", ".biases")


@dataclass(frozen=True)
class Launch:
    """One dispatch: a kernel, its arguments, and its buffers by name (None: absent) in the order of the contract."""

    kernel: str
    args: Any
    buffers: Sequence[str | None]
    groups: int  # of the CPU's grid
    rows: int = 1
    indirect: int = -1
    access: str = ""  # of the buffers, where it is not what args.h states

    def to_dict(self, index: dict[str, int]) -> dict[str, Any]:
        """As the extension takes it; `index` numbers the arrays."""
        access = self.access or contracts()[self.kernel]
        access += "r" * len(self.buffers)
        uses = [None if name is None else (index[name], letter) for name, letter in zip(self.buffers, access, strict=False)]
        return {
            "kernel": self.kernel, "args": bytes(self.args), "uses": uses, "groups": self.groups, "rows": self.rows, "indirect": self.indirect,
        }  # fmt: skip


@dataclass(frozen=True)
class Form:
    """Another way to the same results on the same device: other dispatches, a variant that LILY_KERNEL forces, or both.

    `bits`: it gives the bits of the default one, by promise; otherwise it is held against the CPU, as the default is.
    """

    name: str
    launches: Sequence[Launch] | None = None
    variant: str | None = None
    bits: bool = True
    gpu: bool = True  # only devices with a tile map have it
    rounded: bool = False  # only where activations are bfloat16


@dataclass
class Case:
    """`launches` on the device under test, `cpu` (where it differs) on the CPU; `checks` by the name of a written array."""

    arrays: dict[str, Array]
    launches: Sequence[Launch]
    checks: dict[str, Check]
    cpu: Sequence[Launch] | None = None
    forms: Sequence[Form] = ()
    bytes: int | None = None  # that have to move; left out, each buffer of each launch once per read or write

    def moved(self) -> int:
        if self.bytes is not None:
            return self.bytes
        total = 0
        for launch in self.launches:
            access = (launch.access or contracts()[launch.kernel]) + "r" * len(launch.buffers)
            for name, letter in zip(launch.buffers, access, strict=False):
                if name is not None:
                    total += self.arrays[name].nbytes * (2 if letter == "b" else 1)
        return total

    def in_float32(self) -> Case:
        """The same for a device that keeps activations in float32: only the order of sums may differ then."""
        arrays = {
            name: from_bf16(array) if array.dtype == np.uint16 and not name.endswith(_WEIGHT_PARTS) else array
            for name, array in self.arrays.items()
        }
        checks = {name: Near(1e-4) if isinstance(check, Rms | Rounded) else check for name, check in self.checks.items()}
        return replace(self, arrays=arrays, checks=checks)


@dataclass(frozen=True)
class Spec:
    """A case by name; it is built when it runs. `real`: of the 35B model's widths; `slow`: many seconds on the simulator."""

    kernel: str
    shape: str
    build: Callable[[], Case]
    real: bool = False
    slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"


def blank(*shape: int, dtype: Any = np.float32) -> Array:
    """An output before it is written: not-a-number, or the greatest integer."""
    out = np.empty(shape, dtype)
    out.view(np.uint8).fill(0xFF)
    return out


def act(values: Array) -> Array:
    """Activations as a bfloat16 device stores them."""
    return to_bf16(values)


def act_blank(*shape: int) -> Array:
    return blank(*shape, dtype=np.uint16)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    values = rng.standard_normal(shape, np.float32)
    values *= np.float32(scale)
    return values


def ssq(h: Array) -> Array:
    """Partial sums of squares, each of 16 values."""
    return (h.reshape(-1, 16).astype(np.float64) ** 2).sum(1).astype(np.float32)


def blocks(n: int, size: int = 16) -> int:
    return -(-n // size)


@dataclass(frozen=True)
class Weight:
    """A matrix of random numbers: `format` for the argument struct, `codes`, `scales`, `biases` (None where the format has none)."""

    format: dict[str, int]
    codes: Array
    scales: Array | None = None
    biases: Array | None = None

    def add(self, arrays: dict[str, Array], name: str) -> list[str | None]:
        """Puts the parts into `arrays`; returns their names in the order of the contract."""
        names: list[str | None] = []
        for part in ("codes", "scales", "biases"):
            value = getattr(self, part)
            if value is None:
                names.append(None)
                continue
            arrays[f"{name}.{part}"] = value
            names.append(f"{name}.{part}")
        return names

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.biases) if part is not None)


def weight(rng: np.random.Generator, rows: int, cols: int, form: str = "4g64") -> Weight:
    """`[rows, cols]` in a format of `FORMATS`; values of about 0.1, whatever the bits."""
    structs()
    if form[0].isdigit():
        bits, group = map(int, form.split("g"))
        codes = rng.integers(0, 2**32, (rows, cols * bits // 32), np.uint32)
        scales = normal(rng, rows, cols // group, scale=0.3 / 2**bits)
        biases = normal(rng, rows, cols // group, scale=0.1)
        return Weight({"kind": 0, "bits": bits, "group": group}, codes, to_bf16(scales), to_bf16(biases))
    plain = normal(rng, rows, cols, scale=0.1)
    if form == "bf16":
        return Weight({"kind": 1}, to_bf16(plain))
    if form == "f16":
        half = plain.astype(np.float16)
        half.reshape(-1)[:2] = [6e-8, -3e-5]  # subnormal
        return Weight({"kind": 2}, half)
    return Weight({"kind": 3}, plain)
