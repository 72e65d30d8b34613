"""The dispatches without a bar of their own, at the widths of the 35B model: norms, what stands around attention and the scan, routing, twins."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from .cases import CONV, DK, DV, HKV, HQ, INNER, K_EXPERTS, NK, NV, Case, D, E, H, Stream, V, act, affine, f32, fmt, make, step, structs

T = 50  # rows of a chunk
LD = 2 * HQ * D + 2 * HKV * D
SPLITS = 16
#: Rows that are looked up value by value: a simdgroup asks for 32 codes of a line, and twice for the scale of a group of 64.
LOOKED_UP = dict(at_most=1.12, whole_lines=0.12)
ROUTE = dict(E=E, k=K_EXPERTS, T=T, tile_rows=16, N_a=2 * INNER, N_b=H)


def _case(
    label: str,
    kernel: str,
    args: ctypes.Structure,
    buffers: list[np.ndarray | Stream | None],
    rows: int = 1,
    variant: str = "",
    groups: int = 1,
) -> Case:
    streams = [b if isinstance(b, Stream) else Stream(f"buffer {i}", b) for i, b in enumerate(buffers)]
    return Case(label, kernel, args, streams, rows=rows, variant=variant, groups=groups)


def _words(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint32)


def _norm(**more):
    return make("LilyNormArgs", H=H, eps=1e-6, **more)


def _gdn():
    return make("LilyGdnArgs", Nk=NK, Nv=NV, Dk=DK, Dv=DV, ld_qkv=CONV, ld_z=NV * DV, ld_ba=NV, eps=1e-6)


def _attn(**more):
    return make("LilyAttnArgs", Hq=HQ, Hkv=HKV, D=D, R=64, ld=LD, n_splits=SPLITS, blocks_per_split=2, gated=1, rows_per_group=4, rope_theta=1e7, eps=1e-6,
                scale=D**-0.5, **more)  # fmt: skip


def _experts(**more):
    return make("LilyMoeRowsArgs", a=fmt(), b=fmt(), E=E, k=K_EXPERTS, H=H, K=H, N=INNER, **more)


def _ids() -> np.ndarray:
    return np.argsort(np.random.default_rng(5).random((T, E)), axis=1)[:, :K_EXPERTS].astype(np.uint32)


def _arena(rows: int) -> np.ndarray:
    return act(-(-rows // 256), HKV, 256, D)


def _step(position: int = 0, rows: int = T) -> np.ndarray:
    return step(position=position, rows=rows)


def _sample(kernel: str) -> Case:
    blocks = -(-V // 16384)
    record = np.frombuffer(bytes(make("LilySample", temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.0)), np.uint8).copy()
    y = np.random.default_rng(4).normal(0, 2, V).astype(np.float32)
    block, hist, mass = f32(blocks, 4), _words(blocks, 2048), f32(blocks, 2048)
    for b in range(blocks):  # as sample_adjust leaves them
        part = y[b * 16384 : (b + 1) * 16384]
        block[b] = part.max(), (part.argmax() + b * 16384).astype(np.uint32).view(np.float32), np.exp(part - part.max()).sum(), 0
        bits = part.view(np.uint32)
        key = np.where(bits >> 31, ~bits, bits | 0x80000000)
        hist[b] = np.bincount(key >> 21, minlength=2048)
    args = make("LilySampleArgs", V=V, blocks=blocks)
    if kernel == "sample_mass":
        return _case("sampler: mass", kernel, args, [record, y, block, mass])
    next_step = np.zeros(ctypes.sizeof(structs()["LilyStep"]), np.uint8)
    return _case("sampler: draw, top-k 20, top-p", kernel, args, [record, y, block, hist, mass, f32(V, 2), None, next_step])


def _embed(kernel: str, rows: int) -> Case:
    table = affine(4096, H, touched=rows / 4096, **LOOKED_UP)
    args = make("LilyEmbedArgs", fmt=fmt(), H=H, V=4096)
    if kernel == "embed_step":
        return _case("embedding", kernel, args, [step(token=7, rows=1), *table, f32(H), f32(H // 16)])
    return _case(f"embedding, {rows} rows", kernel, args, [_step(), np.arange(rows, dtype=np.int32), *table, f32(rows, H)], rows)


def _moe_gemv() -> Case:
    args = make("LilyMoeArgs", a=fmt(), K=H, I=INNER, H=INNER, E=E, k=K_EXPERTS, a_stride=INNER)
    ids = np.arange(0, 8 * K_EXPERTS, 8, dtype=np.uint32)
    return _case(
        "twin: 8 experts, gate", "moe_gemv", args, [ids, act(H), f32(K_EXPERTS, INNER), *affine(E * INNER, H, touched=K_EXPERTS / E)]
    )


def _gemv_segments() -> Case:
    sizes = [CONV, NV * DV, NV, NV]
    seg = [dict(rows=n, out=sum(sizes[:i])) for i, n in enumerate(sizes)]
    weights = [s for i, n in enumerate(sizes) for s in affine(n, H, f"segment {i}")]
    return _case(
        "twin: q, k, v, z, b, a", "gemv", make("LilyGemvArgs", fmt=fmt(), K=H, n_segments=4, seg=seg), [act(H), f32(sum(sizes)), *weights]
    )


SMALL: dict[str, Callable[[], Case]] = {
    "embed_step": lambda: _embed("embed_step", 1),
    "attn_prepare": lambda: _case(
        "attention: norm, rope, K/V write",
        "attn_prepare",
        _attn(),
        [_step(9, 1), f32(LD), f32(D), f32(D), _words(1), _arena(1), _arena(1), act(HQ, D)],
    ),
    "attn_combine": lambda: _case(
        "attention: splits, gate", "attn_combine", _attn(), [_step(8000, 1), f32(SPLITS, HQ, D), f32(SPLITS, HQ, 2), act(HQ * D), f32(LD)]
    ),
    "norm_final": lambda: _case("final norm", "norm_final", _norm(), [f32(H), f32(H // 16), f32(H), act(H), f32(H)]),
    "sample_mass": lambda: _sample("sample_mass"),
    "sample_draw": lambda: _sample("sample_draw"),
    "embed_rows": lambda: _embed("embed_rows", T),
    "rmsnorm_rows": lambda: _case("norm, 50 rows", "rmsnorm_rows", _norm(), [_step(), f32(T, H), f32(H), act(T, H)], T),
    "conv_rows": lambda: _case(
        "convolution, 50 rows",
        "conv_rows",
        _gdn(),
        [_step(), f32(T, CONV), f32(4, CONV), act(3, CONV), act(3, CONV), f32(T, CONV), *[None] * 8],
        T,
    ),
    "gdn_prepare_rows": lambda: _case(
        "q, k norm and gates, 50 rows",
        "gdn_prepare_rows",
        _gdn(),
        [_step(), f32(T, CONV), f32(T, NV), f32(T, NV), -f32(NV), f32(NV), f32(T, NV, 2)],
        T,
    ),
    "gdn_scan_chunked": lambda: _case(
        "scan of 128 rows, chunked",
        "gdn_scan",
        _gdn(),
        [_step(rows=128), f32(128, CONV), f32(128, NV, 2), f32(NV, DK, DV), f32(NV, DK, DV), f32(128, NV * DV), *[None] * 8],
        128,
        "chunked",
    ),
    "gated_norm_rows": lambda: _case(
        "gated norm, 50 rows", "gated_norm_rows", _gdn(), [_step(), f32(T, NV * DV), f32(T, NV * DV), f32(DV), act(T, NV * DV)], T
    ),
    "attn_prepare_rows": lambda: _case(
        "attention: norm, rope, K/V write, 50 rows",
        "attn_prepare_rows",
        _attn(),
        [_step(), f32(T, LD), f32(D), f32(D), _words(1), _arena(T), _arena(T), act(T, HQ, D)],
        T,
    ),
    "moe_topk_rows": lambda: _case(
        "top-8, 50 rows", "moe_topk_rows", _experts(), [_step(), f32(T, E), _words(T, K_EXPERTS), f32(T, K_EXPERTS)], T
    ),
    "moe_histogram": lambda: _case(
        "routing: histogram, 50 rows", "moe_histogram", make("LilyRouteArgs", **ROUTE), [_step(), _ids(), _words(1, E)], T
    ),
    "moe_scan": lambda: _case(
        "routing: scan and tile map, 50 rows",
        "moe_scan",
        make("LilyRouteArgs", **ROUTE),
        [
            _step(),
            np.bincount(_ids().ravel(), minlength=E).astype(np.uint32)[None],
            _words(E + 1),
            _words(1, E),
            _words(T * K_EXPERTS // 16 + E, 4),
            _words(2, 3),
        ],
        T,
    ),
    "moe_scatter": lambda: _case(
        "routing: scatter, 50 rows",
        "moe_scatter",
        make("LilyRouteArgs", **ROUTE),
        [
            _step(),
            _ids(),
            np.concatenate([[0], np.bincount(_ids().ravel(), minlength=E).cumsum()[:-1]]).astype(np.uint32)[None],
            _words(T * K_EXPERTS),
            _words(T, K_EXPERTS),
        ],
        T,
    ),  # fmt: skip
    "moe_combine_rows": lambda: _case(
        "experts and residual, 50 rows",
        "moe_combine_rows",
        _experts(),
        [
            _step(),
            np.arange(T * K_EXPERTS, dtype=np.uint32).reshape(T, -1),
            f32(T, K_EXPERTS),
            f32(T * K_EXPERTS, H),
            f32(T, H),
            f32(T),
            f32(T, H),
        ],
        T,
    ),
    "take_rows": lambda: _case("last row", "take_rows", _norm(), [_step(), f32(T, H), f32(H), *[None] * 9], T),
    "score_rows": lambda: _case(
        "scores of 2 rows", "score_rows", make("LilySampleArgs", V=V), [_step(rows=2), f32(2, V), np.zeros(64, np.int32), f32(64)], 2
    ),
    "expand_rows": lambda: _case(
        "comparison: out_proj expanded",
        "expand_rows",
        make("LilyGemmArgs", fmt=fmt(), K=NV * DV, N=64),
        [*affine(64, NV * DV, **LOOKED_UP), act(64, NV * DV)],
        groups=64,
    ),
    "gemv_segments": _gemv_segments,
    "moe_gemv": _moe_gemv,
    "residual_rows": lambda: _case("twin: residual, 50 rows", "residual_rows", _norm(), [_step(), f32(T, H), f32(T, H)], T),
    "residual_norm_rows": lambda: _case(
        "twin: residual, norm", "residual_norm_rows", _norm(), [_step(rows=1), f32(1, H), f32(1, H), f32(H), act(1, H)]
    ),
    "residual_step": lambda: _case("twin in the tests: residual", "residual_step", _norm(), [f32(H), f32(H), f32(H // 16)]),
    "swiglu_rows": lambda: _case(
        "twin: SwiGLU of 8 experts, 50 rows",
        "swiglu_rows",
        make("LilyGemmArgs", N=INNER, rows_per_token=K_EXPERTS),
        [_step(), f32(T * K_EXPERTS, INNER), f32(T * K_EXPERTS, INNER), act(T * K_EXPERTS, INNER)],
        T,
    ),
    "head_norm_rows": lambda: _case("twin: q norm, 50 rows", "head_norm_rows", _attn(), [_step(), f32(T, LD), f32(D), f32(T, HQ, D)], T),
    "rope_rows": lambda: _case("twin: rope, 50 rows", "rope_rows", _attn(), [_step(), f32(T, HQ, D), act(T, HQ, D)], T),
    "kv_write_rows": lambda: _case(
        "twin: K/V write, 50 rows", "kv_write_rows", _attn(), [_step(), f32(T, HKV, D), f32(T, LD), _words(1), _arena(T), _arena(T)], T
    ),
    "gate_rows": lambda: _case(
        "twin: output gate, 50 rows", "gate_rows", _attn(), [_step(), f32(T, HQ * D), f32(T, LD), act(T, HQ * D)], T
    ),
}
