"""Values of weights, read from their files block by block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.affine import from_bf16, quantize, to_bf16
from lily.errors import CheckpointError
from lily.quantization import Packing

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    Array = np.ndarray[Any, Any]

_BLOCK_ELEMENTS = 1 << 18
_DTYPES = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


@dataclass(frozen=True)
class Block:
    """`count` rows of the weight from `row` on (experts one after the other); `start` is their byte in the file."""

    row: int
    count: int
    start: int


def blocks_of(weight: Mapping[str, Any]) -> list[Block]:
    """An unquantised matrix in pieces of half a megabyte or a little more, none of which crosses an expert."""
    part, rows, cols = weight["parts"]["weight"], weight["rows"], weight["cols"]
    row_bytes = cols * _DTYPES[part["dtype"]].itemsize
    step = max(1, _BLOCK_ELEMENTS // cols)
    return [
        Block(expert * rows + row, min(step, rows - row), part["offset"] + (expert * weight["expert_stride_rows"] + row) * row_bytes)
        for expert in range(weight["experts"])
        for row in range(0, rows, step)
    ]


def read_floats(weight: Mapping[str, Any], start: int, shape: tuple[int, ...]) -> Array:
    """float32 values of a float tensor from byte `start` of its file. Raises `CheckpointError` for NaN and infinity."""
    part = weight["parts"]["weight"]
    dtype = _DTYPES[part["dtype"]]
    raw = np.frombuffer(read_bytes(part["file"], start, int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    values = from_bf16(raw) if part["dtype"] == "BF16" else raw.astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"tensor {weight['name']}: holds a value that is not finite; the file is damaged, download it again",
            found="NaN or infinity", expected="finite values", tensor=weight["name"],
        )  # fmt: skip
    return values


def read_bytes(path: str, start: int, size: int) -> bytearray:
    """`size` bytes of a file from `start` on."""
    data = bytearray(size)
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            view, done = memoryview(data), 0
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{path}: became shorter while it was read", found=start + done, expected=start + size)
                done += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return data


def write_matrix(
    weight: Mapping[str, Any], packing: Packing | None, target: int, places: Mapping[str, int], advance: Callable[[int], None]
) -> None:
    """Write an unquantised matrix to the file descriptor `target`: packed as MLX does, or as bfloat16 without `packing`.

    `places` has the byte at which `weight`, `scales` and `biases` begin; `advance` is told the elements done. float16
    and float32 are rounded to bfloat16 first, as mlx-lm does for a bfloat16 model.
    """
    cols = weight["cols"]

    def convert(block: Block) -> int:
        bf16 = to_bf16(read_floats(weight, block.start, (block.count, cols)))
        if packing is None:
            write_at(target, bf16, places["weight"] + block.row * cols * 2)
        else:
            arrays = quantize(from_bf16(bf16), packing.bits, packing.group)
            for name, array in zip(("weight", "scales", "biases"), arrays, strict=True):
                write_at(target, array, places[name] + block.row * array.shape[1] * array.itemsize)
        return block.count * cols

    with _workers() as pool:
        for elements in pool.map(convert, blocks_of(weight)):
            advance(elements)


def write_at(target: int, array: Array, place: int) -> None:
    """Write an array's bytes to a file descriptor at `place`."""
    view, done = memoryview(np.ascontiguousarray(array)).cast("B"), 0
    while done < len(view):
        done += os.pwrite(target, view[done:], place + done)


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads for numpy's loops; what has not begun is dropped when something fails or Ctrl-C is pressed."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
