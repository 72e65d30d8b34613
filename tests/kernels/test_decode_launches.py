"""What the Metal kernels of decode promise beyond their results: variants give the same bits, weights are read once and in whole lines."""

import os

import numpy as np
import pytest
import reference_attention as reference
from harness import act, act_values, make, run_sim, step
from test_attention import TOLERANCE, Context, arguments, relative
from test_sampling import GREEDY, LOGPROBS, Case, check, settings
from weights import weight

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="needs the simulator: LILY_SIM")
STORAGES = ["bfloat16", "float32"]
EPS = 1e-6


def split(c, position, n_splits, per_split, kernel="attn_split", variant="", seed=0):
    """o, ml and the counters of a split kernel."""
    a = c.a.__class__.from_buffer_copy(c.a)
    a.n_splits, a.blocks_per_split = n_splits, per_split
    o, ml = np.full((n_splits, a.Hq, a.D), np.nan, np.float32), np.full((n_splits, a.Hq, 2), np.nan, np.float32)
    buffers = [step(position=position, rows=1), c.q[position].copy(), c.table, c.K, c.V, o, ml]
    counted = run_sim(kernel, a, buffers, a.Hkv * n_splits, storage=c.storage, variant=variant, seed=seed)
    return a, o, ml, counted


def combined(a, o, ml):
    """What attn_combine makes of the splits, in float64."""
    return reference.attn_combine(
        a,
        [
            None if s[0, 1] == 0 else (p.astype(np.float64), s[:, 0].astype(np.float64), s[:, 1].astype(np.float64))
            for p, s in zip(o, ml, strict=True)
        ],
    )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("hq,hkv,d", [(8, 1, 256), (6, 2, 256), (4, 4, 64), (5, 1, 128), (3, 1, 48)])
def test_one_head_a_threadgroup_gives_the_same_bits(hq, hkv, d, storage):
    c = Context(arguments(hq, hkv, d, 16), 560, storage)
    for position in (0, 31, 300, 559):
        a, o, ml, _ = split(c, position, 2, 2)
        parts = reference.attn_split(
            a, act_values(c.q[position]), act_values(c.k[: position + 1]), act_values(c.v[: position + 1]), storage
        )
        assert relative(combined(a, o, ml), reference.attn_combine(a, parts)) < TOLERANCE[storage]
        for seed in (0, 7):
            _, o1, ml1, counted = split(c, position, 2, 2, variant="one_head", seed=seed)
            assert counted["function"].startswith("attn_split_h1")
            assert o.tobytes() == o1.tobytes() and ml.tobytes() == ml1.tobytes()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("position", [0, 255, 256, 1299])
def test_the_form_for_long_contexts_agrees_with_the_general_one(position, storage):
    c = Context(arguments(16, 2), 1300, storage, seed=3)
    a, o, ml, _ = split(c, position, 64, 1, "attn_split_long")
    _, o2, ml2, _ = split(c, position, 64, 1, "attn_split_long", seed=5)
    assert o.tobytes() == o2.tobytes() and ml.tobytes() == ml2.tobytes()
    q, k, v = act_values(c.q[position]), act_values(c.k[: position + 1]), act_values(c.v[: position + 1])
    got = combined(a, o, ml)
    b, general, general_ml, _ = split(c, position, 8, 1)
    assert relative(got, combined(b, general, general_ml)) < TOLERANCE[storage]
    assert relative(got, reference.attn_combine(b, reference.attn_split(b, q, k, v, storage))) < TOLERANCE[storage]
    live = position // 256 + 1  # one block a split: each block is one split's, in order
    assert (ml[:, 0, 1] > 0).sum() == live


def test_the_form_for_long_contexts_can_be_switched_off():
    c = Context(arguments(8, 1), 600, "bfloat16")
    _, o, ml, counted = split(c, 599, 64, 1, "attn_split_long", "general")
    assert counted["function"] == "attn_split_h4_d256"
    _, o2, ml2, _ = split(c, 599, 64, 1)
    assert o.tobytes() == o2.tobytes() and ml.tobytes() == ml2.tobytes()


def test_the_form_for_long_contexts_refuses_other_shapes():
    from lily.errors import DeviceError

    c = Context(arguments(4, 2), 10, "bfloat16")
    with pytest.raises(DeviceError, match="8 query heads"):
        split(c, 5, 64, 1, "attn_split_long")


def coalescing(traffic):
    return traffic["useful_bytes"] / (128 * traffic["transactions"])


def test_keys_and_values_are_read_once_a_group_of_heads_and_in_whole_lines():
    c = Context(arguments(8, 1), 700, "bfloat16")
    for kernel, variant, n, times in (("attn_split", "", 3, 2), ("attn_split", "one_head", 3, 8), ("attn_split_long", "", 64, 2)):
        _, _, _, counted = split(c, 699, n, 1, kernel, variant)
        for name in ("buffer 3", "buffer 4"):
            t = counted["traffic"][name]
            assert t["unique_bytes_read"] == 700 * 256 * 2
            assert t["bytes_read"] <= times * (704 * 256 * 2)  # the last key fills up its step of eight
            assert coalescing(t) >= 0.95


def gemv_case(rng, form, K, rows, storage="bfloat16"):
    w = weight(rng, rows, K, form)
    x, y = act(rng.normal(0, 1, K), storage), np.zeros(rows, np.float32)
    args = make("LilyGemvArgs", fmt=w.format, K=K, n_segments=1, seg=[dict(rows=rows)])
    return w, args, [x, y, *w.buffers]


