"""The matrix products of prefill against float64: every row count gives a row the same bits."""

import numpy as np
import pytest
from harness import act, act_values, make, rb, run, step, variants
from reference_linear import expand_rows, gate_up_rows, gemm, gemm_residual, swiglu_rows
from weights import FAST, OTHER, close, grid, weight

STORAGES = ["bfloat16", "float32"]
isa = pytest.mark.parametrize("isa", variants())
#: Variants that agree in every bit.
X86 = [name for name in variants() if name in ("amx", "amx-emulated", "avx512", "avx2")]
x86 = pytest.mark.skipif(len(X86) < 2, reason="needs AVX2 and AVX-512")
storage = pytest.mark.parametrize("storage", STORAGES)


def run_gemm(w, x, storage, isa="best", T=None, ldy=None, out=0, round=0, **kw):
    N, K = w.values.shape
    T = len(x) if T is None else T
    y = np.full((len(x), ldy or N), 7, np.float32)
    args = make("LilyGemmArgs", fmt=w.format, K=K, N=N, ldy=ldy or N, out=out, round=round)
    run("gemm", args, [step(rows=T), x, y, *w.buffers], grid(len(x), N), isa=isa, storage=storage, **kw)
    return y


def run_gate_up(gate, up, x, storage, isa="best", **kw):
    N, K = gate.values.shape
    a = act(np.zeros((len(x), N)), storage)
    args = make("LilyGemmArgs", fmt=gate.format, up=up.format, K=K, N=N)
    run("gate_up_rows", args, [step(rows=len(x)), x, a, *gate.buffers, *up.buffers], grid(len(x), N), isa=isa, storage=storage, **kw)
    return a


@isa
@storage
@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("K", [64, 128, 192, 512, 2048])
def test_gemm_is_the_product(K, form, storage, isa):
    rng = np.random.default_rng(K)
    for T, N in [(1, 48), (5, 16), (7, 130), (16, 64), (65, 32)]:
        w = weight(rng, N, K, form)
        x = act(rng.normal(0, 1, (T, K)), storage)
        close(run_gemm(w, x, storage, isa), gemm(act_values(x), w.rounded(storage)))


@isa
@pytest.mark.parametrize("form", OTHER)
@pytest.mark.parametrize("storage", STORAGES)
def test_gemm_reads_every_format(form, storage, isa):
    rng = np.random.default_rng(1)
    w = weight(rng, 70, 384, form)
    x = act(rng.normal(0, 1, (9, 384)), storage)
    close(run_gemm(w, x, storage, isa), gemm(act_values(x), w.rounded(storage)))


@isa
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_products_read_every_width_in_every_group(bits, group, isa):
    """Over more than one staged piece of a row, alone and as a pair of which the other has 4 bits."""
    rng = np.random.default_rng(bits * group)
    w, up = weight(rng, 20, 1152, f"{bits}g{group}"), weight(rng, 20, 1152)
    x = act(rng.normal(0, 1, (5, 1152)), "bfloat16")
    factor = 4 if isa == "sim" else 1  # as in test_gate_up_rows_is_its_parts
    close(run_gemm(w, x, "bfloat16", isa), gemm(act_values(x), w.rounded("bfloat16")), factor=factor)
    for pair in ((w, w), (w, up), (up, w)):
        want = gate_up_rows(act_values(x), *(p.rounded("bfloat16") for p in pair))
        close(act_values(run_gate_up(*pair, x, "bfloat16", isa)), want, rounded=True, factor=factor)


@isa
@storage
@pytest.mark.parametrize("K", [16, 48, 80, 272])
def test_half_a_block_of_k_counts_as_far_as_it_goes(K, storage, isa):
    rng = np.random.default_rng(K)
    w = weight(rng, 50, K, "bf16")
    x = act(rng.normal(0, 1, (37, K)), storage)
    close(run_gemm(w, x, storage, isa), gemm(act_values(x), w.rounded(storage)))


@isa
@pytest.mark.parametrize("form", FAST + OTHER)
def test_gemm_reads_weights_at_odd_addresses(form, isa):
    rng = np.random.default_rng(2)
    w = weight(rng, 33, 384, form)
    x = act(rng.normal(0, 1, (4, 384)), "bfloat16")
    assert (run_gemm(w.unaligned(), x, "bfloat16", isa) == run_gemm(w, x, "bfloat16", isa)).all()


