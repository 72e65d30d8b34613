"""The matrix-vector kernels of decode against float64, and bit for bit against each other."""

import numpy as np
import pytest
from harness import act, act_values, isas, make, run, step
from reference_linear import gate_up_norm, gemv, gemv_norm, gemv_residual, normed, ssq
from weights import FAST, OTHER, blocks, close, weight

STORAGES = ["bfloat16", "float32"]
EPS = 1e-6
isa = pytest.mark.parametrize("isa", isas())
storage = pytest.mark.parametrize("storage", STORAGES)


def run_gemv(w, x, storage, isa="best", round=0, **kw):
    rows, K = w.values.shape
    y = np.full(rows + 4, 7, np.float32)
    args = make("LilyGemvArgs", fmt=w.format, K=K, n_segments=1, seg=[dict(rows=rows, out=0, round=round)])
    run("gemv", args, [x, y, *w.buffers], blocks(rows), isa=isa, storage=storage, **kw)
    assert (y[rows:] == 7).all()
    return y[:rows]


def stream(rng, K):
    h = rng.normal(0, 1, K).astype(np.float32)
    return h, ssq(h).astype(np.float32), rng.normal(1, 0.1, K).astype(np.float32)


def run_gate_up(gate, up, h, sums, norm, storage, isa="best", **kw):
    inner, K = gate.values.shape
    a = act(np.zeros(inner), storage)
    args = make("LilyGateUpArgs", gate=gate.format, up=up.format, K=K, I=inner, eps=EPS)
    run("gate_up_norm", args, [h, sums, norm, a, *gate.buffers, *up.buffers], blocks(inner), isa=isa, storage=storage, **kw)
    return a


def run_norm_gemv(ws, outs, rounds, h, sums, norm, storage, isa="best", **kw):
    K = ws[0].values.shape[1]
    y = np.zeros(max(o + len(w.values) for o, w in zip(outs, ws, strict=True)), np.float32)
    seg = [dict(rows=len(w.values), out=o, round=r) for w, o, r in zip(ws, outs, rounds, strict=True)]
    args = make("LilyGemvArgs", fmt=ws[0].format, K=K, n_segments=len(ws), eps=EPS, seg=seg)
    run(
        "gemv_norm",
        args,
        [h, sums, norm, y, *sum((w.buffers for w in ws), [])],
        sum(blocks(len(w.values)) for w in ws),
        isa=isa,
        storage=storage,
        **kw,
    )
    return y


