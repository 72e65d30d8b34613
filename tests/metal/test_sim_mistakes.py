"""Each mistake that a kernel can make at run time is reported, whatever the order of its threads; the same kernel done right is not."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from simulator import needs_clang, simulator

from tests.sim.library import READ, READ_WRITE, WRITE, SimError

SEEDS = [0, 1, 20260101]


@pytest.fixture(scope="module")
def mistakes():
    needs_clang()
    sim = simulator("mistakes", "mistakes_matrix", "mistakes_tensor")
    yield sim
    sim.close()


def numbers(flag: int, n: int = 0) -> bytes:
    return struct.pack("4I", n, flag, 0, 0)


def floats(count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


# kernel, flag of the mistake, threads, threadgroups, elements of x and y, part of the message
CASES = [
    ("divergent_sum", 1, 32, 1, 32, 32, "divergence in simdgroup 0: lane .* reached"),
    ("barrier_under_if", 1, 64, 1, 0, 64, "threadgroup_barrier"),
    ("return_before_barrier", 1, 64, 1, 0, 64, "the end of the kernel|returned"),
    ("exchange", 1, 64, 1, 0, 64, "race: .* threadgroup array 's'"),
    ("exchange", 2, 64, 1, 0, 64, "race: .* threadgroup array 's'"),
    ("wrong_flags", 1, 64, 1, 0, 64, "race: .* threadgroup array 's' .*over threadgroup memory"),
    ("wrong_flags", 2, 64, 1, 0, 64, "race: .* buffer 'y' .*over device memory"),
    ("same_word", 1, 32, 4, 0, 4, "race: writes buffer 'y' at byte 0, which another threadgroup of this dispatch wrote"),
    ("ranges", 1, 32, 1, 32, 32, "out of range: reads 4 bytes at byte 128 of buffer 0 'x' of 128 bytes"),
    ("ranges", 2, 32, 1, 32, 32, "out of range: writes 4 bytes at byte 128 of buffer 1 'y' of 128 bytes"),
    ("ranges", 3, 32, 1, 32, 32, "out of range: writes 4 bytes at byte -4 of buffer 1 'y'"),
    ("ranges", 4, 32, 1, 32, 32, "not bound: reads buffer 2 'z'"),
    ("ranges", 5, 32, 1, 32, 32, "out of range: reads 4 bytes at byte 16 of buffer 20 'arguments' of 16 bytes"),
    ("ranges", 6, 32, 1, 32, 32, "access: writes buffer 0 'x', which is bound for reading only"),
    ("array_overrun", 1, 32, 1, 0, 32, "out of range: writes 4 bytes at byte 128 of threadgroup array 'first' of 128 bytes"),
    ("array_overrun", 2, 32, 1, 0, 32, "out of range: writes 4 bytes .* of threadgroup array 'first' of 128 bytes"),
    ("unequal_turns", 1, 32, 1, 0, 32, "divergence in simdgroup 0"),
    ("uninitialised", 1, 64, 1, 0, 64, "uninitialised: reads threadgroup array 's'"),
    ("hand_over", 1, 64, 1, 0, 64, "race: .* threadgroup array 's' .*no simdgroup_barrier"),
    ("hand_over", 2, 64, 1, 0, 64, "race: .* threadgroup array 's' .*no threadgroup_barrier"),
    ("misaligned", 1, 32, 1, 256, 32, "misaligned: reads 16 bytes at byte 4 of buffer 'x'"),
    ("misaligned", 2, 32, 1, 256, 32, "misaligned: reads 16 bytes at byte 8 of threadgroup array 's'"),
    ("counting", 1, 32, 2, 1, 65, "race: (reads|updates atomically) buffer 'x'"),
    ("counting", 2, 32, 2, 1, 65, "race: .* buffer 'y'"),
    ("two_barriers", 1, 64, 1, 0, 64, "divergence: simdgroup . reached a threadgroup_barrier while other simdgroups wait at another one"),
    ("matrix_hand_over", 1, 32, 1, 64, 64, "race: .* threadgroup array 's' .*no simdgroup_barrier"),
    ("matrix_divergence", 1, 32, 1, 128, 64, "divergence in simdgroup 0: .* did not load and store the same simdgroup matrices"),
]


def run(sim, kernel: str, flag: int, threads: int, groups: int, n_x: int, n_y: int, seed: int) -> np.ndarray:
    sim.set(checking=True, seed=seed)
    sim.barrier()
    if kernel.startswith("matrix_"):
        x = np.zeros(n_x, np.uint16)
    elif kernel == "counting":
        x = np.zeros(n_x, np.uint32)
    else:
        x = floats(n_x)
    y = floats(n_y) if kernel != "counting" else np.zeros(n_y, np.uint32)
    access = READ_WRITE if kernel == "counting" else READ
    buffers = [(x, access) if n_x else None, (y, READ_WRITE), None]
    sim.launch(kernel, buffers, grid=groups, threads=threads, args=numbers(flag, 40), names=["x", "y", "z"])
    return y


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kernel", "flag", "threads", "groups", "n_x", "n_y", "message"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_mistake_is_reported_with_its_place(mistakes, kernel, flag, threads, groups, n_x, n_y, message, seed):
    run(mistakes, kernel, 0, threads, groups, n_x, n_y, seed)
    with pytest.raises(SimError, match=message) as caught:
        run(mistakes, kernel, flag, threads, groups, n_x, n_y, seed)
    assert f"kernel {kernel}" in str(caught.value)


def test_the_message_names_the_line(mistakes):
    from pathlib import Path

    source = (Path(__file__).parents[1] / "sim/mistakes.metal").read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "*to = v;" in text)
    with pytest.raises(SimError, match=rf"mistakes\.metal:{line}\b"):
        run(mistakes, "ranges", 2, 32, 1, 32, 32, 0)


def test_too_much_threadgroup_memory_is_reported(mistakes):
    with pytest.raises(SimError, match="threadgroup memory: 32772 bytes with 'more', at most 32768"):
        mistakes.launch("too_much_memory", [None, floats(32)], threads=32)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_of_the_encoder_is_reported(mistakes, seed):
    mistakes.set(checking=True, seed=seed)
    pages = floats(6 * 4096)  # arrays on pages of their own: a page remembers the last dispatch that read it
    x, y, z = (pages[at : at + 32] for at in (0, 8192, 16384))

    def add_one(source, target, label=""):
        mistakes.launch("add_one", [(source, READ), (target, WRITE)], threads=32, names=["x", "y"], label=label)

    mistakes.barrier()
    add_one(x, y)
    mistakes.barrier()
    add_one(y, z)
    assert (z == 2).all()
    mistakes.barrier()
    add_one(x, y, "first")
    with pytest.raises(SimError, match="race: reads buffer 'x' .*, which add_one at first wrote, with no barrier of the encoder"):
        add_one(y, z)
    mistakes.barrier()
    add_one(x, y, "first")
    with pytest.raises(SimError, match="race: writes buffer 'y' .*, which add_one at first read, with no barrier of the encoder"):
        add_one(z, x)
    mistakes.barrier()
    add_one(x, y, "first")
    with pytest.raises(SimError, match="race: writes buffer 'y' .*, which add_one at first wrote, with no barrier of the encoder"):
        add_one(z, y)
    mistakes.barrier()
    add_one(x, y)
    add_one(x, z)  # two readers need no barrier


def test_neighbouring_buffers_do_not_hide_an_overrun(mistakes):
    both = floats(64)
    mistakes.set(checking=True)
    mistakes.barrier()
    with pytest.raises(SimError, match="out of range: reads 4 bytes at byte 128 of buffer 0"):
        mistakes.launch("ranges", [both[:32], both[32:]], threads=32, args=numbers(1), names=["x", "y"])


def test_two_bindings_of_one_array_see_each_other(mistakes):
    mistakes.set(checking=True)
    mistakes.barrier()
    y = np.arange(32, dtype=np.float32)
    mistakes.launch("add_one", [(y, READ), (y, WRITE)], threads=32, names=["x", "y"])
    assert (y == np.arange(1, 33)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_misused_threads_are_refused(mistakes, seed):
    mistakes.set(checking=True, seed=seed)
    for threads in (0, 33, 2048):
        with pytest.raises(SimError, match="expected a multiple of 32 up to 1024"):
            mistakes.launch("add_one", [floats(32), floats(32)], threads=threads)
    with pytest.raises(SimError, match="no kernel is called 'nothing'"):
        mistakes.launch("nothing", [])


def test_a_matrix_that_starts_uninitialised_is_not_a_number(mistakes):
    assert np.isnan(run(mistakes, "matrix_hand_over", 2, 32, 1, 64, 64, 0)).all()


def test_a_scrambled_layout_shows_who_counts_on_the_layout(mistakes, monkeypatch):
    right, wrong = (run(mistakes, "matrix_layout", flag, 32, 1, 0, 64, 0) for flag in (0, 1))
    monkeypatch.setenv("LILY_SIM_SCRAMBLE", "1")
    assert (run(mistakes, "matrix_layout", 0, 32, 1, 0, 64, 0) == right).all()
    assert (run(mistakes, "matrix_layout", 1, 32, 1, 0, 64, 0) != wrong).any()


def product(sim, flag: int, seed: int, threads: int = 128):
    rng = np.random.default_rng(3)
    sim.set(checking=True, seed=seed)
    sim.barrier()
    x, w = (rng.integers(-8, 8, (rows, 64)).astype(np.float32) for rows in (50, 64))
    y = np.full((50, 64), np.nan, np.float32)
    bits = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in (x, w)]
    sim.launch(
        "tensor_product",
        [(bits[0], READ), (bits[1], READ), (y, WRITE)],
        grid=2,
        threads=threads,
        args=numbers(flag, 50),
        names=["x", "w", "y"],
    )
    return y, x @ w.T


@pytest.mark.parametrize("seed", SEEDS)
def test_tensor_operations_check_barriers_and_flow(mistakes, seed):
    y, expected = product(mistakes, 0, seed)
    assert (y == expected).all()
    with pytest.raises(SimError, match="race: .* threadgroup array 'staged'"):
        product(mistakes, 1, seed)
    with pytest.raises(SimError, match="race: .* threadgroup array 'staged'"):
        product(mistakes, 2, seed)
    with pytest.raises(SimError, match="did not run the same matmul2d operations"):
        product(mistakes, 3, seed)
    with pytest.raises(SimError, match="matmul2d: 2 simdgroups run an operation made for execution_simdgroups<4>"):
        product(mistakes, 0, seed, threads=64)
