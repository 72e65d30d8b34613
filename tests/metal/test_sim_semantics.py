"""Kernels without a mistake compute what Metal says, are never reported, and are counted exactly."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from simulator import needs_clang, simulator

from tests.sim.library import READ, WRITE

SEEDS = [0, 1, 77]
seeds = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture(scope="module")
def clean():
    needs_clang()
    sim = simulator("clean")
    yield sim
    sim.close()


def numbers(n: int = 0, flag: int = 0, a: int = 0) -> bytes:
    return struct.pack("4I", n, flag, a, 0)


def prepared(sim, seed: int, counting: bool = False):
    sim.set(checking=True, seed=seed, counting=counting)
    sim.barrier()
    return sim


def bf16(x: np.ndarray) -> np.ndarray:
    """float64 -> float32 -> bfloat16, nearest even, as bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@seeds
def test_the_functions_of_a_simdgroup(clean, seed):
    rng = np.random.default_rng(seed)
    x = (rng.integers(-64, 64, 64) / 8).astype(np.float32)
    y = np.full((16, 64), np.nan, np.float32)
    prepared(clean, seed).launch("lanes", [(x, READ), (y, WRITE)], threads=64)
    for half in (slice(0, 32), slice(32, 64)):
        v, out, lane = x[half], y[:, half], np.arange(32)
        n = np.trunc(v * 8).astype(np.int64) & 255 if (v >= 0).all() else None
        assert (out[0] == v.sum()).all()
        assert (out[1] == v.max()).all() and (out[2] == v.min()).all()
        assert (out[3] == v[lane ^ 5]).all()
        assert (out[4][:29] == v[3:]).all()
        assert (out[5][2:] == v[:30]).all()
        assert (out[6] == v[7]).all()
        assert (out[7] == v[::-1]).all()
        assert (out[8] == np.cumsum(v)).all()
        assert (out[9] == np.cumsum(v) - v).all()
        votes = int(sum(1 << i for i in range(16) if v[i] > 0))
        assert (out[10] == votes).all()
        assert (out[11] == 0).all() and (out[12] == 1).all()
        assert n is None or (out[13] == np.bitwise_or.reduce(n)).all()


def test_the_bits_of_a_simdgroup(clean):
    x = (np.arange(32) * 7 % 32 / 8).astype(np.float32)
    y = np.full((16, 32), np.nan, np.float32)
    prepared(clean, 5).launch("lanes", [(x, READ), (y, WRITE)])
    n = (x * 8).astype(np.int64)
    assert (y[13] == np.bitwise_or.reduce(n)).all()
    assert (y[14] == np.bitwise_and.reduce(n)).all()
    assert (y[15] == np.bitwise_xor.reduce(n)).all()


def test_bfloat_and_half_round_to_nearest_even(clean):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, 1024).astype(np.float32)
    x[:8] = [0.0, -0.0, 1.00390625, 1.01171875, 65504.0, 1e-40, 3e38, -2.5]
    b, h = np.zeros((3, 1024), np.uint16), np.zeros((3, 1024), np.uint16)
    prepared(clean, 0).launch("rounding", [(x, READ), (b, WRITE), (h, WRITE)], grid=8, threads=128, args=numbers(1024))
    v = from_bf16(bf16(x))
    after = np.roll(v, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        assert (b[0] == bf16(x)).all()
        assert (b[1] == bf16(v * after)).all()
        assert (b[2] == bf16(v + after)).all()
        v16 = x.astype(np.float16)
        assert (h[0] == v16.view(np.uint16)).all()
        assert (h[1] == (v16 * np.roll(v16, -1)).view(np.uint16)).all()
        assert (h[2] == (v16 + np.roll(v16, -1)).view(np.uint16)).all()


def test_vectors(clean):
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (32, 4)).astype(np.float32)
    z = rng.integers(0, 2**32, 32, dtype=np.uint32)
    y, w = np.zeros_like(x), np.zeros_like(x)
    factor = int(np.float32(0.5).view(np.uint32))
    prepared(clean, 0, counting=True).launch("vectors", [(x, READ), (y, WRITE), (z, READ), (w, WRITE)], constants=[0, 0, factor])
    assert (y == x[:, ::-1] + 1).all()
    assert (w == z.view(np.uint8).reshape(32, 4) * np.float32(0.5)).all()
    by_name = {t.name: t for t in clean.counters().traffic}
    assert (by_name["buffer0"].bytes_read, by_name["buffer0"].transactions) == (512, 4)


