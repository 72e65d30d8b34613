"""Sampling: logits adjusted, weights summed by digit, a token drawn; and log probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.selftest.case import Case, Launch, Spec, blank, blocks, normal
from lily.selftest.contract import make, step, structs
from lily.selftest.measure import Check, Error, Near, Same, differing

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

GREEDY, PENALTY, BIAS, MASK, LOGPROBS = 1, 2, 4, 8, 16
BLOCK, BINS = 16384, 2048
#: What a request may ask for, by name.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"flags": GREEDY | LOGPROBS, "n_logprobs": 5},
    "plain": {},
    "top-k, top-p, min-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "flags": LOGPROBS, "n_logprobs": 20},
    "top-p": {"top_p": 0.9, "temperature": 1.3},
    "penalties, bias, mask": {
        "flags": PENALTY | BIAS | MASK, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.05,
    },
}  # fmt: skip


class Drawn(Check):
    """A sample record: the token and the alternatives' ids exactly, log probabilities within what a sum of exponentials may differ."""

    def errors(self, got: Array, want: Array) -> list[Error]:
        mine, theirs = (structs()["LilySample"].from_buffer_copy(record.tobytes()) for record in (got, want))
        n = theirs.n_logprobs
        ids, values = [], []
        for record in (mine, theirs):
            ids.append(np.array([record.token, *record.top_ids[:n]], np.uint32))
            values.append(np.array([record.logprob, *record.top_logprobs[:n]], np.float32))
        return [differing(*ids), *Near(4e-6).errors(*values)]


def sample(V: int, name: str, kernels: int) -> Case:
    """The first `kernels` of adjust, mass and draw."""
    rng = np.random.default_rng(V)
    values = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed_lo": 9, "seed_hi": 5, "position": 77, **SETTINGS[name]}
    record = np.frombuffer(bytes(make("LilySample", **values)), np.uint8).copy()
    counts = np.where(rng.random(V) < 0.2, rng.integers(0, 4, V), 0).astype(np.uint32)
    counts[rng.random(V) < 0.2] |= np.uint32(1 << 31)
    mask = np.packbits(np.append(rng.random(V) < 0.9, np.zeros(-V % 32, bool)), bitorder="little").view(np.uint32)
    n = blocks(V, BLOCK)
    arrays = {
        "sample": record, "logits": normal(rng, V, scale=3), "counts": counts, "bias": normal(rng, V), "mask": mask, "y": blank(V),
        "block": blank(n, 4), "hist": blank(n, BINS, dtype=np.uint32), "mass": blank(n, BINS), "list": blank(V, 2), "next": step(token=1, position=3),
    }  # fmt: skip
    flags = values.get("flags", 0)
    optional = [name if flags & flag else None for name, flag in (("counts", PENALTY), ("bias", BIAS), ("mask", MASK))]
    args = make("LilySampleArgs", V=V, blocks=n)
    launches = [
        Launch("sample_adjust", args, ["sample", "logits", *optional, "y", "block", "hist"], n),
        Launch("sample_mass", args, ["sample", "y", "block", "mass"], n),
        Launch("sample_draw", args, ["sample", "y", "block", "hist", "mass", "list", optional[0], "next"], 1),
    ]
    checks: dict[str, Check] = {"y": Same(), "block": Near()}
    if kernels == 2:
        checks = {"mass": Near()}
    if kernels == 3:
        checks = {"sample": Drawn(), "next": Same()} | ({"counts": Same()} if flags & PENALTY else {})
    return Case(arrays, launches[:kernels], checks, bytes=None if kernels == 1 else 4 * V * 3)


def score_rows(V: int, rows: int) -> Case:
    rng = np.random.default_rng(V)
    targets = rng.integers(0, V, 64).astype(np.int32)
    targets[1] = -1
    arrays = {"step": step(rows=rows), "logits": normal(rng, rows, V, scale=5), "targets": targets, "out": blank(64)}
    launch = Launch("score_rows", make("LilySampleArgs", V=V), ["step", "logits", "targets", "out"], 64, rows=64)
    return Case(arrays, [launch], {"out": Near(4e-6)})


def specs() -> Iterator[Spec]:
    for V, real in ((7, False), (512, False), (20_000, False), (248_320, True)):
        for name in SETTINGS:
            if V == 20_000 or name in ("greedy", "top-p") or (real and name == "plain"):
                yield Spec("sample_adjust", f"{V}, {name}", partial(sample, V, name, 1), real)
                yield Spec("sample_draw", f"{V}, {name}", partial(sample, V, name, 3), real)
        yield Spec("sample_mass", f"{V}, top-p", partial(sample, V, "top-p", 2), real)
        yield Spec("score_rows", f"{8 if V > 600 else 64} rows of {V}", partial(score_rows, V, 8 if V > 600 else 64), real)
