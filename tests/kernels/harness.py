"""Runs one kernel by name on numpy arrays, with the argument structs read from metal/include/args.h."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CONSTANTS: dict[str, int] = {}


@lru_cache
def structs() -> dict[str, type]:
    """Every struct of args.h as a ctypes.Structure."""
    text = (ROOT / "metal/include/args.h").read_text()
    for name, value in re.findall(r"#define (LILY_\w+) (\d+)u?\b", text):
        CONSTANTS[name] = int(value)
    text = re.sub(r"//[^\n]*", "", text)
    found: dict[str, type] = {}
    basic = {"uint32_t": ctypes.c_uint32, "float": ctypes.c_float}
    for body, name in re.findall(r"typedef struct \{(.*?)\}\s*(\w+);", text, re.S):
        fields = []
        for declaration in body.split(";"):
            declaration = declaration.strip()
            if not declaration:
                continue
            kind, rest = declaration.split(None, 1)
            base = basic.get(kind) or found[kind]
            for item in rest.split(","):
                m = re.fullmatch(r"\s*(\w+)(?:\[(\w+)\])?\s*", item)
                count = m[2] and (CONSTANTS.get(m[2]) or int(m[2]))
                fields.append((m[1], base * count if count else base))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def make(name: str, **values):
    """A struct of args.h; nested structs are given as dicts, arrays as lists."""
    s = structs()[name]()
    for key, value in values.items():
        field = getattr(s, key)
        if isinstance(field, ctypes.Structure):
            for k, v in value.items():
                setattr(field, k, v)
        elif isinstance(field, ctypes.Array):
            for i, v in enumerate(value):
                if isinstance(v, dict):
                    for k, w in v.items():
                        setattr(field[i], k, w)
                else:
                    field[i] = v
        else:
            assert key in dict(s._fields_), key
            setattr(s, key, value)
    return s


def step(**values) -> np.ndarray:
    return np.frombuffer(bytes(make("LilyStep", **values)), np.uint8).copy()


def bf16(x) -> np.ndarray:
    """float32 -> bfloat16 bits (uint16), nearest even."""
    b = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(b) -> np.ndarray:
    return (np.ascontiguousarray(b, np.uint16).astype(np.uint32) << 16).view(np.float32)


def rb(x) -> np.ndarray:
    return from_bf16(bf16(x))


def act(x, storage: str) -> np.ndarray:
    """An activation buffer as the storage holds it."""
    return bf16(x) if storage == "bfloat16" else np.ascontiguousarray(x, np.float32)


def act_values(buffer: np.ndarray) -> np.ndarray:
    return from_bf16(buffer) if buffer.dtype == np.uint16 else buffer


def isas() -> list[str]:
    from lily import _native

    return _native.testing.instruction_sets()


def variants() -> list[str]:
    """The instruction sets, and the emulated form of AMX where there is AVX-512."""
    from lily import _native

    return _native.testing.variants()


def run(name, args, buffers, groups, *, isa="best", storage="bfloat16", split=None) -> None:
    """Runs threadgroups 0..groups-1 of a kernel on the arrays of `buffers` (None: absent), in ranges of `split` in reverse order when given."""
    from lily import _native

    ranges = [(0, groups)] if split is None else [(b, min(b + split, groups)) for b in range(0, groups, split)][::-1]
    for begin, end in ranges:
        _native.testing.run_kernel(name, isa, storage, bytes(args), list(buffers), begin, end)


def quantize(rng, rows: int, cols: int, bits: int = 4, group: int = 64):
    """Random affine weights: codes packed as MLX does (uint32), bf16 scales and biases (uint16), and the exact float64 values [rows, cols]."""
    codes = rng.integers(0, 2**bits, (rows, cols), dtype=np.uint64)
    scales = rng.normal(0, 0.02, (rows, cols // group)).astype(np.float32)
    scales[np.abs(scales) < 1e-3] = 1e-3
    biases = rng.normal(0, 0.1, (rows, cols // group)).astype(np.float32)
    stream = ((codes[..., None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)).astype(np.uint8).reshape(rows, cols * bits)
    packed = np.packbits(stream, axis=1, bitorder="little").view(np.uint32)
    s, b = bf16(scales), bf16(biases)
    values = np.repeat(from_bf16(s).astype(np.float64), group, 1) * codes.astype(np.float64) + np.repeat(
        from_bf16(b).astype(np.float64), group, 1
    )
    return packed, s, b, values


def unaligned(array: np.ndarray, shift: int = 1) -> np.ndarray:
    """The same bytes at an address that is `shift` bytes off alignment (as uint8)."""
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    store = np.zeros(raw.size + 64 + shift, np.uint8)
    start = (-store.ctypes.data) % 64 + shift
    view = store[start : start + raw.size]
    view[:] = raw
    return view