@isa
@pytest.mark.parametrize("N", [1, 4, 16, 32, 48, 64, 65, 200])
def test_partial_tiles_leave_the_rest_alone(N, isa):
    rng = np.random.default_rng(N)
    w = weight(rng, N, 128)
    x = act(rng.normal(0, 1, (6, 128)), "bfloat16")
    scale = np.sqrt((w.values**2).sum(1).mean())
    y = run_gemm(w, x, "bfloat16", isa, T=5, ldy=N + 9, out=3, round=1)
    want = gemm(act_values(x), w.rounded("bfloat16"))
    close(y[:5, 3 : 3 + N], want[:5], scale, rounded=True)
    assert (y[:5, 3 : 3 + N] == rb(y[:5, 3 : 3 + N])).all()
    y[:5, 3 : 3 + N] = 7
    assert (y == 7).all()


@isa
@storage
@pytest.mark.parametrize("form", FAST)
def test_a_row_does_not_depend_on_the_row_count(form, storage, isa):
    rng = np.random.default_rng(3)
    w = weight(rng, 80, 320 if form != "bf16" else 352, form)
    x = act(rng.normal(0, 1, (1100, w.values.shape[1])), storage)
    every = run_gemm(w, x, storage, isa)
    for T in (1, 2, 5, 6, 7, 16, 17, 32, 33, 63, 64, 65, 300):
        assert (run_gemm(w, x[:T].copy(), storage, isa) == every[:T]).all()
    for t in (0, 64, 511, 512, 1099):
        assert (run_gemm(w, x[t : t + 1].copy(), storage, isa) == every[t]).all()


@isa
def test_ranges_of_threadgroups_may_be_cut_anywhere(isa):
    """Outputs vary fastest among the threadgroups, so a range can begin in one block of 256 rows and end in another."""
    rng = np.random.default_rng(5)
    w, up = weight(rng, 200, 256), weight(rng, 200, 256)
    x = act(rng.normal(0, 1, (600, 256)), "bfloat16")
    whole, pair = run_gemm(w, x, "bfloat16", isa), run_gate_up(w, up, x, "bfloat16", isa)
    for split in (1, 3, 5, 11):
        assert (run_gemm(w, x, "bfloat16", isa, split=split) == whole).all()
        assert (run_gate_up(w, up, x, "bfloat16", isa, split=split) == pair).all()


def bits(a):
    return a.view(np.uint32 if a.dtype == np.float32 else np.uint16)


@x86
@storage
@pytest.mark.parametrize("form", FAST + OTHER)
def test_x86_variants_agree_in_every_bit(form, storage):
    rng = np.random.default_rng(4)
    for T, N, K in [(8, 100, 384), (33, 64, 1152), (300, 16, 640), (128, 100, 512), (90, 130, 384)]:
        w, up = weight(rng, N, K, form), weight(rng, N, K, form)
        x = act(rng.normal(0, 1, (T, K)), storage)
        product, pair = run_gemm(w, x, storage, X86[0]), run_gate_up(w, up, x, storage, X86[0])
        for other in X86[1:]:
            assert (bits(run_gemm(w, x, storage, other)) == bits(product)).all()
            assert (bits(run_gate_up(w, up, x, storage, other)) == bits(pair)).all()


@x86
@pytest.mark.parametrize("exponent", [-45, -42, -40, -38, -30, 30])
def test_x86_variants_agree_at_the_edges_of_the_range(exponent):
    """Tile units count subnormals as zero, operands and results alike; so does every other form."""
    rng = np.random.default_rng(12)
    w = weight(rng, 64, 512)
    x = act(rng.normal(0, 1, (40, 512)) * 10.0 ** (exponent + rng.integers(0, 5, (40, 512))), "bfloat16")
    found = [run_gemm(w, x, "bfloat16", variant) for variant in X86]
    for other in found[1:]:
        assert (bits(other) == bits(found[0])).all()
    smallest = np.abs(found[0][found[0] != 0]).min(initial=1)
    assert smallest >= np.finfo(np.float32).tiny


