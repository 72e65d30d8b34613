"""Sampling kernels: against a sort in float64, over random and adversarial logits, and the draw's distribution."""

from __future__ import annotations

import numpy as np
import pytest
import reference_sampling as reference
from harness import isas, make, run, step, structs

GREEDY, PENALTY, BIAS, MASK, LOGPROBS = 1, 2, 4, 8, 16
# Weights are fp32 exponentials, so an edge that is nearer than this (relative to the total) may fall on either side.
SLACK = 2e-6
BLOCK, BINS = 16384, 2048


def settings(flags=0, **more):
    values = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    return make("LilySample", flags=flags, **(values | more))


class Case:
    """One vocabulary's buffers; `sample` runs the three kernels and gives the record back."""

    def __init__(self, logits, counts=None, bias=None, allowed=None, isa="best", split=None):
        self.logits, self.v = np.ascontiguousarray(logits, np.float32), len(logits)
        self.counts, self.bias, self.allowed = counts, bias, allowed
        self.isa, self.split = isa, split
        self.blocks = -(-self.v // BLOCK)
        self.mask = None
        if allowed is not None:
            padded = np.zeros(-(-self.v // 32) * 32, bool)
            padded[: self.v] = allowed
            self.mask = np.packbits(padded, bitorder="little").view(np.uint32).copy()
        self.y = np.full(self.v, np.nan, np.float32)
        self.block = np.full((self.blocks, 4), np.nan, np.float32)
        self.hist = np.full((self.blocks, BINS), 0xDEADBEEF, np.uint32)
        self.mass = np.full((self.blocks, BINS), np.nan, np.float32)
        self.list = np.full(2 * self.v, np.nan, np.float32)
        self.next = step(token=0xFFFFFFFF, position=3)

    def run(self, name, buffers, groups):
        args = make("LilySampleArgs", V=self.v, blocks=self.blocks)
        run(name, args, buffers, groups, isa=self.isa, split=self.split)

    def adjust(self, s):
        record = np.frombuffer(bytes(s), np.uint8).copy()
        self.run("sample_adjust", [record, self.logits, self.counts, self.bias, self.mask, self.y, self.block, self.hist], self.blocks)
        self.run("sample_mass", [record, self.y, self.block, self.mass], self.blocks)

    def draw(self, s, next_step=True):
        record = np.frombuffer(bytes(s), np.uint8).copy()
        self.run(
            "sample_draw", [record, self.y, self.block, self.hist, self.mass, self.list, self.counts, self.next if next_step else None], 1
        )
        return structs()["LilySample"].from_buffer_copy(record.tobytes())

    def sample(self, s):
        self.adjust(s)
        return self.draw(s)


def check(case, s, slack=SLACK):
    """Runs one case and compares everything that it writes."""
    before = None if case.counts is None else case.counts.copy()
    y = reference.sample_adjust(
        s,
        case.logits,
        before if s.flags & PENALTY else None,
        case.bias if s.flags & BIAS else None,
        case.allowed if s.flags & MASK else None,
    )
    out = case.sample(s)
    assert case.y.tobytes() == y.tobytes()
    right = reference.sample_draw(s, y, slack)
    if not right:
        allowed = np.flatnonzero(case.allowed) if s.flags & MASK else np.arange(case.v)
        assert out.token == (allowed[0] if len(allowed) else 0) and np.isneginf(out.logprob)
        return out
    assert out.token in right, (out.token, right)
    expected = reference.logprobs(y)
    assert abs(out.logprob - expected[out.token]) < 2e-6 * max(1, abs(expected[out.token]), abs(float(y.max())))
    if s.flags & LOGPROBS:
        ids = reference.order(y)[: s.n_logprobs]
        assert list(out.top_ids[: len(ids)]) == list(ids)
        error = np.abs(np.array(out.top_logprobs[: len(ids)]) - expected[ids])
        assert np.all(error < 2e-6 * np.maximum(max(1, abs(float(y.max()))), np.abs(expected[ids])))
        assert all(i == 0xFFFFFFFF for i in out.top_ids[len(ids) : s.n_logprobs])
        assert np.isneginf(out.top_logprobs[len(ids) : s.n_logprobs]).all()
    if s.flags & PENALTY:
        before[out.token] = (before[out.token] + 1) | 0x80000000
    if before is not None:
        assert (case.counts == before).all()
    assert case.next.view(np.uint32)[:2].tolist() == [out.token, 3]
    return out


def random_logits(rng, v):
    kind = rng.integers(7)
    if kind == 0:
        return np.full(v, rng.normal(), np.float32)
    x = rng.normal(0, rng.choice([0.01, 1, 3, 30]), v).astype(np.float32)
    if kind == 1:  # many ties
        return np.round(x)
    if kind == 2:  # two values
        return np.where(x > 0, np.float32(1.5), np.float32(-2))
    if kind == 3:
        x[rng.random(v) < 0.5] = -np.inf
    if kind == 4:
        x[rng.random(v) < 0.2] = np.nan
        x[rng.integers(v)] = 2.0
    if kind == 5:
        x = np.where(rng.random(v) < 0.5, np.float32(0.0), np.float32(-0.0)) + np.where(rng.random(v) < 0.1, x, 0).astype(np.float32)
    return x


def random_case(rng, v, isa="best"):
    flags = int(rng.choice([0, 0, 0, GREEDY])) | sum(f for f in (PENALTY, BIAS, MASK, LOGPROBS) if rng.random() < 0.3)
    counts = np.where(rng.random(v) < 0.2, rng.integers(0, 4, v), 0).astype(np.uint32)
    counts |= np.where(rng.random(v) < 0.2, np.uint32(1 << 31), np.uint32(0))
    bias = np.where(rng.random(v) < 0.1, rng.choice([-np.inf, -1, 1, 5, 100], v), 0).astype(np.float32)
    s = settings(
        flags,
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.5])),
        top_k=int(rng.choice([0, 0, 1, 2, 5, 20, 40, v, 2 * v])),
        top_p=float(rng.choice([1, 1, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999])),
        min_p=float(rng.choice([0, 0, 0.05, 0.3])),
        repetition_penalty=float(rng.choice([1, 1.1, 1.5])),
        presence_penalty=float(rng.choice([0, 0.5, 1.5])),
        frequency_penalty=float(rng.choice([0, 0.3])),
        seed_lo=int(rng.integers(1 << 32)),
        seed_hi=int(rng.integers(1 << 32)),
        position=int(rng.integers(1 << 20)),
        n_logprobs=int(rng.choice([0, 1, 5, 20])),
    )
    return Case(random_logits(rng, v), counts, bias, rng.random(v) < rng.choice([0.1, 0.9]), isa), s


