"""Weights that the engine cannot use as the files hold them: converted into an anonymous temporary file at load."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.affine import from_bf16, to_bf16
from lily.errors import CheckpointError, LilyError, OutOfMemoryError
from lily.quantization import Packing, packing_for
from lily.values import read_bytes, write_at, write_matrix

if TYPE_CHECKING:
    from lily.progress import Report

_GROUP = 64
_ALIGNMENT = 256
_BLOCK_BYTES = 4 << 20


@contextmanager
def staged(
    weights: list[dict[str, Any]], *, quantize: int | None = None, memory_limit: int | None = None, report: Report | None = None
) -> Iterator[list[dict[str, Any]]]:
    """The weights with which to make the engine's model, inside the `with` block.

    With `quantize`, unquantised matrices are packed as MLX packs them: that many bits in groups of 64, routers and
    shared-expert gates 8 bits. Scales and biases in float16 or float32 become bfloat16 if each of them is one exactly.
    Both go, matrix by matrix, to a temporary file without a name, in the directory that TMPDIR says.
    """
    plans = {weight["name"]: plan for weight in weights if (plan := _Plan.make(weight, quantize)) is not None}
    if not plans:
        yield weights
        return
    if memory_limit is not None:
        least = sum(plans[w["name"]].bytes if w["name"] in plans else sum(p["bytes"] for p in w["parts"].values()) for w in weights)
        if least > memory_limit:
            raise OutOfMemoryError(
                f"the weights need {least} bytes, the memory limit is {memory_limit}",
                needed=least, available=memory_limit, hint="raise memory_limit or quantise to fewer bits",
            )  # fmt: skip
    size = 0
    for plan in plans.values():
        size = plan.place(size)
    with _temporary(size) as (descriptor, path):
        done, total = 0, sum(plan.elements for plan in plans.values())

        def advance(elements: int) -> None:
            nonlocal done
            done += elements
            if report is not None:
                report("convert", done, total)

        result = []
        for weight in weights:
            plan = plans.get(weight["name"])
            if plan is not None:
                plan.write(descriptor, advance)
            result.append(weight if plan is None else plan.result(path, size))
        yield result


class _Plan:
    """What becomes of one matrix. `packing` is None when only its scales and biases are rewritten."""

    def __init__(self, weight: dict[str, Any], packing: Packing | None) -> None:
        self.weight, self.packing = weight, packing
        self.elements = weight["experts"] * weight["rows"] * weight["cols"]
        shape = packing or Packing(weight["bits"], weight["group"])
        scales = self.elements // shape.group * 2
        sizes = {"weight": self.elements * shape.bits // 8, "scales": scales, "biases": scales}
        self.bytes = sum(sizes.values())
        self.sizes = sizes if packing else {name: sizes[name] for name in ("scales", "biases")}
        self.places: dict[str, int] = {}

    @classmethod
    def make(cls, weight: dict[str, Any], quantize: int | None) -> _Plan | None:
        if weight["kind"] != "linear":
            return None
        if weight["format"] == "affine":
            return None if weight["parts"]["scales"]["dtype"] == "BF16" else cls(weight, None)
        packing = packing_for(weight["name"], weight["cols"], quantize, _GROUP) if quantize else None
        return None if packing is None else cls(weight, packing)

    def place(self, start: int) -> int:
        """Lay the parts out from byte `start` on; returns the end."""
        for name, size in self.sizes.items():
            self.places[name] = -(-start // _ALIGNMENT) * _ALIGNMENT
            start = self.places[name] + size
        return start

    def write(self, target: int, advance: Any) -> None:
        if self.packing is not None:
            write_matrix(self.weight, self.packing, target, self.places, advance)
            return
        for kind, place in self.places.items():
            for before, bits in _bf16_blocks(self.weight, kind):
                write_at(target, bits, place + before)
        advance(self.elements)

    def result(self, path: str, file_bytes: int) -> dict[str, Any]:
        dtypes = {"weight": "U32", "scales": "BF16", "biases": "BF16"}
        parts = {
            name: {"file": path, "offset": place, "bytes": self.sizes[name], "file_bytes": file_bytes, "dtype": dtypes[name]}
            for name, place in self.places.items()
        }
        changes: dict[str, Any] = {"parts": self.weight["parts"] | parts}
        if self.packing is not None:
            stride = self.weight["rows"]
            changes |= {"format": "affine", "bits": self.packing.bits, "group": self.packing.group, "expert_stride_rows": stride}
        return self.weight | changes


def check_scales(weight: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless scales and biases of a quantised matrix are bfloat16, or each equals one."""
    for kind in ("scales", "biases"):
        if weight["parts"][kind]["dtype"] != "BF16":
            for _ in _bf16_blocks(weight, kind):
                pass


def _bf16_blocks(weight: Mapping[str, Any], kind: str) -> Iterator[tuple[int, Any]]:
    """Scales (or biases) in float16 or float32 as bfloat16: `(bytes before, bits)`. Others the kernels cannot read."""
    part, name = weight["parts"][kind], f"{weight['name']}.{kind}"
    dtype = np.dtype("<f2" if part["dtype"] == "F16" else "<f4")
    for start in range(0, part["bytes"], _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, part["bytes"] - start)
        values = np.frombuffer(read_bytes(part["file"], part["offset"] + start, size), dtype).astype(np.float32)
        finite = np.isfinite(values)
        bits = to_bf16(np.where(finite, values, np.float32(0)))
        inexact = (from_bf16(bits) != values) | ~finite
        if inexact.any():
            raise CheckpointError(
                f"tensor {name}: {part['dtype']} values such as {values[inexact][0]:g} are not bfloat16, and Lily's kernels read "
                "bfloat16 only; convert the unquantised checkpoint with `lily convert`, or use a bfloat16 one",
                found=part["dtype"], expected="BF16, or values that it holds exactly", tensor=name,
            )  # fmt: skip
        yield start // dtype.itemsize * 2, bits


@contextmanager
def _temporary(size: int) -> Iterator[tuple[int, str]]:
    """An open file of `size` bytes without a name: it is gone when the last mapping is, whatever ends the process."""
    import tempfile

    with tempfile.TemporaryFile(prefix="lily-", buffering=0) as file:
        descriptor = file.fileno()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
            yield descriptor, f"/dev/fd/{descriptor}"
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise LilyError(
                f"the converted weights need {size} bytes in {tempfile.gettempdir()}, which has too little room; set TMPDIR to "
                "another directory, or write a converted checkpoint once with `lily convert`"
            ) from error
