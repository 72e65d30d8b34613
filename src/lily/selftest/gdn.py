"""Gated DeltaNet: the fused step of decode, and the kernels of a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lily.affine import from_bf16
from lily.selftest.case import EPS, Case, Form, Launch, Spec, act, act_blank, blank, blocks, normal
from lily.selftest.contract import make, step
from lily.selftest.measure import Near, Rounded, Same


class Heads:
    """Nk key heads and Nv value heads of Dk x Dv, with what is random in a layer."""

    def __init__(self, Nk: int, Nv: int, Dk: int = 128, Dv: int = 128) -> None:
        self.Nk, self.Nv, self.Dk, self.Dv = Nk, Nv, Dk, Dv
        self.C = 2 * Nk * Dk + Nv * Dv
        self.V = Nv * Dv
        self.rng = rng = np.random.default_rng(Nv * Dk + Dv)
        self.layer = {
            "conv_w": normal(rng, 4, self.C, scale=0.5),
            "A": -np.exp(rng.uniform(-6, 2, Nv)).astype(np.float32),  # from decays close to 1 to quick forgetting
            "dt_bias": normal(rng, Nv),
            "norm": 1 + normal(rng, self.Dv, scale=0.2),
        }

    def args(self, fused: bool = False) -> Any:
        """Rows as the prefill program has them, or as one row of all projections."""
        width = self.C + self.V + 2 * self.Nv
        ld = {"ld_qkv": width, "ld_z": width, "ld_ba": width} if fused else {"ld_qkv": self.C, "ld_z": self.V, "ld_ba": self.Nv}
        return make("LilyGdnArgs", Nk=self.Nk, Nv=self.Nv, Dk=self.Dk, Dv=self.Dv, eps=EPS, **ld)

    def rounded(self, *shape: int) -> np.ndarray:
        return from_bf16(act(normal(self.rng, *shape)))

    def __str__(self) -> str:
        return f"{self.Nk}/{self.Nv} heads of {self.Dk} x {self.Dv}"


def gdn_step(heads: Heads) -> Case:
    rng = heads.rng
    proj = np.concatenate([heads.rounded(heads.C), normal(rng, heads.V + heads.Nv), normal(rng, heads.Nv, scale=4)])
    S = normal(rng, heads.Nv, heads.Dk, heads.Dv)
    arrays = heads.layer | {"proj": proj, "conv_in": act(normal(rng, 3, heads.C)), "S_in": S}
    arrays |= {"conv_out": act_blank(3, heads.C), "S_out": blank(*S.shape), "o": act_blank(heads.V)}
    buffers = ["proj", "conv_w", "A", "dt_bias", "norm", "conv_in", "S_in", "conv_out", "S_out", "o"]
    return Case(arrays, [Launch("gdn_step", heads.args(True), buffers, heads.Nv)], {"o": Rounded(), "conv_out": Same(), "S_out": Near()})


def _snapshots(T: int, shape: tuple[int, ...], dtype: Any) -> tuple[dict[str, np.ndarray], list[str | None], np.ndarray]:
    """Buffers for the states after the first, a middle and the last row, the second of four being absent, and the step record."""
    rows = [0, min(1, T - 1), T // 2, T - 1]
    names: list[str | None] = ["shot0", None, "shot2", "shot3", *[None] * 4]
    return {n: blank(*shape, dtype=dtype) for n in names if n}, names, step(rows=T, n_snapshots=4, snapshot_rows=rows)


def conv_rows(heads: Heads, T: int) -> Case:
    shots, names, at = _snapshots(T, (3, heads.C), np.uint16)
    arrays = heads.layer | shots | {"step": at, "qkv": heads.rounded(T, heads.C), "conv_in": act(normal(heads.rng, 3, heads.C))}
    arrays |= {"conv_out": act_blank(3, heads.C), "y": blank(T, heads.C)}
    buffers = ["step", "qkv", "conv_w", "conv_in", "conv_out", "y", *names]
    checks = {"y": Near(), "conv_out": Same(), **{n: Same() for n in shots}}
    return Case(arrays, [Launch("conv_rows", heads.args(), buffers, blocks(heads.C, 128), rows=T)], checks)


def gdn_prepare_rows(heads: Heads, T: int) -> Case:
    rng = heads.rng
    y = normal(rng, T, heads.C)
    y[0, : heads.Dk] = 0  # a zero query stays zero
    a, b = normal(rng, T, heads.Nv, scale=4), normal(rng, T, heads.Nv)
    a[0, 0], b[0, 0] = -200, 200
    arrays = heads.layer | {"step": step(rows=T), "y": y, "b": b, "a": a, "gates": blank(T, heads.Nv, 2)}
    buffers = ["step", "y", "b", "a", "A", "dt_bias", "gates"]
    return Case(arrays, [Launch("gdn_prepare_rows", heads.args(), buffers, T, rows=T)], {"y": Near(), "gates": Near()})


def gdn_scan(heads: Heads, T: int, position: int = 0) -> Case:
    """Queries and keys of unit length, as gdn_prepare_rows leaves them."""
    rng = heads.rng
    y = normal(rng, T, heads.C)
    qk = y[:, : 2 * heads.Nk * heads.Dk].reshape(T, 2, heads.Nk, heads.Dk)
    qk /= np.linalg.norm(qk, axis=-1, keepdims=True)
    qk[:, 0] *= heads.Dk**-0.5
    gates = np.stack([np.exp(-np.exp(rng.uniform(-8, 1, (T, heads.Nv)))), rng.uniform(0, 1, (T, heads.Nv))], -1).astype(np.float32)
    S = normal(rng, heads.Nv, heads.Dk, heads.Dv)
    shots, names, at = _snapshots(T, S.shape, np.float32)
    at.view(np.uint32)[1] = position
    arrays = shots | {"step": at, "y": y, "gates": gates, "S_in": S, "S_out": blank(*S.shape), "o": blank(T, heads.V)}
    buffers = ["step", "y", "gates", "S_in", "S_out", "o", *names]
    launch = Launch("gdn_scan", heads.args(), buffers, heads.Nv * blocks(heads.Dv, 64), rows=T)
    forms = [Form(name, variant=f"gdn_scan={name}", bits=name != "chunked") for name in ("registers", "blocks", "chunked")]
    checks = {name: Near() for name in ("o", "S_out", *shots)}
    state = S.nbytes * (2 + len(shots))
    return Case(arrays, [launch], checks, forms=forms, bytes=state + y.nbytes + gates.nbytes + arrays["o"].nbytes)


def gated_norm_rows(heads: Heads, T: int) -> Case:
    rng = heads.rng
    arrays = heads.layer | {
        "step": step(rows=T - 1),
        "o": normal(rng, T, heads.V, scale=0.1),
        "z": normal(rng, T, heads.V),
        "x": act_blank(T, heads.V),
    }
    return Case(arrays, [Launch("gated_norm_rows", heads.args(), ["step", "o", "z", "norm", "x"], T, rows=T)], {"x": Rounded()})


# Key dims of each instance (32, 64, 128, 256), a value dim off the tile, every ratio of heads.
SMALL = ((2, 4, 128, 128), (1, 3, 128, 128), (2, 2, 16, 16), (2, 4, 64, 80), (1, 1, 256, 112))


def specs() -> Iterator[Spec]:
    for shape in SMALL:
        name = str(Heads(*shape))
        yield Spec("gdn_step", name, partial(_with, gdn_step, shape))
        yield Spec("gdn_prepare_rows", f"5 rows, {name}", partial(_with, gdn_prepare_rows, shape, 5))
        yield Spec("gdn_scan", f"9 rows, {name}", partial(_with, gdn_scan, shape, 9))
    # The convolution works in pieces of 16 rows, the scan in blocks of 32 or of 64 at multiples of 64.
    for T in (1, 16, 17):
        yield Spec("conv_rows", f"{T} rows, {Heads(1, 3)}", partial(_with, conv_rows, (1, 3), T))
    for T, position in ((1, 0), (33, 0), (65, 0), (70, 40)):
        yield Spec("gdn_scan", f"{T} rows from {position}, {Heads(1, 2)}", partial(_with, gdn_scan, (1, 2), T, position))
    yield Spec("gated_norm_rows", f"7 rows, {Heads(1, 3)}", partial(_with, gated_norm_rows, (1, 3), 7))
    real = (16, 32)
    name = str(Heads(*real))
    yield Spec("gdn_step", name, partial(_with, gdn_step, real), real=True)
    yield Spec("conv_rows", f"256 rows, {name}", partial(_with, conv_rows, real, 256), real=True, slow=True)
    yield Spec("gdn_prepare_rows", f"256 rows, {name}", partial(_with, gdn_prepare_rows, real, 256), real=True, slow=True)
    yield Spec("gdn_scan", f"256 rows, {name}", partial(_with, gdn_scan, real, 256), real=True, slow=True)
    yield Spec("gated_norm_rows", f"256 rows, {name}", partial(_with, gated_norm_rows, real, 256), real=True, slow=True)


def _with(build: Any, shape: tuple[int, ...], *more: int) -> Case:
    return build(Heads(*shape), *more)