@pytest.mark.parametrize("v,cases", [(7, 1500), (512, 1200), (6144, 150), (33_001, 30)])
def test_random_settings(v, cases):
    rng = np.random.default_rng(v)
    for _ in range(cases):
        check(*random_case(rng, v))


@pytest.mark.parametrize("isa", isas())
def test_every_instruction_set(isa):
    rng = np.random.default_rng(5)
    for v in (7, 31, 512, 20_000):
        for _ in range(40 if v < 10_000 else 6):
            check(*random_case(rng, v, isa))


def test_avx2_equals_avx512_and_ranges_do_not_matter():
    rng = np.random.default_rng(6)
    sets = [i for i in isas() if i not in ("portable", "sim")]
    for _ in range(15):
        case, s = random_case(rng, 40_000)
        s.flags |= LOGPROBS
        results = []
        for isa, split in [(i, None) for i in sets] + [("best", 1)]:
            other = Case(case.logits, case.counts.copy(), case.bias, case.allowed, isa, split)
            out = other.sample(s)
            results.append(bytes(out) + other.y.tobytes() + other.block.tobytes() + other.hist.tobytes() + other.mass.tobytes())
        assert len(set(results)) == 1


@pytest.mark.parametrize("kind", ["normal", "flat", "ascending", "peaked"])
def test_large_vocabulary(kind):
    v = 248_320
    rng = np.random.default_rng(1)
    logits = {
        "normal": rng.normal(0, 3, v),
        "flat": np.zeros(v),
        "ascending": np.linspace(-1, 1, v),
        "peaked": np.where(np.arange(v) == 200_000, 30, rng.normal(0, 1, v)),
    }[kind].astype(np.float32)
    for more in (
        dict(),
        dict(top_k=20, top_p=0.95, min_p=0.01),
        dict(top_k=300),
        dict(top_p=0.5),
        dict(top_p=0.95),
        dict(min_p=0.1),
        dict(flags=LOGPROBS, n_logprobs=20),
        dict(flags=GREEDY | LOGPROBS, n_logprobs=5),
        dict(flags=GREEDY),
    ):
        check(Case(logits), settings(seed_lo=9, position=77, **more))


