"""The products of prefill through matmul2d, on the simulator: against float64, and beside simdgroup_matrix.

Their order of sums within 32 products is the hardware's, so the two forms agree within rounding, not in every bit.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from harness import act, act_values, run, step
from reference_linear import gate_up_rows, gemm, gemm_residual
from reference_moe import moe_gate_up_rows, moe_gemm_rows
from test_gemm import make, run_gate_up, run_gemm
from test_moe import run_gate_up_rows, run_gemm_rows, run_group
from weights import FAST, OTHER, close, weight

import lily

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="needs the simulator: LILY_SIM")
STORAGE = "bfloat16"  # there is no float32 form
TENSOR = dict(isa="sim", variant="tensor")
FACTOR = 4  # one accumulator over all of K, as in test_gemm.py


def rows(rng, T, K):
    return act(rng.normal(0, 1, (T, K)), STORAGE)


@pytest.mark.parametrize("form", FAST + OTHER)
@pytest.mark.parametrize("T,N,K", [(1, 48, 128), (9, 70, 384), (33, 130, 512)])
def test_gemm_is_the_product_in_every_format(T, N, K, form):
    rng = np.random.default_rng(T)
    w, x = weight(rng, N, K, form), rows(rng, T, K)
    y = run_gemm(w, x, STORAGE, **TENSOR)
    close(y, gemm(act_values(x), w.rounded(STORAGE)), factor=FACTOR)
    close(y, run_gemm(w, x, STORAGE, "sim"), factor=FACTOR)


@pytest.mark.parametrize("width", [512, 2048, 4096])
def test_gemm_over_the_widths_of_the_models(width):
    rng = np.random.default_rng(width)
    w, x = weight(rng, 64, width), rows(rng, 17, width)
    close(run_gemm(w, x, STORAGE, **TENSOR), gemm(act_values(x), w.rounded(STORAGE)), factor=FACTOR)


def test_a_row_does_not_depend_on_the_tile():
    rng = np.random.default_rng(1)
    w, x = weight(rng, 80, 320), rows(rng, 40, 320)
    every = run_gemm(w, x, STORAGE, **TENSOR)
    for T in (1, 16, 17, 32):
        assert (run_gemm(w, x[:T].copy(), STORAGE, **TENSOR) == every[:T]).all()


def test_gemm_residual_adds_the_product():
    rng = np.random.default_rng(2)
    w, x, h0 = weight(rng, 100, 256), rows(rng, 13, 256), rng.normal(0, 1, (14, 100)).astype(np.float32)
    h = h0.copy()
    args = make("LilyGemmArgs", fmt=w.format, K=256, N=100, ldy=100)
    run("gemm_residual", args, [step(rows=13), x, h, *w.buffers], 2, storage=STORAGE, **TENSOR)
    close(h[:13], gemm_residual(act_values(x), h0[:13], w.rounded(STORAGE)), factor=FACTOR)
    assert (h[13] == h0[13]).all()


@pytest.mark.parametrize("forms", [("4g64", "4g64"), ("8g64", "4g64"), ("3g64", "bf16")])
@pytest.mark.parametrize("T", [5, 40])
def test_gate_up_rows(T, forms):
    rng = np.random.default_rng(T)
    gate, up = (weight(rng, 100, 128, f) for f in forms)
    x = rows(rng, T, 128)
    want = gate_up_rows(act_values(x), gate.rounded(STORAGE), up.rounded(STORAGE))
    close(act_values(run_gate_up(gate, up, x, STORAGE, **TENSOR)), want, rounded=True, factor=FACTOR)


@pytest.mark.parametrize("forms", [("4g64", "4g64"), ("5g32", "bf16")])
@pytest.mark.parametrize("T", [1, 65])
def test_grouped_products(T, forms):
    rng = np.random.default_rng(T)
    E, k, N, K = 16, 4, 80, 192
    gate, up = (weight(rng, E * N, K, f) for f in forms)
    x = rows(rng, T, K)
    ids = np.argsort(rng.random((T, E - 2)) + np.arange(E - 2) * 0.05, axis=1)[:, :k].astype(np.uint32)
    offsets, slot_row, _ = run_group(ids, E)
    gathered = x[slot_row].copy()
    stacks = [w.rounded(STORAGE).reshape(E, N, K) for w in (gate, up)]
    y = [run_gemm_rows(gate, E, offsets, slot_row, x, STORAGE, tile_rows=t, **TENSOR) for t in (16, 32)]
    a = [run_gate_up_rows(gate, up, E, offsets, slot_row, x, STORAGE, tile_rows=t, **TENSOR) for t in (16, 32)]
    close(y[0], moe_gemm_rows(offsets, act_values(gathered), stacks[0]), factor=FACTOR)
    close(act_values(a[0]), moe_gate_up_rows(offsets, act_values(gathered), *stacks), rounded=True, factor=FACTOR)
    assert (y[0] == y[1]).all() and (a[0] == a[1]).all()  # tiles of 16 and of 32 rows


def test_float32_is_refused():
    rng = np.random.default_rng(3)
    with pytest.raises(lily.DeviceError, match="gemm_tensor"):
        run_gemm(weight(rng, 16, 64), act(rng.normal(0, 1, (2, 64)), "float32"), "float32", **TENSOR)
