"""Mixture of experts: routing, the chosen experts of a decode step, and the grouped products of a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lily.selftest.case import EPS, Case, Form, Launch, Spec, act, act_blank, blank, blocks, normal, ssq, weight
from lily.selftest.contract import make, step
from lily.selftest.linear import NORMED_ROUNDED, PAIR
from lily.selftest.measure import Check, Near, Same


def _logits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of a quarter: many are equal, and ties go to the lower index."""
    return (rng.integers(-12, 12, shape) / 4).astype(np.float32)


def _chosen_bytes(nbytes: int, E: int, k: int) -> int:
    return nbytes * k // E


def moe_gate_up(E: int, k: int, inner: int, K: int, forms: tuple[str, str] = ("4g64", "4g64")) -> Case:
    rng = np.random.default_rng(E + K)
    h = normal(rng, K)
    arrays = {"h": h, "ssq": ssq(h), "norm": 1 + normal(rng, K, scale=0.1), "logits": _logits(rng, E)}
    arrays |= {"ids": blank(k, dtype=np.uint32), "route": blank(k), "a": act_blank(k, inner)}
    gate, up = (weight(rng, E * inner, K, form) for form in forms)
    args = make("LilyMoeArgs", a=gate.format, b=up.format, K=K, I=inner, E=E, k=k, a_stride=inner, b_stride=inner, eps=EPS)
    buffers = ["h", "ssq", "norm", "logits", "ids", "route", "a", *gate.add(arrays, "gate"), *up.add(arrays, "up")]
    launch = Launch("moe_gate_up", args, buffers, k * blocks(inner))
    checks: dict[str, Check] = {"ids": Same(), "route": Near(), "a": NORMED_ROUNDED}
    return Case(arrays, [launch], checks, bytes=_chosen_bytes(gate.nbytes + up.nbytes, E, k) + 12 * K)


def with_shared(E: int, k: int, inner: int, S: int, K: int) -> Case:
    """The shared expert beside the chosen ones, as the default plan has it, or as a ninth of them in one dispatch."""
    case = moe_gate_up(E, k, inner, K)
    rng = np.random.default_rng(S)
    case.arrays["shared"] = act_blank(S)
    gate, up = (weight(rng, S, K, "4g64") for _ in range(2))
    weights = [*gate.add(case.arrays, "shared_gate"), *up.add(case.arrays, "shared_up")]
    alone = make("LilyGateUpArgs", gate=gate.format, up=up.format, K=K, I=S, eps=EPS)
    beside = Launch("gate_up_norm", alone, ["h", "ssq", "norm", "shared", *weights], blocks(S))
    args = make(
        "LilyMoeArgs", a=gate.format, b=up.format, K=K, I=inner, S=S, E=E, k=k, a_stride=inner, b_stride=inner, ninth=1, eps=EPS
    )  # fmt: skip
    routed = case.launches[0]
    joint = Launch("moe_gate_up", args, [*routed.buffers, *weights, "shared"], k * blocks(inner) + blocks(S))
    forms = [Form("ninth", [joint], "moe_gate_up=ninth")]
    return Case(
        case.arrays, [beside, routed], {**case.checks, "shared": NORMED_ROUNDED}, forms=forms, bytes=case.bytes + gate.nbytes + up.nbytes
    )


