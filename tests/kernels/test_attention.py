"""Attention kernels: against float64, and bit for bit between instruction sets, ways to cut a prompt, tiles, and fused and unfused."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import reference_attention as reference
from harness import act, act_values, affordable, isas, make, run, step, variants

import lily

STORAGES = ["bfloat16", "float32"]
HEADS = [(8, 1), (16, 2), (4, 2), (4, 1)]
CHUNKS = [1, 7, 64, 300]
POSITIONS = [0, 5, 255, 256, 1000]
X86 = [name for name in variants() if name in ("amx", "amx-emulated", "avx512", "avx2")]
# Relative RMS error. A probability within an fp32 error of the middle between two bfloat16 values may be rounded the other way:
# a few in 10,000. Over many rows that is a few 1e-5 of the RMS; one row with a heavy key so rounded reaches 3e-4. Nothing else differs.
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-4}


def tolerance(storage, isa):
    """The Metal kernels round p in steps of 32 keys, the reference (as the CPU) in steps of 64: a factor of 2.5 at most in what was measured."""
    return TOLERANCE[storage] * (2.5 if isa == "sim" else 1)


def arguments(hq=4, hkv=2, d=256, r=64, **more):
    values = dict(n_splits=1, blocks_per_split=1, gated=1, key=0, rows_per_group=16, rope_theta=1e7, eps=1e-6, scale=d**-0.5)
    return make("LilyAttnArgs", Hq=hq, Hkv=hkv, D=d, R=r, ld=2 * hq * d + 2 * hkv * d, **(values | more))


class Context:
    """Random qkv rows and the keys and values of all positions, in arenas under a permuted block table; the rest of the arenas is NaN."""

    def __init__(self, a, tokens, storage, seed=0):
        rng = np.random.default_rng(seed)
        self.a, self.storage, self.tokens = a, storage, tokens
        blocks = (tokens + 255) // 256
        self.table = (rng.permutation(blocks) + 1).astype(np.uint32)
        self.q_norm, self.k_norm = (rng.uniform(0.5, 1.5, a.D).astype(np.float32) for _ in "qk")
        self.qkv = rng.normal(0, 1, (tokens, a.ld)).astype(np.float32)
        self.q = act(rng.normal(0, 1.5, (tokens, a.Hq, a.D)), storage)
        self.k, self.v = (act(rng.normal(0, 1, (tokens, a.Hkv, a.D)), storage) for _ in "kv")
        self.K, self.V = self.arena(), self.arena()
        for arena, rows in ((self.K, self.k), (self.V, self.v)):
            for p in range(tokens):
                arena[self.table[p // 256], :, p % 256] = rows[p]

    def arena(self):
        return act(np.full((len(self.table) + 1, self.a.Hkv, 256, self.a.D), np.nan), self.storage)

    def written(self, arena):
        """Rows of an arena by position; everything else must be as it was."""
        n = np.arange(self.tokens)
        rows = arena[self.table[n // 256], :, n % 256].copy()
        return rows

    def rows(self, position, rows, isa="best", split=None, **more):
        a = self.a.__class__.from_buffer_copy(self.a)
        for key, value in more.items():
            setattr(a, key, value)
        shape = (rows, a.Hq, a.D)
        x = act(np.zeros(shape), self.storage) if a.gated else np.zeros(shape, np.float32)
        q, qkv = (np.ascontiguousarray(y[position : position + rows]) for y in (self.q, self.qkv))
        groups = a.Hkv * -(-rows // a.rows_per_group)
        buffers = [step(position=position, rows=rows), q, qkv, self.table, self.K, self.V, x]
        run("attn_rows", a, buffers, groups, isa=isa, storage=self.storage, split=split)
        return x


@cache
def context(hq, hkv, storage, tokens=1300, d=256, r=64):
    return Context(arguments(hq, hkv, d, r), tokens, storage)


def relative(x, y):
    return float(np.sqrt(np.mean((x - y) ** 2)) / np.sqrt(np.mean(np.square(y))))


def check_act(buffer, expected, storage):
    """A rounded result: at most one unit off, and nearly always equal to the rounded reference."""
    values = act_values(buffer).astype(np.float64)
    if storage == "float32":
        assert relative(values, expected) < 1e-6
    else:
        assert np.all(np.abs(values - expected) <= np.abs(expected) / 255 + 1e-6)
        assert np.mean(buffer != act(expected, storage)) < 2e-3


def prepared(c, isa, decode=False, split=None):
    """q, K and V of attn_prepare_rows, or of attn_prepare token by token."""
    a, t = c.a, c.tokens
    q, K, V = act(np.zeros((t, a.Hq, a.D)), c.storage), c.arena(), c.arena()
    if decode:
        for p in range(t):
            buffers = [step(position=p, rows=1), c.qkv[p], c.q_norm, c.k_norm, c.table, K, V, q[p]]
            run("attn_prepare", a, buffers, a.Hq + a.Hkv, isa=isa, storage=c.storage, split=split)
    else:
        buffers = [step(position=0, rows=t), c.qkv, c.q_norm, c.k_norm, c.table, K, V, q]
        run("attn_prepare_rows", a, buffers, t + 5, isa=isa, storage=c.storage, split=split)
    return q, c.written(K), c.written(V), K, V


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("hq,hkv,d,r", [(8, 1, 256, 64), (4, 2, 256, 64), (4, 1, 64, 16), (2, 2, 48, 48)])
def test_prepare_and_twins(hq, hkv, d, r, storage):
    c = Context(arguments(hq, hkv, d, r), 300, storage)
    expected = reference.attn_prepare_rows(c.a, c.qkv, c.q_norm, c.k_norm, 0)
    bits = {}
    for isa in isas():
        q, k, v, K, V = prepared(c, isa)
        for got, want in zip((q, k, v), expected, strict=True):
            check_act(got, want, storage)
        outside = act_values(K)[c.table[-1], :, c.tokens % 256 :]
        assert np.isnan(outside).all() and np.isnan(act_values(K)[0]).all()
        # twins
        key_args = arguments(hq, hkv, d, r, key=1)
        at = step(position=0, rows=c.tokens)
        qn, kn = np.zeros((c.tokens, hq, d), np.float32), np.zeros((c.tokens, hkv, d), np.float32)
        run("head_norm_rows", c.a, [at, c.qkv, c.q_norm, qn], c.tokens, isa=isa, storage=storage)
        run("head_norm_rows", key_args, [at, c.qkv, c.k_norm, kn], c.tokens, isa=isa, storage=storage)
        assert relative(qn, reference.head_norm_rows(c.a, c.qkv, c.q_norm)) < 1e-6
        assert relative(kn, reference.head_norm_rows(key_args, c.qkv, c.k_norm)) < 1e-6
        q2, K2, V2 = np.zeros_like(q), c.arena(), c.arena()
        run("rope_rows", c.a, [at, qn, q2], c.tokens, isa=isa, storage=storage)
        run("kv_write_rows", c.a, [at, kn, c.qkv, c.table, K2, V2], c.tokens, isa=isa, storage=storage)
        check_act(q2, reference.rope_rows(c.a, qn, 0), storage)
        check_act(c.written(K2), reference.kv_write_rows(c.a, kn, c.qkv, 0)[0], storage)
        for fused, twin in ((q, q2), (K, K2), (V, V2)):
            assert fused.tobytes() == twin.tobytes()
        for got, want in zip(prepared(c, isa, split=7)[3:], (K, V), strict=True):
            assert got.tobytes() == want.tobytes()
        for got, want in zip(prepared(c, isa, decode=True, split=3), (q, k, v), strict=False):
            assert got.tobytes() == want.tobytes()
        bits[isa] = q.tobytes() + K.tobytes()
    if {"avx2", "avx512"} <= set(bits):
        assert bits["avx2"] == bits["avx512"]


def test_rope_is_accurate_at_far_positions():
    a = arguments(1, 1)
    x = np.random.default_rng(0).normal(0, 1, (1, 1, 256)).astype(np.float32)
    for position in (1, 4095, 262_143, 1_000_000):
        q = np.zeros((1, 1, 256), np.float32)
        run("rope_rows", a, [step(position=position, rows=1), x, q], 1, storage="float32")
        assert relative(q, reference.rope_rows(a, x, position)) < 1e-6


def cases():
    for hq, hkv in HEADS:
        for rows in CHUNKS:
            for position in POSITIONS:
                if (
                    (hq, hkv) == (4, 2)
                    or rows == 7
                    or (rows == 64 and position == 255)
                    or (hq == 8 and position == 1000)
                    or (rows == 1 and position % 5)
                ):
                    yield hq, hkv, rows, position


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("hq,hkv,rows,position", list(cases()))
def test_rows_against_float64(hq, hkv, rows, position, storage):
    c = context(hq, hkv, storage)
    k, v = (act_values(x[: position + rows]) for x in (c.k, c.v))
    o = reference.attn_rows(c.a, act_values(c.q[position : position + rows]), k, v, position, storage)
    expected = reference.gate_rows(c.a, o, c.qkv[position : position + rows])
    plain = {}
    for isa in variants():
        if (isa == "portable" and rows > 7) or not affordable(isa, rows, position + rows):
            continue
        plain[isa] = c.rows(position, rows, isa, gated=0)
        assert relative(plain[isa], o) < tolerance(storage, isa), isa
        gated = c.rows(position, rows, isa)
        values = act_values(gated).astype(np.float64)
        assert relative(values, expected) < (1e-5 if storage == "float32" else 2.5e-3), isa
        x = np.zeros_like(gated)
        run("gate_rows", c.a, [step(rows=rows), plain[isa], c.qkv[position:].copy(), x], rows, isa=isa, storage=storage)
        assert x.tobytes() == gated.tobytes()
    assert len({plain[isa].tobytes() for isa in X86 if isa in plain}) <= 1


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("hq,hkv", [(8, 1), (4, 2), (2, 2)])
def test_rows_do_not_depend_on_the_cut(hq, hkv, storage):
    c = context(hq, hkv, storage)
    whole = c.rows(0, 700, gated=0)
    for size in (1, 37, 64, 256, 300):
        last = 150 if size == 1 else 700
        cut = np.concatenate([c.rows(p, min(size, last - p), gated=0) for p in range(0, last, size)])
        assert cut.tobytes() == whole[:last].tobytes(), size
    for tile in (1, 5, 16, 64, 1024):
        assert c.rows(0, 700, gated=0, rows_per_group=tile).tobytes() == whole.tobytes(), tile
    assert c.rows(0, 700, gated=0, split=3).tobytes() == whole.tobytes()


def test_rows_leave_dead_rows_alone():
    c = context(4, 2, "float32")
    x = np.full((64, 4, 256), 7, np.float32)
    buffers = [step(position=5, rows=20), c.q[5:69].copy(), c.qkv[5:69].copy(), c.table, c.K, c.V, x]
    run("attn_rows", c.a, buffers, 2 * 4, storage="float32")
    assert (x[20:] == 7).all() and x[:20].tobytes() == c.rows(5, 20).tobytes()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("isa", [name for name in variants() if name != "sim"])
def test_a_later_key_of_infinity_does_not_reach_earlier_rows(isa, storage):
    c = Context(arguments(4, 2), 64, storage)
    clean = c.rows(0, 64, isa)
    c.V[c.table[0], :, 40], c.K[c.table[0], :, 41] = act(np.inf, storage), act(np.nan, storage)
    assert c.rows(0, 64, isa)[:40].tobytes() == clean[:40].tobytes()


@pytest.mark.parametrize("d,r", [(48, 16), (80, 32), (128, 64), (256, 64)])
def test_x86_variants_agree_about_any_rows_and_head_dim(d, r):
    c = Context(arguments(6, 2, d, r), 200, "bfloat16")
    for position, rows in ((0, 200), (61, 5), (63, 70), (130, 33)):
        assert len({c.rows(position, rows, isa).tobytes() for isa in X86}) <= 1, (position, rows)


def test_odd_head_dims_and_large_scores():
    for d, r in ((48, 16), (80, 32), (128, 64)):
        c = Context(arguments(6, 2, d, r, scale=3.0), 200, "float32")
        o = reference.attn_rows(c.a, c.q, c.k, c.v, 0, "float32")
        for isa in isas():
            if isa == "sim" and d not in (64, 128, 256):
                with pytest.raises(lily.DeviceError, match=f"head dim {d}, expected 64, 128 or 256"):
                    c.rows(0, 200, isa, gated=0)
                continue
            assert relative(c.rows(0, 200, isa, gated=0), o) < 1e-5 * 3.0 * d**0.5  # scores up to hundreds: their rounding counts


def decode(c, position, n_splits, blocks_per_split, isa, gated=1, split=None):
    a = c.a.__class__.from_buffer_copy(c.a)
    a.n_splits, a.blocks_per_split, a.gated = n_splits, blocks_per_split, gated
    o = np.full((n_splits, a.Hq, a.D), np.nan, np.float32)
    ml = np.full((n_splits, a.Hq, 2), np.nan, np.float32)
    at, qkv = step(position=position, rows=1), c.qkv[position].copy()
    x = act(np.zeros((a.Hq, a.D)), c.storage) if gated else np.zeros((a.Hq, a.D), np.float32)
    run("attn_split", a, [at, c.q[position].copy(), c.table, c.K, c.V, o, ml], a.Hkv * n_splits, isa=isa, storage=c.storage, split=split)
    run("attn_combine", a, [at, o, ml, x, qkv], a.Hq, isa=isa, storage=c.storage, split=split)
    return a, o, ml, x


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("hq,hkv", HEADS + [(6, 2)])
@pytest.mark.parametrize("n_splits,blocks_per_split", [(1, 6), (3, 2), (6, 1), (64, 1)])
def test_split_and_combine(hq, hkv, n_splits, blocks_per_split, storage):
    c = context(hq, hkv, storage)
    for position in (0, 63, 255, 256, 1299):
        q, k, v = act_values(c.q[position]), act_values(c.k[: position + 1]), act_values(c.v[: position + 1])
        bits = {}
        for isa in isas():
            a, o, ml, x = decode(c, position, n_splits, blocks_per_split, isa, gated=0)
            parts = reference.attn_split(a, q, k, v, storage)
            for s, part in enumerate(parts):
                if part is None:
                    assert np.isneginf(ml[s, :, 0]).all() and (ml[s, :, 1] == 0).all() and np.isnan(o[s]).all()
                    continue
                assert relative(o[s], part[0]) < TOLERANCE[storage]
                assert np.allclose(ml[s, :, 0], part[1], rtol=0, atol=1e-5)
                assert np.allclose(ml[s, :, 1], part[2], rtol=1e-5)
            combined = reference.attn_combine(a, parts)
            assert relative(x, combined) < TOLERANCE[storage]
            gated = decode(c, position, n_splits, blocks_per_split, isa, split=1)[3]
            twin = np.zeros_like(gated)
            run("gate_rows", a, [step(rows=1), x, c.qkv[position].copy(), twin], 1, isa=isa, storage=storage)
            assert twin.tobytes() == gated.tobytes()
            bits[isa] = o.tobytes() + ml.tobytes() + x.tobytes()
        if {"avx2", "avx512"} <= set(bits):
            assert bits["avx2"] == bits["avx512"]


@pytest.mark.parametrize("storage", STORAGES)
def test_decode_agrees_with_prefill(storage):
    c = context(8, 1, storage)
    for position in (0, 100, 777):
        rows = c.rows(position, 1, gated=0)[0]
        assert relative(decode(c, position, 2, 3, "best", gated=0)[3], rows) < 3 * TOLERANCE[storage]
