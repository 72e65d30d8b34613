"""Embedding look-ups, norms, the residual stream, and the rows that a chunk hands on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lily.selftest.case import EPS, FORMATS, Case, Launch, Spec, act_blank, blank, normal, ssq, weight
from lily.selftest.contract import make, step
from lily.selftest.measure import Near, Rounded, Same


def embed_step(H: int, V: int, form: str, token: int) -> Case:
    arrays = {"step": step(token=token, rows=1), "h": blank(H), "ssq": blank(H // 16)}
    w = weight(np.random.default_rng(V), V, H, form)
    names = w.add(arrays, "table")
    args = make("LilyEmbedArgs", fmt=w.format, H=H, V=V)
    row = w.nbytes // V
    return Case(
        arrays,
        [Launch("embed_step", args, ["step", *names, "h", "ssq"], 1)],
        {"h": Same(), "ssq": Near()},
        bytes=row + 4 * H + H // 4,
    )


def embed_rows(H: int, V: int, form: str, T: int) -> Case:
    """Ids outside of the vocabulary read row 0; the last two rows are dead."""
    rng = np.random.default_rng(V)
    ids = rng.integers(0, V, T).astype(np.int32)
    ids[:3] = [V - 1, -1, V]
    arrays = {"step": step(rows=T - 2), "ids": ids, "h": blank(T, H)}
    w = weight(rng, V, H, form)
    names = w.add(arrays, "table")
    args = make("LilyEmbedArgs", fmt=w.format, H=H, V=V)
    launch = Launch("embed_rows", args, ["step", "ids", *names, "h"], T, rows=T)
    return Case(arrays, [launch], {"h": Same()}, bytes=T * (w.nbytes // V + 4 * H))


def _stream(rows: int, H: int) -> np.ndarray:
    rng = np.random.default_rng(H)
    h = normal(rng, rows, H) * np.exp(normal(rng, rows, 1))
    h[0, :2] *= 100  # residual streams have a few large channels
    return h


def _norm(H: int, copy_all: int = 0) -> object:
    return make("LilyNormArgs", H=H, eps=EPS, copy_all=copy_all)


def rmsnorm_rows(T: int, H: int) -> Case:
    arrays = {"step": step(rows=T - 1), "h": _stream(T, H), "weight": 1 + _stream(1, H)[0] / 300, "x": act_blank(T, H)}
    return Case(arrays, [Launch("rmsnorm_rows", _norm(H), ["step", "h", "weight", "x"], T, rows=T)], {"x": Rounded()})


def norm_final(H: int) -> Case:
    h = _stream(1, H)[0]
    arrays = {"h": h, "ssq": ssq(h), "weight": 1 + h / 300, "x": act_blank(H), "hidden": blank(H)}
    return Case(arrays, [Launch("norm_final", _norm(H), ["h", "ssq", "weight", "x", "hidden"], 1)], {"x": Rounded(), "hidden": Same()})


def residual_step(H: int) -> Case:
    arrays = {"y": _stream(2, H)[1].copy(), "h": _stream(1, H)[0], "ssq": blank(H // 16)}
    return Case(arrays, [Launch("residual_step", _norm(H), ["y", "h", "ssq"], 1)], {"h": Same(), "ssq": Near()})


def residual_rows(T: int, H: int) -> Case:
    arrays = {"step": step(rows=T - 1), "y": _stream(T, H)[::-1].copy(), "h": _stream(T, H)}
    return Case(arrays, [Launch("residual_rows", _norm(H), ["step", "y", "h"], T, rows=T)], {"h": Same()})


def residual_norm_rows(T: int, H: int) -> Case:
    arrays = {"step": step(rows=T - 1), "y": _stream(T, H)[::-1].copy(), "h": _stream(T, H), "weight": 1 + _stream(1, H)[0] / 300}
    arrays["x"] = act_blank(T, H)
    launch = Launch("residual_norm_rows", _norm(H), ["step", "y", "h", "weight", "x"], T, rows=T)
    return Case(arrays, [launch], {"h": Same(), "x": Rounded()})


def take_rows(T: int, H: int, copy_all: int) -> Case:
    """Snapshots after the first, a middle and the last live row, and one that nobody wants."""
    live = T - 3
    arrays = {"step": step(rows=live, n_snapshots=4, snapshot_rows=[0, 1, live // 2, live - 1]), "h": _stream(T, H), "hidden": blank(H)}
    shots: list[str | None] = ["shot0", None, "shot2", "shot3", *[None] * 4]
    arrays |= {name: blank(H) for name in shots if name} | {"all": blank(T, H)}
    buffers = ["step", "h", "hidden", *shots, "all" if copy_all else None]
    written = {name: Same() for name in buffers[2:] if name is not None}
    return Case(arrays, [Launch("take_rows", _norm(H, copy_all), buffers, T, rows=T)], written)


def specs() -> Iterator[Spec]:
    for form in FORMATS:
        yield Spec("embed_rows", f"8 of 37 x 384, {form}", partial(embed_rows, 384, 37, form, 8))
    for form in ("4g64", "8g64", "bf16"):
        for token, what in ((36, "the last id"), (37, "an id too high")):
            yield Spec("embed_step", f"37 x 384, {form}, {what}", partial(embed_step, 384, 37, form, token))
    for H in (128, 1152, 8192):  # 8,192 is the widest row
        yield Spec("rmsnorm_rows", f"3 x {H}", partial(rmsnorm_rows, 3, H))
    for H in (128, 2048):
        yield Spec("norm_final", f"{H}", partial(norm_final, H))
        yield Spec("residual_step", f"{H}", partial(residual_step, H))
    yield Spec("residual_rows", "6 x 1152", partial(residual_rows, 6, 1152))
    for H in (128, 1152, 8192):
        yield Spec("residual_norm_rows", f"3 x {H}", partial(residual_norm_rows, 3, H))
    for copy_all in (0, 1):
        yield Spec("take_rows", f"8 x 256{', all copied' * copy_all}", partial(take_rows, 8, 256, copy_all))
    yield Spec("embed_step", "32768 x 2048, 4g64", partial(embed_step, 2048, 32768, "4g64", 12345), real=True)
    yield Spec("embed_rows", "512 of 32768 x 2048, 4g64", partial(embed_rows, 2048, 32768, "4g64", 512), real=True)
    yield Spec("rmsnorm_rows", "512 x 2048", partial(rmsnorm_rows, 512, 2048), real=True)
    yield Spec("residual_rows", "512 x 2048", partial(residual_rows, 512, 2048), real=True)
    yield Spec("residual_norm_rows", "512 x 2048", partial(residual_norm_rows, 512, 2048), real=True)
    yield Spec("take_rows", "512 x 2048", partial(take_rows, 512, 2048, 0), real=True)