def moe_down(E: int, k: int, inner: int, S: int, H: int, forms: tuple[str, str] = ("4g64", "4g64")) -> Case:
    rng = np.random.default_rng(E + H)
    arrays = {"a": act(normal(rng, k, inner)), "shared": act(normal(rng, S)), "logit": np.array([0.3], np.float32)}
    arrays |= {"ids": rng.permutation(E)[:k].astype(np.uint32), "route": rng.dirichlet(np.ones(k)).astype(np.float32)}
    arrays |= {"h": normal(rng, H), "ssq": blank(H // 16)}
    down, shared = weight(rng, E * H, inner, forms[0]), weight(rng, H, S, forms[1])
    args = make("LilyMoeArgs", a=down.format, b=shared.format, I=inner, S=S, H=H, E=E, k=k, a_stride=H)
    buffers = ["a", "ids", "route", "shared", "logit", "h", "ssq", *down.add(arrays, "down"), *shared.add(arrays, "shared_down")]
    moved = _chosen_bytes(down.nbytes, E, k) + shared.nbytes + 8 * H
    return Case(arrays, [Launch("moe_down", args, buffers, blocks(H))], {"h": Near(), "ssq": Near(4e-5)}, bytes=moved)


def moe_gemv(E: int, k: int, N: int, K: int, per_expert: int, form: str = "4g64") -> Case:
    rng = np.random.default_rng(E + K + N)
    arrays = {"ids": rng.permutation(E)[:k].astype(np.uint32), "x": act(normal(rng, k if per_expert else 1, K)), "y": blank(k, N)}
    w = weight(rng, E * N, K, form)
    args = make("LilyMoeArgs", a=w.format, K=K, I=N, H=N, E=E, k=k, a_stride=N, per_expert_input=per_expert)
    launch = Launch("moe_gemv", args, ["ids", "x", "y", *w.add(arrays, "w")], k * blocks(N))
    return Case(arrays, [launch], {"y": Near()}, bytes=_chosen_bytes(w.nbytes, E, k))


def moe_topk_rows(T: int, E: int, k: int) -> Case:
    logits = _logits(np.random.default_rng(E), T, E)
    logits[0] = 0
    arrays = {"step": step(rows=T - 1), "logits": logits, "ids": blank(T, k, dtype=np.uint32), "route": blank(T, k)}
    launch = Launch("moe_topk_rows", make("LilyMoeRowsArgs", E=E, k=k), ["step", "logits", "ids", "route"], T, rows=T)
    return Case(arrays, [launch], {"ids": Same(), "route": Near()})


def _choices(rng: np.random.Generator, T: int, E: int, k: int) -> np.ndarray:
    """Nine rows in ten choose among the first 2k experts: some get many rows, most get none."""
    scores = rng.random((T, E))
    scores[rng.random(T) < 0.9, : 2 * k] += 1
    return np.argsort(-scores, axis=1)[:, :k].astype(np.uint32)


def _routing(arrays: dict[str, np.ndarray], T: int, E: int, k: int, width: int, tile_rows: int) -> list[Launch]:
    """Histogram, scan and scatter of a chunk; the first grid is for outputs of `width`."""
    B, most = blocks(T, 64), blocks(T * k, tile_rows) + E
    tag = f"{tile_rows}."
    shapes = {"counts": (B, E), "offsets": (E + 1,), "base": (B, E), tag + "tiles": (most, 4), tag + "grids": (2, 3)}
    shapes |= {"slot_row": (T * k,), "slot_of": (T, k)}
    arrays |= {name: blank(*shape, dtype=np.uint32) for name, shape in shapes.items()}
    args = make("LilyRouteArgs", E=E, k=k, T=T, tile_rows=tile_rows, N_a=width, N_b=width)
    return [
        Launch("moe_histogram", args, ["step", "ids", "counts"], B, rows=T),
        Launch("moe_scan", args, ["step", "counts", "offsets", "base", tag + "tiles", tag + "grids"], 1, rows=T),
        Launch("moe_scatter", args, ["step", "ids", "base", "slot_row", "slot_of"], B, rows=T),
    ]


def route(T: int, E: int, k: int, kernels: int, tile_rows: int = 16) -> Case:
    """The first `kernels` of histogram, scan and scatter."""
    arrays = {"step": step(rows=T - 1), "ids": _choices(np.random.default_rng(T), T, E, k)}
    launches = _routing(arrays, T, E, k, 1024, tile_rows)[:kernels]
    names = (["counts"], ["offsets", "base", f"{tile_rows}.tiles", f"{tile_rows}.grids"], ["slot_row", "slot_of"])
    return Case(arrays, launches, {name: Same() for written in names[:kernels] for name in written})


def grouped(T: int, E: int, k: int, N: int, K: int, pair: bool, forms: tuple[str, str] = ("4g64", "4g64"), by_slot: int = 0) -> Case:
    """A grouped product behind the routing that makes its tile map and its grid; tiles of 16 and of 32 rows give the same bits."""
    rng = np.random.default_rng(T + N + K)
    slots = T * k
    arrays = {"step": step(rows=T), "ids": _choices(rng, T, E, k), "x": act(normal(rng, slots if by_slot else T, K))}
    kernel, out = ("moe_gate_up_rows", "a") if pair else ("moe_gemm_rows", "y")
    arrays[out] = act_blank(slots, N) if pair else blank(slots, N)
    w = [weight(rng, E * N, K, form) for form in forms[: 1 + pair]]
    parts = [name for i, one in enumerate(w) for name in one.add(arrays, f"w{i}")]
    width = 2 * N if pair else N

    def launches(tile_rows: int) -> list[Launch]:
        args = make(
            "LilyMoeRowsArgs",
            a=w[0].format,
            b=w[-1].format,
            K=K,
            N=N,
            E=E,
            k=k,
            a_stride=N,
            b_stride=N,
            by_slot=by_slot,
            tile_rows=tile_rows,
        )
        buffers = ["offsets", "slot_row", "x", out, *parts, f"{tile_rows}.tiles", f"{tile_rows}.grids"]
        product = Launch(kernel, args, buffers, E * blocks(N, 64), rows=T, indirect=len(buffers) - 1)
        return [*_routing(arrays, T, E, k, width, tile_rows), product]

    tiles = [Form(f"tile{n}", launches(n), f"moe_scan=tile{n}") for n in (16, 32)]
    checks: dict[str, Check] = {out: PAIR if pair else Near()}
    used = min(E, slots)
    moved = sum(_chosen_bytes(one.nbytes, E, used) for one in w) + arrays["x"].nbytes + arrays[out].nbytes
    return Case(
        arrays,
        launches(16),
        checks,
        forms=[
            *tiles,
            Form("simdgroup", variant=f"{kernel}=simdgroup"),
            Form("tensor", variant=f"{kernel}=tensor", bits=False, rounded=True),
        ],
        bytes=moved,
    )


def moe_combine_rows(T: int, k: int, H: int) -> Case:
    rng = np.random.default_rng(H)
    arrays = {"step": step(rows=T - 1), "slot_of": rng.permutation(T * k).reshape(T, k).astype(np.uint32), "y": normal(rng, T * k, H)}
    arrays |= {"route": rng.dirichlet(np.ones(k), T).astype(np.float32), "shared": normal(rng, T, H), "logit": normal(rng, T, scale=3)}
    arrays["h"] = normal(rng, T, H)
    buffers = ["step", "slot_of", "route", "y", "shared", "logit", "h"]
    return Case(arrays, [Launch("moe_combine_rows", make("LilyMoeRowsArgs", k=k, H=H), buffers, T, rows=T)], {"h": Near()})


def specs() -> Iterator[Spec]:
    yield Spec("moe_gate_up", "4 of 16, 48 x 192, 8g64 and 4g64", partial(moe_gate_up, 16, 4, 48, 192, ("8g64", "4g64")))
    yield Spec("moe_gate_up", "4 of 16, 48 x 192, and a shared one of 40", partial(with_shared, 16, 4, 48, 40, 192))
    yield Spec("moe_gate_up", "8 of 256, 16 x 2048", partial(moe_gate_up, 256, 8, 16, 2048))
    yield Spec("moe_gate_up", "10 of 512, 16 x 2112", partial(moe_gate_up, 512, 10, 16, 2112))  # the larger instance, the most experts
    yield Spec("moe_down", "4 of 16, 64 + 192 to 128", partial(moe_down, 16, 4, 64, 192, 128))
    yield Spec("moe_down", "4 of 16, 64 + 96 to 64, 5g32 and bf16", partial(moe_down, 16, 4, 64, 96, 64, ("5g32", "bf16")))
    for per_expert in (0, 1):
        yield Spec("moe_gemv", f"4 of 16, 20 x 256{', an input each' * per_expert}", partial(moe_gemv, 16, 4, 20, 256, per_expert))
    for E, k in ((16, 4), (256, 8), (512, 10)):
        yield Spec("moe_topk_rows", f"33 rows, {k} of {E}", partial(moe_topk_rows, 33, E, k))
    for T, E, k in ((64, 16, 4), (65, 256, 8), (130, 512, 10)):  # blocks of 64 rows
        for n, kernel in enumerate(("moe_histogram", "moe_scan", "moe_scatter"), 1):
            yield Spec(kernel, f"{T} rows, {k} of {E}", partial(route, T, E, k, n, 32 if T == 65 else 16))
    yield Spec("moe_gemm_rows", "40 rows, 4 of 16, 70 x 192", partial(grouped, 40, 16, 4, 70, 192, False))
    yield Spec("moe_gemm_rows", "9 rows by slot, 4 of 16, 33 x 128, 8g64", partial(grouped, 9, 16, 4, 33, 128, False, ("8g64", ""), 1))
    yield Spec("moe_gate_up_rows", "40 rows, 4 of 16, 40 x 192", partial(grouped, 40, 16, 4, 40, 192, True))
    for H in (128, 200):
        yield Spec("moe_combine_rows", f"9 rows x 8, {H}", partial(moe_combine_rows, 9, 8, H))

    yield Spec("moe_gate_up", "8 of 256, 512 x 2048", partial(moe_gate_up, 256, 8, 512, 2048), real=True)
    yield Spec("moe_down", "8 of 256, 512 + 512 to 2048", partial(moe_down, 256, 8, 512, 512, 2048), real=True)
    yield Spec("moe_gemv", "8 of 256, 512 x 2048", partial(moe_gemv, 256, 8, 512, 2048, 0), real=True)
    yield Spec("moe_topk_rows", "512 rows, 8 of 256", partial(moe_topk_rows, 512, 256, 8), real=True)
    for n, kernel in enumerate(("moe_histogram", "moe_scan", "moe_scatter"), 1):  # more slots than 16 bits count
        yield Spec(kernel, "8200 rows, 8 of 256", partial(route, 8200, 256, 8, n, 32), real=True)
    yield Spec("moe_gate_up_rows", "64 rows, 8 of 256, 512 x 2048", partial(grouped, 64, 256, 8, 512, 2048, True), real=True, slow=True)
    yield Spec(
        "moe_gemm_rows",
        "64 rows by slot, 8 of 256, 2048 x 512",
        partial(grouped, 64, 256, 8, 2048, 512, False, by_slot=1),
        real=True,
        slow=True,
    )
    yield Spec("moe_combine_rows", "512 rows x 8, 2048", partial(moe_combine_rows, 512, 8, 2048), real=True)
