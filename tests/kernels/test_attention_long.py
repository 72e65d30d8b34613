"""Decode attention on both sides of 32,768 tokens, where GPUs change to the form with a fixed number of splits, against float64.

Which form a step takes is the recorder's choice: tests/cpp/test_graph.cpp.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import reference_attention as reference
from harness import act, act_values
from test_attention import arguments, relative
from test_attention import tolerance as tolerance_of
from test_decode_launches import combined, split

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="needs the simulator: LILY_SIM")
EDGE = 32_768
SOAK = pytest.mark.soak


class LongContext:
    """A query, and random keys and values in arenas under a permuted block table; what no key fills is NaN."""

    def __init__(self, tokens, storage, heads=(8, 1)):
        rng = np.random.default_rng(tokens)
        self.a, self.storage = arguments(*heads), storage
        blocks = -(-tokens // 256)
        self.table = rng.permutation(blocks).astype(np.uint32)
        self.q = {tokens - 1: act(rng.normal(0, 1.5, (self.a.Hq, self.a.D)), storage)}
        self.k, self.v = (act(rng.standard_normal((tokens, self.a.Hkv, self.a.D), np.float32), storage) for _ in "kv")
        self.K, self.V = self._arena(self.k, blocks), self._arena(self.v, blocks)

    def _arena(self, rows, blocks):
        filled = act(np.full((blocks * 256, self.a.Hkv, self.a.D), np.nan, np.float32), self.storage)
        filled[: len(rows)] = rows
        arena = np.empty((blocks, self.a.Hkv, 256, self.a.D), filled.dtype)
        arena[self.table] = filled.reshape(blocks, 256, self.a.Hkv, self.a.D).transpose(0, 2, 1, 3)
        return arena


def check(c, tokens, kernel, n_splits, per_split):
    """Every split, and what they make together, against the reference cut at the same keys."""
    a, o, ml, counted = split(c, tokens - 1, n_splits, per_split, kernel)
    assert counted["function"] == (kernel if kernel == "attn_split_long" else "attn_split_h4_d256")
    wanted = getattr(reference, kernel)(a, act_values(c.q[tokens - 1]), act_values(c.k), act_values(c.v), c.storage)
    bar = tolerance_of(c.storage, "sim")
    assert len(wanted) == n_splits
    for s, part in enumerate(wanted):
        if part is None:
            assert np.isneginf(ml[s, :, 0]).all() and (ml[s, :, 1] == 0).all()
            continue
        weight = np.exp(ml[s, :, 0].astype(np.float64) - part[1])[:, None]  # a maximum a bit off moves o and the sum alike
        assert np.allclose(ml[s, :, 0], part[1], rtol=0, atol=1e-5)
        assert relative(o[s] * weight, part[0]) < bar
        assert np.allclose(ml[s, :, 1:] * weight, part[2][:, None], rtol=1e-5)
    found = combined(a, o, ml)
    assert relative(found, reference.attn_combine(a, wanted)) < bar
    return found


def general(tokens):
    """The splits of the bucket: 64, each of the same number of blocks."""
    return "attn_split", 64, 2 if tokens <= EDGE else 4


FIXED = ("attn_split_long", 64, 1)


def test_the_last_step_of_the_general_form():
    c = LongContext(EDGE - 1, "bfloat16")
    check(c, EDGE - 1, *general(EDGE - 1))


def test_the_first_step_of_the_fixed_form():
    c = LongContext(EDGE, "bfloat16")
    check(c, EDGE, *FIXED)


@SOAK
@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [EDGE - 1, EDGE, EDGE + 1, 50_001, 131_072])
def test_both_forms_agree_on_either_side(tokens, storage):
    c = LongContext(tokens, storage, (16, 2))
    per_split = general(tokens)[2] if tokens <= 65_536 else 8
    forms = [check(c, tokens, *FIXED), check(c, tokens, "attn_split", 64, per_split)]
    assert relative(*forms) < tolerance_of(storage, "sim")