def norm_rows(h, norm, storage, isa="best"):
    """x of the norm kernel on its own, and the partial sums as the residual kernel writes them."""
    K = len(h)
    x, sums, copy = act(np.zeros(K), storage), np.zeros(K // 16, np.float32), h.copy()
    run("rmsnorm_rows", make("LilyNormArgs", H=K, eps=EPS), [step(rows=1), h, norm, x], 1, isa=isa, storage=storage)
    run("residual_step", make("LilyNormArgs", H=K, eps=EPS), [np.zeros(K, np.float32), copy, sums], 1, isa=isa, storage=storage)
    return x, sums


@isa
@storage
@pytest.mark.parametrize("form", FAST)
@pytest.mark.parametrize("K", [64, 128, 192, 256, 384, 512, 2048, 4096])
def test_gemv_is_the_product(K, form, storage, isa):
    rng = np.random.default_rng(K)
    for rows in (4, 17, 48):
        w = weight(rng, rows, K, form)
        x = act(rng.normal(0, 1, K), storage)
        close(run_gemv(w, x, storage, isa), gemv(act_values(x), w.values))


@isa
@pytest.mark.parametrize("form", OTHER)
@pytest.mark.parametrize("K", [128, 384, 2048])
def test_gemv_reads_every_format(K, form, isa):
    rng = np.random.default_rng(K)
    w = weight(rng, 21, K, form)
    x = act(rng.normal(0, 1, K), "bfloat16")
    close(run_gemv(w, x, "bfloat16", isa), gemv(act_values(x), w.values))


@isa
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_gemv_reads_every_width_in_every_group(bits, group, isa):
    """Rows that fill a simdgroup's chunks, and rows that end inside of them."""
    rng = np.random.default_rng(bits * group)
    for K in (128, 640, 1152):
        w = weight(rng, 7, K, f"{bits}g{group}")
        x = act(rng.normal(0, 1, K), "bfloat16")
        close(run_gemv(w, x, "bfloat16", isa), gemv(act_values(x), w.values))


@isa
@pytest.mark.parametrize("form", FAST + OTHER)
def test_gemv_reads_weights_at_odd_addresses(form, isa):
    rng = np.random.default_rng(1)
    w = weight(rng, 33, 384, form)
    x = act(rng.normal(0, 1, 384), "bfloat16")
    assert (run_gemv(w.unaligned(), x, "bfloat16", isa) == run_gemv(w, x, "bfloat16", isa)).all()


@pytest.mark.parametrize("form", FAST + ["3g64", "f32"])
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 32, 48, 512])
def test_a_row_does_not_depend_on_its_neighbours(rows, form):
    rng = np.random.default_rng(2)
    w = weight(rng, 512, 192, form)
    x = act(rng.normal(0, 1, 192), "bfloat16")
    every = run_gemv(w, x, "bfloat16")
    part = type(w)(w.format, [None if b is None else b[512 - rows :].copy() for b in w.buffers], w.values[512 - rows :])
    assert (run_gemv(part, x, "bfloat16") == every[512 - rows :]).all()
    assert (run_gemv(part, x, "bfloat16", split=3) == every[512 - rows :]).all()


@storage
@pytest.mark.parametrize("form", FAST + OTHER)
def test_avx2_and_avx512_agree_in_every_bit(form, storage):
    if not {"avx2", "avx512"} <= set(isas()):
        pytest.skip("needs AVX2 and AVX-512")
    rng = np.random.default_rng(3)
    w, up = weight(rng, 50, 640, form), weight(rng, 50, 640, form)
    x = act(rng.normal(0, 1, 640), storage)
    assert (run_gemv(w, x, storage, "avx2") == run_gemv(w, x, storage, "avx512")).all()
    s = stream(rng, 640)
    assert (run_gate_up(w, up, *s, storage, "avx2") == run_gate_up(w, up, *s, storage, "avx512")).all()


@isa
@storage
@pytest.mark.parametrize("form", FAST + ["6g32"])
def test_gemv_norm_takes_segments(form, storage, isa):
    rng = np.random.default_rng(4)
    K, rows, rounds = 256, (48, 20, 1, 32), (1, 0, 0, 1)
    outs = (40, 0, 20, 90)
    h, _, norm = stream(rng, K)
    x, sums = norm_rows(h, norm, storage, isa)
    assert np.abs(act_values(x) - normed(h, norm, EPS)).max() < (0.02 if storage == "bfloat16" else 1e-5)
    ws = [weight(rng, n, K, form) for n in rows]
    y = run_norm_gemv(ws, outs, rounds, h, sums, norm, storage, isa)
    for w, want, o, r in zip(ws, gemv_norm(act_values(x), [w.values for w in ws]), outs, rounds, strict=True):
        got = y[o : o + len(w.values)]
        close(got, want, scale=np.sqrt((w.values**2).sum(1).mean()), rounded=bool(r) and storage == "bfloat16")
        if r:
            assert (got == act_values(act(got, storage))).all()


@isa
@storage
@pytest.mark.parametrize("form", FAST)
def test_gemv_norm_is_norm_then_gemv(form, storage, isa):
    rng = np.random.default_rng(5)
    K = 384
    h, _, norm = stream(rng, K)
    x, sums = norm_rows(h, norm, storage, isa)
    ws = [weight(rng, n, K, form) for n in (33, 1, 16)]
    y = run_norm_gemv(ws, (0, 33, 34), (1, 0, 0), h, sums, norm, storage, isa, split=2)
    for w, o, r in zip(ws, (0, 33, 34), (1, 0, 0), strict=True):
        assert (y[o : o + len(w.values)] == run_gemv(w, x, storage, isa, round=r)).all()


