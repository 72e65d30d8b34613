"""Mixture of experts, decode and prefill, against float64 and against the unfused kernels."""

import numpy as np
import pytest
from harness import act, act_values, isas, make, run, step, variants
from reference_linear import gate_up_norm, normed, ssq
from reference_moe import moe_combine_rows, moe_down, moe_gate_up, moe_gate_up_rows, moe_gemm_rows, moe_gemv, moe_group, moe_topk_rows
from weights import blocks, close, grid, weight

STORAGES = ["bfloat16", "float32"]
EPS = 1e-6
isa = pytest.mark.parametrize("isa", isas())
on_cpu = pytest.mark.parametrize("isa", [i for i in isas() if i != "sim"])
rows_isa = pytest.mark.parametrize("isa", variants())
storage = pytest.mark.parametrize("storage", STORAGES)
shapes = pytest.mark.parametrize("E,k", [(16, 4), (256, 8)])
forms = pytest.mark.parametrize("forms", [("4g64", "4g64"), ("8g64", "4g64"), ("5g32", "bf16")])


def run_topk(logits, k, isa="best", rows=None):
    T, E = logits.shape
    ids, route = np.full((T, k), 7777, np.uint32), np.zeros((T, k), np.float32)
    run("moe_topk_rows", make("LilyMoeRowsArgs", E=E, k=k), [step(rows=T if rows is None else rows), logits, ids, route], T, isa=isa)
    return ids, route


def run_gate_up(gate, up, h, sums, norm, logits, k, storage, isa="best", **kw):
    E, (n, K) = len(logits), gate.values.shape
    inner = n // E
    ids, route, a = np.zeros(k, np.uint32), np.zeros(k, np.float32), act(np.zeros((k, inner)), storage)
    args = make("LilyMoeArgs", a=gate.format, b=up.format, K=K, I=inner, E=E, k=k, a_stride=inner, b_stride=inner, eps=EPS)
    run(
        "moe_gate_up",
        args,
        [h, sums, norm, logits, ids, route, a, *gate.buffers, *up.buffers],
        k * blocks(inner),
        isa=isa,
        storage=storage,
        **kw,
    )
    return ids, route, a


