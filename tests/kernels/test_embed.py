"""Embedding look-ups give scale*q + bias exactly, in every format, at any address, and never read outside the vocabulary."""

import numpy as np
import pytest
import reference_norm as reference
from harness import bf16, isas, make, quantize, run, step, unaligned

AFFINE, BF16, F16, F32 = range(4)
V = 37


def affine(bits, group, H):
    codes, scales, biases, values = quantize(np.random.default_rng(bits * 1000 + group), V, H, bits, group)
    return dict(kind=AFFINE, bits=bits, group=group), [codes, scales, biases], values


def plain(kind, H):
    values = np.random.default_rng(kind).normal(0, 0.03, (V, H)).astype(np.float32)
    values[0, :4] = [0, -0.0, 6e-8, -3e-5]  # subnormal in float16
    stored = {BF16: bf16, F16: lambda x: x.astype(np.float16), F32: lambda x: x}[kind](values)
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if kind == BF16 else stored
    return dict(kind=kind), [stored, None, None], exact.astype(np.float64)


FORMATS = [(lambda H, b=b, g=g: affine(b, g, H)) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)] + [
    (lambda H, k=k: plain(k, H)) for k in (BF16, F16, F32)
]
NAMES = [f"{b}bit-g{g}" for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)] + ["bf16", "f16", "f32"]


def at_odd_addresses(weights):
    return [w if w is None else unaligned(w) for w in weights]


@pytest.mark.parametrize("make_format", FORMATS, ids=NAMES)
@pytest.mark.parametrize("H", [128, 1152])
def test_embed_step_is_exact(make_format, H):
    fmt, weights, values = make_format(H)
    for storage in ("bfloat16", "float32"):
        for isa in isas():
            for token in (0, V - 1, V, 2**32 - 1):
                h, ssq = np.full(H, np.nan, np.float32), np.full(H // 16, np.nan, np.float32)
                run(
                    "embed_step",
                    make("LilyEmbedArgs", fmt=fmt, H=H, V=V),
                    [step(token=token, rows=1), *at_odd_addresses(weights), h, ssq],
                    1,
                    isa=isa,
                    storage=storage,
                )
                expected, sums = reference.embed_step(values, token)
                np.testing.assert_array_equal(h, expected.astype(np.float32))
                np.testing.assert_allclose(ssq, sums, rtol=1e-6)


@pytest.mark.parametrize("make_format", FORMATS, ids=NAMES)
def test_embed_rows_is_exact(make_format):
    H, bucket, rows = 256, 8, 6
    fmt, weights, values = make_format(H)
    ids = np.array([V - 1, 3, -1, V, 0, 3, 5, 6], np.int32)
    for isa in isas():
        for split in (None, 3):
            h = np.full((bucket, H), np.nan, np.float32)
            run(
                "embed_rows",
                make("LilyEmbedArgs", fmt=fmt, H=H, V=V),
                [step(rows=rows), ids, *at_odd_addresses(weights), h],
                bucket,
                isa=isa,
                split=split,
            )
            np.testing.assert_array_equal(h[:rows], reference.embed_rows(values, ids)[:rows].astype(np.float32))
            assert np.isnan(h[rows:]).all(), "rows past step.rows are not touched"
