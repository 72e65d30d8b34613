"""Runs one kernel by name on numpy arrays, with the argument structs read from metal/include/args.h."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

import numpy as np

from lily.selftest.contract import contracts, make, step, structs

__all__ = ["make", "step", "structs"]


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


@lru_cache
def isas() -> list[str]:
    """Where kernels run: the instruction sets of this machine, and the simulator of the Metal kernels when LILY_SIM names one."""
    from lily import _native

    return _native.testing.instruction_sets() + (["sim"] if os.environ.get("LILY_SIM") else [])


@lru_cache
def variants() -> list[str]:
    """The same with the emulated form of AMX where there is AVX-512."""
    from lily import _native

    return _native.testing.variants() + (["sim"] if os.environ.get("LILY_SIM") else [])


def affordable(isa: str, rows: int, keys: int = 100) -> bool:
    """Whether a case is run here: the simulator takes tens of seconds for many rows, so LILY_SIM_LONG (set by .ci/soak) decides."""
    return isa != "sim" or rows * keys <= 2_000 or bool(os.environ.get("LILY_SIM_LONG"))


def run_sim(name, args, buffers, groups, *, storage="bfloat16", rows=None, indirect=-1, variant="", seed=0) -> dict:
    """One launch on the simulator, every access checked against the arrays and the contract of args.h. Returns what it counted."""
    from lily import _native

    access = contracts()[name]
    access = (access + "r" * len(buffers))[: len(buffers)]
    if rows is None:  # as in a program: the row bucket, here the live rows of the step record or the CPU's grid
        is_step = buffers[0] is not None and buffers[0].nbytes == ctypes.sizeof(structs()["LilyStep"])
        rows = max(1, int(buffers[0].view(np.uint32)[2])) if is_step else 1
    placed = [unaligned(b, 0) if b is not None and a == "r" and b.ctypes.data % 16 else b for a, b in zip(access, buffers, strict=True)]
    return _native.testing.run_sim(name, storage, bytes(args), placed, access, groups, rows, indirect, variant, seed)


def run(name, args, buffers, groups, *, isa="best", storage="bfloat16", split=None, **sim) -> None:
    """Runs threadgroups 0..groups-1 of a kernel on the arrays of `buffers` (None: absent), in ranges of `split` in reverse order when given."""
    from lily import _native

    if isa == "sim":
        run_sim(name, args, buffers, groups, storage=storage, seed=0 if split is None else split, **sim)
        return
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