def test_function_constants_are_those_of_the_launch(clean):
    y = np.zeros(32, np.float32)
    table = np.tile(np.float32([1, 0.5, 0.25, 0.125]), 8)
    prepared(clean, 0)
    for values, factor in [((3, 0), 3), ((3, 1), 6), ((), 0), ((5, 1), 10)]:
        clean.launch("constants", [None, (y, WRITE)], constants=values)
        assert (y == table * factor).all()
        clean.barrier()


@seeds
@pytest.mark.parametrize("checking", [True, False])
def test_sums_through_threadgroup_memory(clean, seed, checking):
    x = np.random.default_rng(2).integers(-9, 9, (5, 300)).astype(np.float32)
    y = np.zeros(5, np.float32)
    for threads in (32, 96, 1024):
        clean.set(checking=checking, seed=seed)
        clean.barrier()
        clean.launch("row_sum", [(x, READ), (y, WRITE)], grid=5, threads=threads, args=numbers(300))
        assert (y == x.sum(1)).all()


@seeds
@pytest.mark.parametrize("checking", [True, False])
def test_atomics_of_many_threadgroups_lose_nothing(clean, seed, checking):
    x = np.random.default_rng(3).integers(0, 16, 4096).astype(np.uint32)
    counts = np.zeros(16, np.uint32)
    clean.set(checking=checking, seed=seed)
    clean.barrier()
    clean.launch("histogram", [(x, READ), counts], grid=32, threads=128)
    assert (counts == np.bincount(x, minlength=16)).all()


@seeds
def test_a_simdgroup_hands_over_with_simdgroup_barriers(clean, seed):
    y = np.zeros(64, np.float32)
    prepared(clean, seed).launch("relay", [None, (y, WRITE)], threads=64)
    assert (y == np.tile(np.arange(32), 2)).all()


@seeds
@pytest.mark.parametrize("scramble", ["0", "1"])
@pytest.mark.parametrize("kind", ["bfloat", "half"])
def test_matrices_do_not_depend_on_their_layout(clean, seed, scramble, kind, monkeypatch):
    monkeypatch.setenv("LILY_SIM_SCRAMBLE", scramble)
    a, b = (np.random.default_rng(s).integers(-8, 8, (8, 8)).astype(np.float32) for s in (4, 5))
    bits = [bf16(v) if kind == "bfloat" else v.astype(np.float16).view(np.uint16) for v in (a, b)]
    y = np.zeros((8, 8), np.float32)
    prepared(clean, seed).launch(f"product_{kind}", [(bits[0], READ), (bits[1], READ), (y, WRITE)])
    assert (y == 2 * (a @ b.T)).all()


@seeds
def test_transactions_are_lines_of_128_bytes_of_a_simdgroup(clean, seed):
    prepared(clean, seed, counting=True)
    for distance, lines in [(1, 1), (2, 2), (8, 8), (32, 32), (64, 32)]:
        x, z, y = np.ones(64 * distance, np.float32), np.ones(2, np.float32), np.zeros(2, np.float32)
        clean.barrier()
        clean.launch("strides", [(x, READ), (z, READ), (y, WRITE)], threads=64, args=numbers(a=distance), names=["x", "z", "y"])
        counted = clean.counters()
        of_x, of_z, of_y = counted.traffic
        assert (y == 64).all()
        assert of_x.bytes_read in (2 * 128, 4 * 128)  # the compiler may read x once for both turns
        times = of_x.bytes_read // 256
        assert of_x.unique_bytes_read == 64 * 4
        assert of_x.transactions == 2 * lines * times
        assert of_x.coalescing == 1 / lines
        assert (of_z.bytes_read, of_z.unique_bytes_read, of_z.transactions) == (16, 8, 4)
        assert (of_y.bytes_written, of_y.unique_bytes_written, of_y.transactions) == (8, 8, 2)
        assert counted.threadgroups == 1 and counted.barriers == 0


def test_barriers_and_threadgroup_memory_are_counted(clean):
    x, counts = np.zeros(256, np.uint32), np.zeros(16, np.uint32)
    prepared(clean, 0, counting=True).launch("histogram", [(x, READ), counts], grid=2, threads=128, names=["x", "counts"])
    counted = clean.counters()
    assert (counted.threadgroups, counted.barriers, counted.threadgroup_bytes) == (2, 4, 64)
    assert counted.traffic[0].bytes_read == 1024


@seeds
def test_lanes_that_stop_early_are_counted(clean, seed):
    y = np.zeros(81, np.float32)
    prepared(clean, seed, counting=True).launch("ragged", [None, y], args=numbers(81), names=["none", "y"])
    t = clean.counters().traffic[1]
    assert (y == 1).all()
    assert (t.bytes_read, t.bytes_written, t.transactions) == (324, 324, 6)
    assert (t.unique_bytes_read, t.unique_bytes_written) == (324, 324)