def test_ties_at_the_cut_go_to_the_lower_id():
    x = np.array([0, 2, 1, 1, 1, 1, 3, 1], np.float32)
    for k, support in ((3, {1, 2, 6}), (4, {1, 2, 3, 6}), (2, {1, 6})):
        case = Case(x)
        case.adjust(s := settings(top_k=k, temperature=4.0))
        drawn = set()
        for s.position in range(300):
            drawn.add(case.draw(s).token)
        assert drawn == support
    # equal weights are exact: half of 512 equal tokens is the first 256, crossing included
    for p, n in ((0.5, 256), (0.25, 128), (0.501953125, 257), (0.50048828125, 257)):
        case = Case(np.full(512, 1.25, np.float32))
        case.adjust(s := settings(top_p=p))
        drawn = [0]
        for s.position in range(1500):
            out = case.draw(s)
            assert out.token in reference.sample_draw(s, case.y)
            drawn.append(out.token)
        assert max(drawn) == n - 1
    case = Case(np.full(512, 1.25, np.float32))
    case.adjust(s := settings(top_k=64, top_p=0.5, min_p=1.0))
    drawn = set()
    for s.position in range(1000):
        drawn.add(case.draw(s).token)
    assert drawn == set(range(32))


def test_all_logits_minus_infinity():
    x = np.full(40_000, -np.inf, np.float32)
    allowed = np.zeros(40_000, bool)
    for flags in (GREEDY, 0, LOGPROBS):
        for more in (dict(), dict(top_k=5), dict(top_p=0.5)):
            s = settings(flags, n_logprobs=3, **more)
            assert check(Case(x), s).token == 0
            s.flags |= MASK
            allowed[:] = False
            assert check(Case(x, allowed=allowed), s).token == 0
            allowed[[20_001, 39_999]] = True
            assert check(Case(x, allowed=allowed), s).token == 20_001


def test_infinite_and_extreme_logits():
    x = np.array([-3e38, 3e38, np.inf, -np.inf, 1, np.nan], np.float32)
    for more in (dict(), dict(top_k=3), dict(top_p=0.9), dict(flags=GREEDY), dict(temperature=1e-6), dict(temperature=1e6)):
        assert Case(x).sample(settings(**more)).token == 2
    # temperature 0 is greedy, whatever the flags say
    assert Case(x).sample(settings(temperature=0.0, top_k=3)).token == 2


def test_next_step_may_be_absent():
    case = Case(np.arange(9))
    case.adjust(s := settings(GREEDY))
    assert case.draw(s, next_step=False).token == 8 and case.next.view(np.uint32)[0] == 0xFFFFFFFF


def test_philox_known_answers():
    ones = 0xFFFFFFFF
    assert reference.philox((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert reference.philox((ones, ones), (ones, ones, ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_the_kernel_draws_the_philox_uniform():
    # 2^16 equal tokens: the token is the top 16 bits of the word
    case = Case(np.zeros(1 << 16))
    case.adjust(s := settings())
    for s.seed_lo, s.seed_hi, s.position in (
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (12345, 678, 262_143),
    ):
        word = reference.philox((s.seed_lo, s.seed_hi), (s.position, 0, 0, 0))[0]
        assert case.draw(s).token == word >> 16


@pytest.mark.parametrize(
    "more", [dict(), dict(temperature=0.7, top_k=12), dict(top_p=0.8), dict(min_p=0.1, temperature=1.3), dict(top_k=20, top_p=0.9)]
)
def test_distribution(more):
    rng = np.random.default_rng(3)
    case = Case(rng.normal(0, 2, 64))
    case.adjust(s := settings(seed_lo=42, **more))
    kept = reference.survivors(s, case.y)
    p = reference.sample_mass(s, case.y)[kept]
    p /= p.sum()
    n = 4000
    counts = np.zeros(64)
    for s.position in range(n):
        counts[case.draw(s).token] += 1
    assert counts.sum() == counts[kept].sum()
    big = p * n >= 5
    observed = np.append(counts[kept][big], counts[kept][~big].sum())
    expected = np.append(p[big], p[~big].sum()) * n
    live = expected > 0
    chi2, freedom = ((observed - expected)[live] ** 2 / expected[live]).sum(), live.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("v", [7, 512, 6144, 248_320])
def test_score_rows(v, isa):
    rng = np.random.default_rng(v)
    rows = 5 if v > 10_000 else 64
    logits = rng.normal(0, 5, (rows, v)).astype(np.float32)
    logits[rows // 2] = 1.5
    targets = rng.integers(0, v, 64).astype(np.int32)
    targets[1] = -1
    out = np.full(64, 9, np.float32)
    run("score_rows", make("LilySampleArgs", V=v), [step(rows=rows), logits, targets, out], 64, isa=isa)
    assert np.allclose(out[:rows], reference.score_rows(logits, targets[:rows]), rtol=3e-7, atol=1e-6)
    assert (out[rows:] == 9).all()