@pytest.mark.parametrize("isa", [i for i in variants() if i != "sim"])  # the contract of the CPU; a GPU has its own
def test_the_order_of_sums_is_the_contract(isa):
    """Blocks of 32, even and odd products apart, in float32 with fused multiply-adds."""
    rng = np.random.default_rng(5)
    K = 1088
    w = weight(rng, 48, K)
    x = act(rng.normal(0, 1, (35, K)), "bfloat16")
    xv, wv = act_values(x).astype(np.float64), w.rounded("bfloat16")
    acc = np.zeros((35, 48), np.float32)
    for k0 in range(0, K, 32):
        sums = np.zeros((2, 35, 48), np.float32)
        for k in range(32):  # bf16 products are exact in float64, and so is one more addend of their size
            sums[k % 2] = (sums[k % 2].astype(np.float64) + np.outer(xv[:, k0 + k], wv[:, k0 + k])).astype(np.float32)
        acc += sums[0] + sums[1]
    assert (run_gemm(w, x, "bfloat16", isa) == acc).all()


@isa
@storage
def test_gemm_residual_adds_the_product(storage, isa):
    rng = np.random.default_rng(6)
    w = weight(rng, 100, 256)
    x, h0 = act(rng.normal(0, 1, (13, 256)), storage), rng.normal(0, 1, (14, 100)).astype(np.float32)
    h = h0.copy()
    args = make("LilyGemmArgs", fmt=w.format, K=256, N=100, ldy=100)
    run("gemm_residual", args, [step(rows=13), x, h, *w.buffers], 2, isa=isa, storage=storage, split=1)
    close(h[:13], gemm_residual(act_values(x), h0[:13], w.rounded(storage)))
    assert (h[:13] == h0[:13] + run_gemm(w, x, storage, isa)).all()
    assert (h[13] == h0[13]).all()


@isa
@storage
@pytest.mark.parametrize("forms", [("4g64", "4g64"), ("8g64", "4g64"), ("3g64", "bf16")])
def test_gate_up_rows_is_its_parts(forms, storage, isa):
    rng = np.random.default_rng(7)
    T, N, K = 270, 100, 128
    gate, up = (weight(rng, N, K, f) for f in forms)
    x = act(rng.normal(0, 1, (T, K)), storage)
    a = run_gate_up(gate, up, x, storage, isa, split=1)
    # The Metal kernels keep one accumulator over all of K, where the CPU adds sums of 32; two such sums are multiplied here.
    factor = 4 if isa == "sim" else 1
    want = gate_up_rows(act_values(x), gate.rounded(storage), up.rounded(storage))
    close(act_values(a), want, rounded=storage == "bfloat16", factor=factor)
    twin = act(np.zeros((T, N)), storage)
    parts = [run_gemm(w, x, storage, isa) for w in (gate, up)]
    run("swiglu_rows", make("LilyGemmArgs", N=N, rows_per_token=1), [step(rows=T), *parts, twin], T, isa=isa, storage=storage)
    assert (a == twin).all()


@isa
@storage
@pytest.mark.parametrize("N", [16, 100, 512])
def test_swiglu_rows_covers_the_live_rows(N, storage, isa):
    rng = np.random.default_rng(N)
    gate, up = rng.normal(0, 3, (2, 5 * 3, N)).astype(np.float32)
    a = act(np.full((5 * 3, N), 7), storage)
    run("swiglu_rows", make("LilyGemmArgs", N=N, rows_per_token=3), [step(rows=4), gate, up, a], 5, isa=isa, storage=storage, split=2)
    close(act_values(a)[:12], swiglu_rows(gate, up)[:12], rounded=storage == "bfloat16")
    assert (act_values(a)[12:] == 7).all()


@isa
@storage
@pytest.mark.parametrize("form", FAST + OTHER)
def test_expand_rows_are_the_rounded_weights(form, storage, isa):
    """Three rows of 1,152 values: more than the CPU takes at a time."""
    w = weight(np.random.default_rng(4), 3, 1152, form)
    out = act(np.zeros((3, 1152)), storage)
    run("expand_rows", make("LilyGemmArgs", fmt=w.format, K=1152, N=3), [*w.buffers, out], 3, isa=isa, storage=storage)
    want = expand_rows(w.values.astype(np.float32))
    assert np.array_equal(act_values(out), rb(want) if storage == "bfloat16" else want)
