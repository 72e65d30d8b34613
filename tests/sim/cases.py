"""Single dispatches at the widths of the 35B model, with what each should move: the input of the counters' report."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from harness import make, step, structs  # noqa: E402

H, E, K_EXPERTS, INNER, V = 2048, 256, 8, 512, 248320
NK, NV, DK, DV = 16, 32, 128, 128
HQ, HKV, D = 16, 2, 256
CONV = 2 * NK * DK + NV * DV
GROUP = 64


@dataclass
class Stream:
    """One buffer of a case. kind: codes, scales, kv, state or other; expected: bytes that must be read, 0 when there is no bar.

    at_most: how often the expected bytes may be read. whole_lines: how much of the lines that codes, K and V touch must have been asked for.
    """

    name: str
    array: np.ndarray | None
    kind: str = "other"
    expected: int = 0
    at_most: float = 1.02
    whole_lines: float = 0.95


@dataclass
class Case:
    label: str
    kernel: str
    args: ctypes.Structure
    streams: list[Stream]
    rows: int = 1
    groups: int = 1  # threadgroups, where the kernel does not say itself
    indirect: int = -1
    variant: str = ""
    note: str = ""
    totals: dict[str, int] = field(default_factory=dict)  # bytes that a kind of stream moves, read and written together


def f32(*shape: int) -> np.ndarray:
    return np.full(shape, 0.01, np.float32)


def act(*shape: int) -> np.ndarray:
    return np.full(shape, 0x3C00, np.uint16)


def affine(
    rows: int, k: int, name: str = "", bits: int = 4, touched: float = 1.0, at_most: float = 1.02, whole_lines: float = 0.95
) -> list[Stream]:
    """Codes, scales and biases of a weight; touched: the part of its rows that the dispatch needs."""
    codes = np.random.default_rng(rows + k).integers(0, 2**32, rows * k * bits // 32, dtype=np.uint32)
    scales = np.full(rows * k // GROUP, 0x3A83, np.uint16)
    text = f"{name} " if name else ""
    return [
        Stream(f"{text}codes", codes, "codes", round(codes.nbytes * touched), at_most, whole_lines),
        Stream(f"{text}scales", scales, "scales", round(scales.nbytes * touched), at_most),
        Stream(f"{text}biases", scales.copy(), "scales", round(scales.nbytes * touched), at_most),
    ]


def fmt(bits: int = 4) -> dict[str, int]:
    return dict(kind=0, bits=bits, group=GROUP)


def gemv(label: str, rows: int, k: int, bits: int = 4, whole_lines: float = 0.95) -> Case:
    args = make("LilyGemvArgs", fmt=fmt(bits), K=k, n_segments=1, seg=[dict(rows=rows)])
    return Case(label, "gemv", args, [Stream("x", act(k)), Stream("y", f32(rows)), *affine(rows, k, bits=bits, whole_lines=whole_lines)])


def gemv_norm(label: str, segments: list[int], bits: int = 4) -> Case:
    seg, at = [], 0
    for rows in segments:
        seg.append(dict(rows=rows, out=at))
        at += rows
    args = make("LilyGemvArgs", fmt=fmt(bits), K=H, n_segments=len(seg), eps=1e-6, seg=seg)
    streams = [Stream("h", f32(H)), Stream("ssq", f32(H // 16)), Stream("norm weight", f32(H)), Stream("y", f32(at))]
    for i, rows in enumerate(segments):
        streams += affine(rows, H, f"segment {i}", bits)
    return Case(label, "gemv_norm", args, streams)


def gemv_residual(label: str, k: int, rows: int = H) -> Case:
    args = make("LilyGemvArgs", fmt=fmt(), K=k, n_segments=1, seg=[dict(rows=rows)])
    return Case(
        label, "gemv_residual", args, [Stream("x", act(k)), Stream("h", f32(rows)), Stream("ssq", f32(rows // 16)), *affine(rows, k)]
    )


def _normed() -> list[Stream]:
    return [Stream("h", f32(H)), Stream("ssq", f32(H // 16)), Stream("norm weight", f32(H))]


def _shared_gate_up() -> Case:
    args = make("LilyGateUpArgs", gate=fmt(), up=fmt(), K=H, I=INNER, eps=1e-6)
    return Case(
        "shared expert: gate, up",
        "gate_up_norm",
        args,
        [*_normed(), Stream("a", act(INNER)), *affine(INNER, H, "gate"), *affine(INNER, H, "up")],
    )


def _moe_gate_up() -> Case:
    part = K_EXPERTS / E
    logits = np.random.default_rng(1).normal(0, 1, E).astype(np.float32)
    args = make("LilyMoeArgs", a=fmt(), b=fmt(), K=H, I=INNER, E=E, k=K_EXPERTS, a_stride=INNER, b_stride=INNER, eps=1e-6)
    streams = [
        *_normed(),
        Stream("logits", logits),
        Stream("ids", np.zeros(8, np.uint32)),
        Stream("route", f32(8)),
        Stream("a", act(8, INNER)),
    ]
    return Case(
        "8 experts: gate, up",
        "moe_gate_up",
        args,
        streams + affine(E * INNER, H, "gate", touched=part) + affine(E * INNER, H, "up", touched=part),
    )


def _moe_down() -> Case:
    ids = np.random.default_rng(2).permutation(E)[:8].astype(np.uint32)
    args = make("LilyMoeArgs", a=fmt(), b=fmt(), I=INNER, S=INNER, H=H, E=E, k=K_EXPERTS, a_stride=H)
    streams = [
        Stream("a", act(8, INNER)),
        Stream("ids", ids),
        Stream("route", f32(8)),
        Stream("shared", act(INNER)),
        Stream("shared logit", f32(1)),
    ]
    streams += [Stream("h", f32(H)), Stream("ssq", f32(H // 16))]
    return Case(
        "8 experts and the shared one: down",
        "moe_down",
        args,
        streams + affine(E * H, INNER, "down", touched=K_EXPERTS / E) + affine(H, INNER, "shared"),
    )


def _gdn_args(heads: int = NV):
    return make("LilyGdnArgs", Nk=heads // 2, Nv=heads, Dk=DK, Dv=DV, ld_qkv=2 * heads * DK, ld_z=heads * DV, ld_ba=heads, eps=1e-6)


def _gdn_step() -> Case:
    state = NV * DK * DV * 4
    streams = [
        Stream("proj", f32(CONV + NV * DV + 2 * NV)),
        Stream("conv_w", f32(4, CONV)),
        Stream("A", -f32(NV)),
        Stream("dt_bias", f32(NV)),
    ]
    streams += [Stream("norm", f32(DV)), Stream("conv in", act(3, CONV)), Stream("S in", f32(NV, DK, DV), "state", state)]
    streams += [Stream("conv out", act(3, CONV)), Stream("S out", f32(NV, DK, DV), "state"), Stream("o", act(NV * DV))]
    return Case("DeltaNet step", "gdn_step", _gdn_args(), streams, totals={"state": 2 * state})


def gdn_scan(variant: str, rows: int = 2048, heads: int = NV) -> Case:
    """heads: value heads; there are half as many key heads."""
    state = heads * DK * DV * 4
    streams = [Stream("step", step(rows=rows)), Stream("y", f32(rows, 2 * heads * DK)), Stream("gates", f32(rows, heads, 2))]
    streams += [
        Stream("S in", f32(heads, DK, DV), "state"),
        Stream("S out", f32(heads, DK, DV), "state"),
        Stream("o", f32(rows, heads * DV)),
    ]
    moved = 2 * state * (rows // 32 if variant == "blocks" else 1)
    return Case(
        f"scan of {rows} rows, {variant}", "gdn_scan", _gdn_args(heads), streams, rows=rows, variant=variant, totals={"state": moved}
    )


def _attention_args(n_splits: int, per_split: int, **more):
    ld = 2 * HQ * D + 2 * HKV * D
    return make("LilyAttnArgs", Hq=HQ, Hkv=HKV, D=D, R=64, ld=ld, n_splits=n_splits, blocks_per_split=per_split, gated=1, rope_theta=1e7, eps=1e-6,
                scale=D**-0.5, **more)  # fmt: skip


def _kv(tokens: int) -> tuple[Stream, Stream, Stream]:
    blocks = -(-tokens // 256)
    table = np.random.default_rng(3).permutation(blocks).astype(np.uint32)
    used = tokens * HKV * D * 2
    return Stream("table", table), Stream("K", act(blocks, HKV, 256, D), "kv", used), Stream("V", act(blocks, HKV, 256, D), "kv", used)


def attn_split(kernel: str, tokens: int, variant: str = "") -> Case:
    table, k, v = _kv(tokens)
    n = 64 if kernel == "attn_split_long" else min(16, -(-tokens // 256))
    blocks = -(-tokens // 256)
    per = -(-blocks // n)
    k.at_most = v.at_most = 8.16 if variant == "one_head" else 2.04  # each row serves four of the eight query heads, or one
    streams = [
        Stream("step", step(position=tokens - 1, rows=1)),
        Stream("q", act(HQ, D)),
        table,
        k,
        v,
        Stream("o", f32(n, HQ, D)),
        Stream("ml", f32(n, HQ, 2)),
    ]
    label = f"attention over {tokens:,} keys" + (f", {variant}" if variant else "")
    return Case(label, kernel, _attention_args(n, per), streams, variant=variant)


def _attn_rows(T: int, position: int) -> Case:
    table, k, v = _kv(position + T)
    tiles = -(-T * (HQ // HKV) // 32)
    k.at_most = v.at_most = tiles
    streams = [
        Stream("step", step(position=position, rows=T)),
        Stream("q", act(T, HQ, D)),
        Stream("qkv", f32(T, 2 * HQ * D + 2 * HKV * D)),
        table,
        k,
        v,
    ]
    streams += [Stream("x", act(T, HQ * D)), Stream("o", f32(T, HQ, D)), Stream("ml", f32(T, HQ, 2))]
    return Case(f"prefill attention, {T} rows at {position:,}", "attn_rows", _attention_args(1, 1, rows_per_group=4), streams, rows=T)


def gemm(label: str, kernel: str, n: int, k: int, T: int, bits: int = 4, whole_lines: float = 0.95) -> Case:
    times = -(-T // 32)
    args = make("LilyGemmArgs", fmt=fmt(bits), up=fmt(bits), K=k, N=n, ldy=n)
    head = [Stream("step", step(rows=T)), Stream("x", act(T, k))]
    if kernel == "gate_up_rows":
        return Case(
            label,
            kernel,
            args,
            [*head, Stream("a", act(T, n)), *affine(n, k, "gate", at_most=times), *affine(n, k, "up", at_most=times)],
            rows=T,
        )
    weight = affine(n, k, bits=bits, at_most=times, whole_lines=whole_lines)
    return Case(label, kernel, args, [*head, Stream("y", f32(T, n)), *weight], rows=T)


ROWS_OF_EXPERTS = [1, 5, 16, 17, 31, 32, 33, 64]


def experts_rows(kernel: str, tile_rows: int, experts: int = E, hidden: int = H, inner: int = INNER) -> Case:
    """Experts with few and many rows, every fourth expert of the first 32; a tile reads its expert's weights once."""
    slots = sum(ROWS_OF_EXPERTS)
    n, k = (hidden, inner) if kernel == "moe_gemm_rows" else (inner, hidden)
    tiles, at, weight_reads = [], 0, 0
    offsets = np.zeros(experts + 1, np.uint32)
    for i, rows in enumerate(ROWS_OF_EXPERTS):
        for first in range(0, rows, tile_rows):
            tiles.append([4 * i, at + first, min(tile_rows, rows - first), 0])
        offsets[4 * i + 1 :] = at + rows
        at += rows
        weight_reads += -(-rows // tile_rows)
    assert len(tiles) == weight_reads
    per_group = 64 if kernel == "moe_gemm_rows" else 32
    grid = np.array([-(-n // per_group), len(tiles), 1], np.uint32)
    part = weight_reads / experts
    slot_row = (np.arange(slots) % 64).astype(np.uint32)
    args = make("LilyMoeRowsArgs", a=fmt(), b=fmt(), K=k, N=n, E=experts, k=K_EXPERTS, H=hidden, a_stride=n, b_stride=n, tile_rows=tile_rows,
                by_slot=int(kernel == "moe_gemm_rows"))  # fmt: skip
    x = act(slots, k) if kernel == "moe_gemm_rows" else act(64, k)
    streams = [Stream("offsets", None), Stream("slot_row", slot_row), Stream("x", x)]
    if kernel == "moe_gemm_rows":
        streams += [Stream("y", f32(slots, n)), *affine(experts * n, k, touched=part, at_most=1.0)]
    else:
        streams += [
            Stream("a", act(slots, n)),
            *affine(experts * n, k, "gate", touched=part, at_most=1.0),
            *affine(experts * n, k, "up", touched=part, at_most=1.0),
        ]
    streams += [Stream("tiles", np.array(tiles, np.uint32)), Stream("grid", grid)]
    what = "down" if kernel == "moe_gemm_rows" else "gate, up"
    note = f"expected: the weights of an expert once for each of its {len(tiles)} tiles together"
    return Case(f"experts in tiles of {tile_rows}: {what}", kernel, args, streams, rows=64, indirect=len(streams) - 1, note=note)


def _sampling() -> Iterator[Case]:
    blocks = -(-V // 16384)
    record = bytearray(ctypes.sizeof(structs()["LilySample"]))
    settings = make("LilySample", temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.0)
    record[:] = bytes(settings)
    sample = np.frombuffer(record, np.uint8).copy()
    logits = np.random.default_rng(4).normal(0, 2, V).astype(np.float32)
    args = make("LilySampleArgs", V=V, blocks=blocks)
    y, block, hist = f32(V), f32(blocks, 4), np.zeros((blocks, 2048), np.uint32)
    counts = np.zeros(V, np.uint32)
    yield Case("sampler: adjust", "sample_adjust", args, [Stream("sample", sample), Stream("logits", logits, "logits", logits.nbytes), Stream("counts", counts),
               Stream("bias", None), Stream("mask", None), Stream("y", y), Stream("block", block), Stream("hist", hist)])  # fmt: skip


#: What codes of 3, 5 and 6 bits can reach: rows of 512 that are no whole number of lines, and pieces of 96 and 80 bytes in the tiles.
SHORT_ROWS = {3: 0.60, 5: 0.62}
TILES = {3: 0.45, 5: 0.38, 6: 0.45}


def formats() -> dict[str, Callable[[], Case]]:
    """The widths of the decode and prefill products in the other formats, a few rows of each."""
    found: dict[str, Callable[[], Case]] = {}
    for bits in (2, 3, 5, 6, 8):
        for k in (512, 2048, 4096):
            least = SHORT_ROWS.get(bits, 0.95) if k == 512 else 0.95
            found[f"gemv_{bits}_bits_{k}"] = lambda bits=bits, k=k, least=least: gemv(f"{bits} bits, rows of {k:,}", 64, k, bits, least)
        least = TILES.get(bits, 0.95)
        found[f"gemm_{bits}_bits"] = lambda bits=bits, least=least: gemm(f"{bits} bits, 32 rows", "gemm", 64, 2048, 32, bits, least)
    return found


CASES: dict[str, Callable[[], Case]] = {
    "in_proj": lambda: gemv_norm("DeltaNet: norm, q, k, v, z, b, a", [CONV, NV * DV, NV, NV]),
    "qkv": lambda: gemv_norm("attention: norm, q, gate, k, v", [2 * HQ * D, HKV * D, HKV * D]),
    "router": lambda: gemv_norm("router and shared gate, 8 bits", [E, 1], bits=8),
    "out_proj": lambda: gemv_residual("out_proj + residual", NV * DV),
    "head": lambda: gemv("head, 248,320 rows", V, H),
    "shared_gate_up": _shared_gate_up,
    "moe_gate_up": _moe_gate_up,
    "moe_down": _moe_down,
    "gdn_step": _gdn_step,
    "attn_split": lambda: attn_split("attn_split", 8000),
    "attn_split_one": lambda: attn_split("attn_split", 8000, "one_head"),
    "attn_split_long": lambda: attn_split("attn_split_long", 33000),
    "sample_adjust": lambda: next(_sampling()),
    "gemm": lambda: gemm("DeltaNet q, k, v, 50 rows", "gemm", CONV, H, 50),
    "gemm_residual": lambda: gemm("out_proj, 50 rows", "gemm_residual", H, NV * DV, 50),
    "gate_up_rows": lambda: gemm("shared expert, 50 rows", "gate_up_rows", INNER, H, 50),
    "moe_gate_up_rows_32": lambda: experts_rows("moe_gate_up_rows", 32),
    "moe_gate_up_rows_16": lambda: experts_rows("moe_gate_up_rows", 16),
    "moe_gemm_rows_32": lambda: experts_rows("moe_gemm_rows", 32),
    "moe_gemm_rows_16": lambda: experts_rows("moe_gemm_rows", 16),
    "attn_rows": lambda: _attn_rows(16, 2000),
    "scan_registers": lambda: gdn_scan("registers"),
    "scan_blocks": lambda: gdn_scan("blocks"),
    **formats(),
}