@isa
@storage
@pytest.mark.parametrize("form", FAST + ["6g32"])
def test_gemv_takes_segments(form, storage, isa):
    """Up to four weights of one format that read the same x, each with the bits that it has alone."""
    rng = np.random.default_rng(7)
    K, sizes, outs, rounds = 256, (48, 20, 1, 33), (40, 0, 20, 90), (1, 0, 0, 1)
    x = act(rng.normal(0, 1, K), storage)
    ws = [weight(rng, n, K, form) for n in sizes]
    for count in (2, 3, 4):
        y = np.full(130, 7, np.float32)
        seg = [dict(rows=n, out=o, round=r) for n, o, r in zip(sizes, outs, rounds, strict=True)][:count]
        args = make("LilyGemvArgs", fmt=ws[0].format, K=K, n_segments=count, seg=seg)
        buffers = [x, y, *sum((w.buffers for w in ws[:count]), [])]
        run("gemv", args, buffers, sum(blocks(n) for n in sizes[:count]), isa=isa, storage=storage, split=3)
        touched = np.zeros(len(y), bool)
        for w, n, o, r in list(zip(ws, sizes, outs, rounds, strict=True))[:count]:
            close(y[o : o + n], gemv(act_values(x), w.values), rounded=bool(r) and storage == "bfloat16")
            assert (y[o : o + n] == run_gemv(w, x, storage, isa, round=r)).all()
            touched[o : o + n] = True
        assert (y[~touched] == 7).all()


@isa
@storage
@pytest.mark.parametrize("rows", [16, 48, 512])
def test_gemv_residual_adds_and_sums_squares(rows, storage, isa):
    rng = np.random.default_rng(rows)
    K = 192
    w = weight(rng, rows, K)
    x, h0 = act(rng.normal(0, 1, K), storage), rng.normal(0, 1, rows).astype(np.float32)
    args = make("LilyGemvArgs", fmt=w.format, K=K, n_segments=1, seg=[dict(rows=rows)])
    h, sums = h0.copy(), np.zeros(rows // 16, np.float32)
    run("gemv_residual", args, [x, h, sums, *w.buffers], blocks(rows), isa=isa, storage=storage, split=2)
    want_h, want_sums = gemv_residual(act_values(x), h0, w.values)
    close(h, want_h)
    close(sums, want_sums)
    twin, twin_sums = h0.copy(), np.zeros(rows // 16, np.float32)
    y = run_gemv(w, x, storage, isa)
    run("residual_step", make("LilyNormArgs", H=rows, eps=EPS), [y, twin, twin_sums], 1, isa=isa, storage=storage)
    assert (h == twin).all()
    assert (sums == twin_sums).all()


@isa
@storage
@pytest.mark.parametrize("forms", [("4g64", "4g64"), ("8g64", "4g64"), ("bf16", "3g64")])
def test_gate_up_norm_is_its_parts(forms, storage, isa):
    rng = np.random.default_rng(6)
    K, inner = 384, 80
    gate, up = (weight(rng, inner, K, f) for f in forms)
    h, _, norm = stream(rng, K)
    x, sums = norm_rows(h, norm, storage, isa)
    a = run_gate_up(gate, up, h, sums, norm, storage, isa, split=2)
    close(act_values(a), gate_up_norm(act_values(x), gate.values, up.values), rounded=storage == "bfloat16")
    twin = act(np.zeros(inner), storage)
    parts = [run_gemv(w, x, storage, isa) for w in (gate, up)]
    run("swiglu_rows", make("LilyGemmArgs", N=inner, rows_per_token=1), [step(rows=1), *parts, twin], 1, isa=isa, storage=storage)
    assert (a == twin).all()