def run_moe_gemv(w, E, ids, x, storage, isa="best", **kw):
    n, K = w.values.shape
    y = np.zeros((len(ids), n // E), np.float32)
    args = make("LilyMoeArgs", a=w.format, K=K, I=n // E, H=n // E, E=E, k=len(ids), a_stride=n // E, per_expert_input=int(x.ndim == 2))
    run("moe_gemv", args, [ids, x, y, *w.buffers], len(ids) * blocks(n // E), isa=isa, storage=storage, **kw)
    return y


def run_gemv(w, x, storage, isa="best"):
    rows, K = w.values.shape
    y = np.zeros(rows, np.float32)
    run(
        "gemv",
        make("LilyGemvArgs", fmt=w.format, K=K, n_segments=1, seg=[dict(rows=rows)]),
        [x, y, *w.buffers],
        blocks(rows),
        isa=isa,
        storage=storage,
    )
    return y


def run_swiglu(gate, up, storage, isa="best"):
    a = act(np.zeros(gate.shape), storage)
    args = make("LilyGemmArgs", N=gate.shape[1], rows_per_token=len(gate))
    run("swiglu_rows", args, [step(rows=1), gate, up, a], 1, isa=isa, storage=storage)
    return a


def run_combine(slot_of, route, y, shared, shared_logit, h, isa="best", rows=None):
    """slot_of None: y is in the order of rows and choices."""
    T, k = route.shape
    h = h.copy()
    args = make("LilyMoeRowsArgs", k=k, H=h.shape[1])
    buffers = [
        step(rows=T if rows is None else rows),
        slot_of if slot_of is None else slot_of.astype(np.uint32),
        route,
        y,
        shared,
        shared_logit,
        h,
    ]
    run("moe_combine_rows", args, buffers, T, isa=isa)
    return h


def run_group(ids, E, rows=None, isa="best"):
    T, k = ids.shape
    offsets, slot_row, slot_of = np.full(E + 1, 9, np.uint32), np.full(T * k, 7777777, np.uint32), np.full((T, k), 7777777, np.uint32)
    run(
        "moe_group",
        make("LilyMoeRowsArgs", E=E, k=k),
        [step(rows=T if rows is None else rows), ids, offsets, slot_row, slot_of],
        1,
        isa=isa,
    )
    return offsets, slot_row, slot_of


def tiles(offsets, tile_rows, width, isa):
    """What the Metal form of a grouped product takes more: the tile map and the launch grid of outputs `width` to a tile. On the CPU nothing."""
    if isa != "sim":
        return []
    map_ = [
        (e, s, min(tile_rows, end - s), 0)
        for e, (first, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))
        for s in range(first, end, tile_rows)
    ]
    return [np.array(map_, np.uint32), np.array([blocks(width, 64), len(map_), 1], np.uint32)]


def run_gemm_rows(w, E, offsets, slot_row, x, storage, isa="best", by_slot=0, tile_rows=16, **kw):
    n, K = w.values.shape
    N = n // E
    y = np.full((len(slot_row), N), 7, np.float32)
    args = make("LilyMoeRowsArgs", a=w.format, K=K, N=N, E=E, a_stride=N, by_slot=by_slot, tile_rows=tile_rows)
    more = tiles(offsets, tile_rows, N, isa)
    if more:
        kw |= {"indirect": 8}
    run("moe_gemm_rows", args, [offsets, slot_row, x, y, *w.buffers, *more], E * blocks(N, 64), isa=isa, storage=storage, **kw)
    return y


def run_gate_up_rows(gate, up, E, offsets, slot_row, x, storage, isa="best", tile_rows=16, **kw):
    n, K = gate.values.shape
    N = n // E
    a = act(np.zeros((len(slot_row), N)), storage)
    args = make("LilyMoeRowsArgs", a=gate.format, b=up.format, K=K, N=N, E=E, a_stride=N, b_stride=N, tile_rows=tile_rows)
    more = tiles(offsets, tile_rows, 2 * N, isa)
    if more:
        kw |= {"indirect": 11}
    buffers = [offsets, slot_row, x, a, *gate.buffers, *up.buffers, *more]
    run("moe_gate_up_rows", args, buffers, E * blocks(N, 64), isa=isa, storage=storage, **kw)
    return a


def stream(rng, K, storage, isa):
    """h, its partial sums, a norm weight, and x as the norm kernel gives it."""
    h, norm = rng.normal(0, 1, K).astype(np.float32), rng.normal(1, 0.1, K).astype(np.float32)
    sums, x = ssq(h).astype(np.float32), act(np.zeros(K), storage)
    run("residual_step", make("LilyNormArgs", H=K, eps=EPS), [np.zeros(K, np.float32), h.copy(), sums], 1, isa=isa, storage=storage)
    run("rmsnorm_rows", make("LilyNormArgs", H=K, eps=EPS), [step(rows=1), h, norm, x], 1, isa=isa, storage=storage)
    assert np.abs(act_values(x) - normed(h, norm, EPS)).max() < 0.02
    return h, sums, norm, x


@isa
@shapes
def test_topk_weights_sum_to_one(E, k, isa):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (33, E)).astype(np.float32)
    logits[0] += 200  # only differences count
    logits[1] *= 100
    ids, route = run_topk(logits, k, isa, rows=32)
    want_ids, want_route = moe_topk_rows(logits[:32], k)
    assert (ids[:32] == want_ids).all()
    close(route[:32], want_route, scale=0.1)
    assert np.abs(route[:32].sum(1) - 1).max() < 1e-6
    assert (ids[32] == 7777).all()


@isa
def test_ties_go_to_the_lower_expert(isa):
    rng = np.random.default_rng(1)
    logits = rng.integers(-3, 4, (50, 256)).astype(np.float32) / 2
    logits[0] = 0
    ids, route = run_topk(logits, 8, isa)
    want, want_route = moe_topk_rows(logits, 8)
    assert (ids == want).all()
    assert (ids[0] == np.arange(8)).all()
    close(route, want_route)


@isa
@storage
@forms
@shapes
def test_moe_gate_up_is_its_parts(E, k, forms, storage, isa):
    rng = np.random.default_rng(E)
    K, inner = 192, 48 if E == 16 else 16
    gate, up = (weight(rng, E * inner, K, f) for f in forms)
    h, sums, norm, x = stream(rng, K, storage, isa)
    logits = rng.integers(-8, 8, E).astype(np.float32) / 4  # ties included
    ids, route, a = run_gate_up(gate, up, h, sums, norm, logits, k, storage, isa, split=2)
    want_ids, want_route, want = moe_gate_up(act_values(x), logits, k, gate.stacked(E), up.stacked(E))
    assert (ids == want_ids).all()
    close(route, want_route)
    close(act_values(a), want, rounded=storage == "bfloat16")
    twin_ids, twin_route = run_topk(logits[None], k, isa)
    assert (ids == twin_ids[0]).all()
    assert (route == twin_route[0]).all()
    parts = [run_moe_gemv(w, E, ids, x, storage, isa) for w in (gate, up)]
    assert (a == run_swiglu(*parts, storage, isa)).all()


@isa
@storage
@forms
def test_the_shared_expert_may_go_as_a_ninth(forms, storage, isa):
    """With the bits that it has beside the router, and the chosen experts with theirs."""
    rng = np.random.default_rng(9)
    E, k, K, inner, S = 16, 4, 192, 48, 70
    gate, up = (weight(rng, E * inner, K, f) for f in forms)
    shared_gate, shared_up = (weight(rng, S, K, f) for f in forms)
    h, sums, norm, x = stream(rng, K, storage, isa)
    logits = rng.normal(0, 1, E).astype(np.float32)
    ids, route, a = run_gate_up(gate, up, h, sums, norm, logits, k, storage, isa)
    found_ids, found_route, found = np.zeros_like(ids), np.zeros_like(route), np.zeros_like(a)
    shared, beside = act(np.zeros(S), storage), act(np.zeros(S), storage)
    both = [*shared_gate.buffers, *shared_up.buffers]
    args = make("LilyMoeArgs", a=gate.format, b=up.format, K=K, I=inner, S=S, E=E, k=k, a_stride=inner, b_stride=inner, ninth=1, eps=EPS)
    buffers = [h, sums, norm, logits, found_ids, found_route, found, *gate.buffers, *up.buffers, *both, shared]
    run("moe_gate_up", args, buffers, k * blocks(inner) + blocks(S), isa=isa, storage=storage, split=3)
    assert (found_ids == ids).all() and (found_route == route).all() and (found == a).all()
    args = make("LilyGateUpArgs", gate=gate.format, up=up.format, K=K, I=S, eps=EPS)
    run("gate_up_norm", args, [h, sums, norm, beside, *both], blocks(S), isa=isa, storage=storage)
    assert (shared == beside).all()
    want = gate_up_norm(act_values(x), shared_gate.values, shared_up.values)
    close(act_values(shared), want, rounded=storage == "bfloat16")


@isa
@storage
@forms
@pytest.mark.parametrize("H", [64, 2048])
def test_moe_down_is_its_parts(H, forms, storage, isa):
    rng = np.random.default_rng(H)
    E, k, inner, S = 16, 4, 64, 192
    if forms == ("5g32", "bf16"):
        S = 96
    down, shared_down = weight(rng, E * H, inner, forms[0]), weight(rng, H, S, forms[1])
    a, shared = act(rng.normal(0, 1, (k, inner)), storage), act(rng.normal(0, 1, S), storage)
    ids = rng.permutation(E)[:k].astype(np.uint32)
    route = rng.dirichlet(np.ones(k)).astype(np.float32)
    logit, h0 = np.array([0.3], np.float32), rng.normal(0, 1, H).astype(np.float32)
    args = make("LilyMoeArgs", a=down.format, b=shared_down.format, I=inner, S=S, H=H, E=E, k=k, a_stride=H)
    h, sums = h0.copy(), np.zeros(H // 16, np.float32)
    run("moe_down", args, [a, ids, route, shared, logit, h, sums, *down.buffers, *shared_down.buffers], H // 16, isa=isa, storage=storage)
    want_h, want_sums = moe_down(act_values(a), ids, route, act_values(shared), logit[0], h0, down.stacked(E), shared_down.values)
    close(h, want_h)
    close(sums, want_sums)

    split, split_sums = h0.copy(), sums * 0
    run(
        "moe_down",
        args,
        [a, ids, route, shared, logit, split, split_sums, *down.buffers, *shared_down.buffers],
        H // 16,
        isa=isa,
        storage=storage,
        split=3,
    )
    assert (split == h).all()
    assert (split_sums == sums).all()

    y = run_moe_gemv(down, E, ids, a, storage, isa)
    twin = run_combine(None, route[None], y, run_gemv(shared_down, shared, storage, isa)[None], logit, h0[None], isa)[0]
    assert (h == twin).all()
    run("residual_step", make("LilyNormArgs", H=H, eps=EPS), [np.zeros(H, np.float32), twin, split_sums], 1, isa=isa, storage=storage)
    assert (sums == split_sums).all()


@isa
@storage
@pytest.mark.parametrize("form", ["4g64", "8g64", "bf16", "3g128"])
def test_moe_gemv_reads_the_chosen_experts(form, storage, isa):
    rng = np.random.default_rng(3)
    E, k, N, K = 16, 4, 20, 256
    w = weight(rng, E * N, K, form)
    ids = np.array([3, 15, 0, 7], np.uint32)
    for x in (rng.normal(0, 1, K), rng.normal(0, 1, (k, K))):
        x = act(x, storage)
        y = run_moe_gemv(w, E, ids, x, storage, isa)
        close(y, moe_gemv(ids, act_values(x).astype(np.float64), w.stacked(E)))
        assert (run_moe_gemv(w.unaligned(), E, ids, x, storage, isa, split=3) == y).all()


@on_cpu  # GPUs have three kernels in its place: test_route.py
@pytest.mark.parametrize("T,E,k", [(1, 16, 4), (300, 256, 8), (8200, 512, 10)])
def test_group_sorts_by_expert_then_row(T, E, k, isa):
    rng = np.random.default_rng(T)
    ids = np.argsort(rng.random((T + 2, E)), axis=1)[:, :k].astype(np.uint32) // 2  # half the experts stay empty; a row may meet one twice
    offsets, slot_row, slot_of = run_group(ids, E, rows=T, isa=isa)
    want = moe_group(ids[:T], E)
    assert (offsets == want[0]).all()
    assert (slot_row[: T * k] == want[1]).all()
    assert (slot_of[:T] == want[2]).all()
    assert (slot_row[T * k :] == 7777777).all()
    assert (slot_of[T:] == 7777777).all()


@rows_isa
@storage
@forms
@pytest.mark.parametrize("T", [1, 7, 65])
def test_grouped_products(T, forms, storage, isa):
    rng = np.random.default_rng(T)
    E, k, N, K = 16, 4, 80, 192
    if forms[0] == "5g32":
        N = 33
    gate, up = (weight(rng, E * N, K, f) for f in forms)
    x = act(rng.normal(0, 1, (T, K)), storage)
    ids = np.argsort(rng.random((T, E - 2)) + np.arange(E - 2) * 0.05, axis=1)[:, :k].astype(np.uint32)
    offsets, slot_row, _ = run_group(ids, E)
    gathered = x[slot_row].copy()
    y = run_gemm_rows(gate, E, offsets, slot_row, x, storage, isa, split=3)
    close(y, moe_gemm_rows(offsets, act_values(gathered), gate.rounded(storage).reshape(E, N, K)))
    assert (run_gemm_rows(gate, E, offsets, slot_row, gathered, storage, isa, by_slot=1) == y).all()
    a = run_gate_up_rows(gate, up, E, offsets, slot_row, x, storage, isa, split=2)
    stacks = [w.rounded(storage).reshape(E, N, K) for w in (gate, up)]
    # The Metal kernels keep one accumulator over all of K, where the CPU adds sums of 32; two such sums are multiplied here.
    factor = 4 if isa == "sim" else 1
    close(act_values(a), moe_gate_up_rows(offsets, act_values(gathered), *stacks), rounded=storage == "bfloat16", factor=factor)
    assert (a == run_swiglu(y, run_gemm_rows(up, E, offsets, slot_row, x, storage, isa), storage, isa)).all()
    if isa == "sim":  # both tiles give the same bits
        assert (run_gemm_rows(gate, E, offsets, slot_row, x, storage, isa, tile_rows=32) == y).all()
        assert (run_gate_up_rows(gate, up, E, offsets, slot_row, x, storage, isa, tile_rows=32) == a).all()


@rows_isa
def test_a_slot_does_not_depend_on_how_many_rows_its_expert_got(isa):
    rng = np.random.default_rng(5)
    E, N, K, T = 4, 70, 128, 700
    w, up = weight(rng, E * N, K), weight(rng, E * N, K)
    x = act(rng.normal(0, 1, (T, K)), "bfloat16")
    rows = np.arange(T, dtype=np.uint32)
    offsets = np.array([0, 0, 0, T, T], np.uint32)
    every = run_gemm_rows(w, E, offsets, rows, x, "bfloat16", isa)
    fused = run_gate_up_rows(w, up, E, offsets, rows, x, "bfloat16", isa)
    for t in (0, 63, 255, 256, 699):
        one = np.array([0, 0, 0, 1, 1], np.uint32)
        assert (run_gemm_rows(w, E, one, rows[t : t + 1].copy(), x, "bfloat16", isa) == every[t]).all()
        assert (run_gate_up_rows(w, up, E, one, rows[t : t + 1].copy(), x, "bfloat16", isa) == fused[t]).all()
    # and a grouped product has the bits of a dense one
    part = [b.reshape(E, N, -1)[2].copy() for b in w.buffers]
    dense = np.zeros((T, N), np.float32)
    run("gemm", make("LilyGemmArgs", fmt=w.format, K=K, N=N, ldy=N), [step(rows=T), x, dense, *part], grid(T, N), isa=isa)
    assert (dense == every).all()


def test_grouped_products_agree_in_every_bit_on_x86():
    x86 = [name for name in variants() if name in ("amx", "amx-emulated", "avx512", "avx2")]
    if len(x86) < 2:
        pytest.skip("needs AVX2 and AVX-512")
    rng = np.random.default_rng(8)
    E, k, N, K, T = 16, 4, 80, 1088, 90
    gate, up = weight(rng, E * N, K), weight(rng, E * N, K)
    x = act(rng.normal(0, 1, (T, K)), "bfloat16")
    ids = np.argsort(rng.random((T, E)) + np.arange(E) * 0.05, axis=1)[:, :k].astype(np.uint32)
    offsets, slot_row, _ = run_group(ids, E)
    product = [run_gemm_rows(gate, E, offsets, slot_row, x, "bfloat16", name) for name in x86]
    pair = [run_gate_up_rows(gate, up, E, offsets, slot_row, x, "bfloat16", name) for name in x86]
    for other in range(1, len(x86)):
        assert product[other].tobytes() == product[0].tobytes()
        assert pair[other].tobytes() == pair[0].tobytes()


def test_avx2_and_avx512_agree_in_every_bit():
    if not {"avx2", "avx512"} <= set(isas()):
        pytest.skip("needs AVX2 and AVX-512")
    rng = np.random.default_rng(6)
    E, k, inner, K = 16, 4, 48, 192
    gate, up = weight(rng, E * inner, K), weight(rng, E * inner, K)
    logits = rng.normal(0, 1, E).astype(np.float32)
    results = []
    for isa in ("avx2", "avx512"):
        h, sums, norm, _ = stream(np.random.default_rng(7), K, "bfloat16", isa)
        results.append(run_gate_up(gate, up, h, sums, norm, logits, k, "bfloat16", isa))
    for a, b in zip(*results, strict=True):
        assert (a == b).all()


@isa
@pytest.mark.parametrize("H", [128, 200, 2048])
def test_combine_adds_experts_then_the_shared_one(H, isa):
    rng = np.random.default_rng(H)
    T, k = 9, 8
    slot_of = rng.permutation(T * k).reshape(T, k)
    y, shared, h = rng.normal(0, 1, (T * k, H)), rng.normal(0, 1, (T, H)), rng.normal(0, 1, (T, H))
    y, shared, h = (v.astype(np.float32) for v in (y, shared, h))
    route, logit = rng.dirichlet(np.ones(k), T).astype(np.float32), rng.normal(0, 3, T).astype(np.float32)
    got = run_combine(slot_of, route, y, shared, logit, h, isa, rows=T - 1)
    close(got[:-1], moe_combine_rows(slot_of, route, y, shared, logit, h)[:-1])
    assert (got[-1] == h[-1]).all()
    ordered = np.ascontiguousarray(y[slot_of.reshape(-1)])
    assert (run_combine(None, route, ordered, shared, logit, h, isa, rows=T - 1) == got).all()