@pytest.mark.parametrize("form", ["4g64", "8g64", "4g32", "2g64", "3g64", "5g64", "6g64", "6g32", "bf16", "f32"])
@pytest.mark.parametrize("K", [512, 2048, 4096, 8192])
def test_weights_are_read_once_and_in_whole_lines(K, form):
    w, args, buffers = gemv_case(np.random.default_rng(K), form, K, 64)
    for variant in ("", "read"):
        counted = run_sim("gemv", args, buffers, 4, variant=variant)
        size = sum(b.nbytes for b in w.buffers if b is not None)
        read = sum(counted["traffic"][f"buffer {i}"]["bytes_read"] for i in (2, 3, 4) if w.buffers[i - 2] is not None)
        unique = sum(counted["traffic"][f"buffer {i}"]["unique_bytes_read"] for i in (2, 3, 4) if w.buffers[i - 2] is not None)
        codes = counted["traffic"]["buffer 2"]
        assert unique == size
        assert codes["bytes_read"] == w.buffers[0].nbytes
        whole = K * w.format.get("bits", 8) // 8 % 128 == 0  # a row of 512 values of 3 or 5 bits ends in the middle of a line
        assert coalescing(codes) >= (0.95 if whole else 0.6)
        scales = 0 if w.buffers[1] is None else 2 * w.buffers[1].nbytes
        assert read <= w.buffers[0].nbytes + scales * max(1, w.format.get("group", 0) // 16)  # lanes of one group read its scale each


def test_leaving_the_arithmetic_out_still_reads_every_byte_and_is_reachable():
    w, args, buffers = gemv_case(np.random.default_rng(1), "4g64", 2048, 33)
    run_sim("gemv", args, buffers, 3)
    product = buffers[1].copy()
    counted = run_sim("gemv", args, buffers, 3, variant="read")
    assert (buffers[1] != product).all()
    assert counted["traffic"]["buffer 2"]["unique_bytes_read"] == w.buffers[0].nbytes


def test_chosen_experts_are_read_once():
    rng = np.random.default_rng(2)
    E, k, inner, K = 16, 4, 64, 2048
    gate, up = weight(rng, E * inner, K), weight(rng, E * inner, K)
    h, norm = rng.normal(0, 1, K).astype(np.float32), np.ones(K, np.float32)
    sums = (h.reshape(-1, 16) ** 2).sum(1).astype(np.float32)
    ids, route, a = np.zeros(k, np.uint32), np.zeros(k, np.float32), act(np.zeros((k, inner)), "bfloat16")
    args = make("LilyMoeArgs", a=gate.format, b=up.format, K=K, I=inner, E=E, k=k, a_stride=inner, b_stride=inner, eps=EPS)
    logits = rng.normal(0, 1, E).astype(np.float32)
    counted = run_sim("moe_gate_up", args, [h, sums, norm, logits, ids, route, a, *gate.buffers, *up.buffers], k * 4)
    for i, w in ((7, gate), (10, up)):
        t = counted["traffic"][f"buffer {i}"]
        assert t["bytes_read"] == t["unique_bytes_read"] == w.buffers[0].nbytes * k // E
        assert coalescing(t) >= 0.95


def test_the_state_of_a_step_is_read_and_written_once():
    Nk, Nv, D = 1, 2, 128
    C = 2 * Nk * D + Nv * D
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.normal(0, 1, shape).astype(np.float32)

    width = C + Nv * D + 2 * Nv
    args = make("LilyGdnArgs", Nk=Nk, Nv=Nv, Dk=D, Dv=D, ld_qkv=width, ld_z=width, ld_ba=width, eps=EPS)
    S = normal(Nv, D, D)
    conv, out = act(normal(3, C), "bfloat16"), act(np.zeros((Nv, D)), "bfloat16")
    buffers = [normal(width), normal(4, C), -np.ones(Nv, np.float32), normal(Nv), normal(D), conv, S, conv.copy(), S.copy(), out]
    traffic = run_sim("gdn_step", args, buffers, Nv)["traffic"]
    assert traffic["buffer 6"]["bytes_read"] == traffic["buffer 8"]["bytes_written"] == S.nbytes
    assert coalescing(traffic["buffer 6"]) == coalescing(traffic["buffer 8"]) == 1


class CountedCase(Case):
    """A sampling case that adds up what its three kernels read of the logits and of their adjusted copy."""

    read = 0

    def run(self, name, buffers, groups):
        args = make("LilySampleArgs", V=self.v, blocks=self.blocks)
        traffic = run_sim(name, args, buffers, groups, seed=3)["traffic"]
        self.read += sum(
            t["bytes_read"] for at, b in enumerate(buffers) if b is self.y or b is self.logits for t in [traffic.get(f"buffer {at}")] if t
        )


@pytest.mark.parametrize(
    "more,times",
    [
        (dict(flags=GREEDY), 1.001),
        (dict(), 2.03),
        (dict(min_p=0.1), 2.03),
        (dict(top_k=20, top_p=0.95), 2.01),
        (dict(top_p=0.9), 3.01),
        (dict(flags=LOGPROBS, n_logprobs=20, top_p=0.9), 3.01),
        (dict(flags=LOGPROBS, n_logprobs=5), 3.03),
    ],
)
def test_logits_are_read_at_most_three_times(more, times):
    """Greedy reads them once; a plain draw reads 512 of them again."""
    v = 20_000
    case = CountedCase(np.random.default_rng(4).normal(0, 3, v))
    check(case, settings(seed_lo=5, position=9, **more))
    assert case.read <= times * 4 * v
