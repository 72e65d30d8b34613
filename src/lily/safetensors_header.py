"""Headers of safetensors files, checked so that every tensor they describe really lies inside its file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily.errors import CheckpointError

# Bits of one element. Tensors that Lily skips may have any of these.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
_MAX_DIM = 1 << 48
_MAX_DIMS = 8


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. `offset` counts from the start of the file; offsets need no alignment."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    file_bytes: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file by name. Raises `CheckpointError` for anything that does not add up."""
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _broken(path, f"has {file_bytes} bytes, too few for a safetensors header")
            length = int.from_bytes(prefix, "little")
            if length > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _broken(path, f"declares a header of {length} bytes, but the file has {file_bytes}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"has a header that is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "has a header that is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(path, name, entry, start, file_bytes) for name, entry in header.items()}
    _no_overlap(tensors)
    return tensors


def missing_bytes(path: Path) -> int:
    """How many bytes the file lacks by what its own beginning says; 0 when it is whole or says nothing usable."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                return max(8 + length - size, 8 - size, 0) if length <= MAX_HEADER_BYTES else 0
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return max(0, 8 + length + max(end for end in ends if _is_size(end)) - size)
    except (OSError, ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor(path: Path, name: str, entry: Any, start: int, file_bytes: int) -> Tensor:
    def bad(what: str, found: object, expected: object) -> CheckpointError:
        return CheckpointError(
            f"{path}: tensor {name}: {what} is {str(found)[:80]}, expected {expected}; the file may be damaged, "
            "download it again",
            found=found, expected=expected, tensor=name,
        )  # fmt: skip

    if not isinstance(entry, dict):
        raise bad("entry", entry, "an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad("dtype", dtype, "a safetensors dtype")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(_is_size(n) for n in shape):
        raise bad("shape", shape, "a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise bad("data_offsets", offsets, "two offsets")
    begin, end = offsets
    if not begin <= end <= file_bytes - start:
        raise bad("data_offsets", offsets, f"a range within the {file_bytes - start} bytes of data in the file")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        raise bad("size", f"{end - begin} bytes", f"{bits / 8:g} bytes for {dtype} {shape}")
    return Tensor(name, path, dtype, tuple(shape), start + begin, end - begin, file_bytes)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_DIM


def _no_overlap(tensors: dict[str, Tensor]) -> None:
    previous: Tensor | None = None
    for tensor in sorted((t for t in tensors.values() if t.bytes), key=lambda t: t.offset):
        if previous is not None and tensor.offset < previous.offset + previous.bytes:
            raise CheckpointError(
                f"{tensor.path}: tensors {previous.name} and {tensor.name} overlap; the file is damaged",
                found=tensor.offset, expected=previous.offset + previous.bytes, tensor=tensor.name,
            )  # fmt: skip
        previous = tensor


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; the download may be broken")
