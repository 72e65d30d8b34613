"""Matrix-vector products of decode and matrix products of prefill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lily.selftest.case import EPS, FORMATS, Case, Form, Launch, Spec, act, act_blank, blank, blocks, normal, ssq, weight
from lily.selftest.contract import make, step
from lily.selftest.measure import Near, Rms, Rounded, Same

#: A normed input is rounded to bfloat16 before the product: one of 2,048 values that goes the other way moves the product by 9e-5.
NORMED = Rms(2.5e-4)
NORMED_ROUNDED = Rms(1.5e-3)
PAIR = Rounded(sums=1e-4)  # a product of two sums


def gemv(rows: int, K: int, form: str = "4g64", kernel: str = "gemv") -> Case:
    rng = np.random.default_rng(K)
    arrays = {"x": act(normal(rng, K)), "y": blank(rows)}
    w = weight(rng, rows, K, form).add(arrays, "w")
    args = make("LilyGemvArgs", fmt=_format(form), K=K, n_segments=1, seg=[{"rows": rows}])
    if kernel == "gemv":
        return Case(arrays, [Launch(kernel, args, ["x", "y", *w], blocks(rows))], {"y": Near()})
    arrays |= {"y": normal(rng, rows), "ssq": blank(rows // 16)}
    return Case(arrays, [Launch(kernel, args, ["x", "y", "ssq", *w], blocks(rows))], {"y": Near(), "ssq": Near(4e-5)})


def _format(form: str) -> dict[str, int]:
    return weight(np.random.default_rng(0), 1, 128, form).format


def _stream(rng: np.random.Generator, K: int) -> dict[str, np.ndarray]:
    h = normal(rng, K)
    return {"h": h, "ssq": ssq(h), "norm": 1 + normal(rng, K, scale=0.1)}


def gemv_norm(rows: tuple[int, ...], K: int, form: str = "4g64") -> Case:
    """One input, several matrices; the outputs of the first are rounded."""
    rng = np.random.default_rng(K)
    arrays = _stream(rng, K) | {"y": blank(sum(rows))}
    buffers: list[str | None] = ["h", "ssq", "norm", "y"]
    segments = []
    for i, n in enumerate(rows):
        buffers += weight(rng, n, K, form).add(arrays, f"w{i}")
        segments.append({"rows": n, "out": sum(rows[:i]), "round": int(i == 0 and len(rows) > 1)})
    args = make("LilyGemvArgs", fmt=_format(form), K=K, n_segments=len(rows), eps=EPS, seg=segments)
    check = Rms(6e-4) if len(rows) > 1 else NORMED
    return Case(arrays, [Launch("gemv_norm", args, buffers, sum(blocks(n) for n in rows))], {"y": check})


def gate_up_norm(inner: int, K: int, forms: tuple[str, str] = ("4g64", "4g64")) -> Case:
    rng = np.random.default_rng(K)
    arrays = _stream(rng, K) | {"a": act_blank(inner)}
    gate, up = (weight(rng, inner, K, form).add(arrays, name) for form, name in zip(forms, ("gate", "up"), strict=True))
    args = make("LilyGateUpArgs", gate=_format(forms[0]), up=_format(forms[1]), K=K, I=inner, eps=EPS)
    return Case(arrays, [Launch("gate_up_norm", args, ["h", "ssq", "norm", "a", *gate, *up], blocks(inner))], {"a": NORMED_ROUNDED})


def tiles(kernel: str) -> list[Form]:
    """Both tiles give the same bits; tensor operations add in an order of their own and have no form for float32."""
    return [
        *(Form(n, variant=f"{kernel}={n}") for n in ("tile16", "tile32", "simdgroup")),
        *(Form(n, variant=f"{kernel}={n}", bits=False, rounded=True) for n in ("tensor", "tensor16", "tensor32")),
    ]


def gemm(T: int, N: int, K: int, form: str = "4g64", kernel: str = "gemm", expand: bool = False) -> Case:
    """The last row is dead when there are more than two."""
    rng = np.random.default_rng(T + N + K)
    live = T - 1 if T > 2 else T
    residual = kernel == "gemm_residual"
    arrays = {"step": step(rows=live), "x": act(normal(rng, T, K)), "y": normal(rng, T, N) if residual else blank(T, N)}
    w = weight(rng, N, K, form).add(arrays, "w")
    args = make("LilyGemmArgs", fmt=_format(form), K=K, N=N, ldy=N)
    launches = [Launch(kernel, args, ["step", "x", "y", *w], blocks(N, 64), rows=T)]
    forms = tiles(kernel)
    if expand:
        arrays["expanded"] = act_blank(N, K)
        whole = make("LilyGemmArgs", fmt={"kind": 1}, K=K, N=N, ldy=N)
        first = Launch("expand_rows", args, [*w, "expanded"], N)
        product = Launch("gemm", whole, ["step", "x", "y", "expanded", None, None], blocks(N, 64), rows=T)
        forms.append(Form("expand", [first, product], "gemm=expand", rounded=True))
    return Case(arrays, launches, {"y": Near()}, forms=forms)


def gate_up_rows(T: int, N: int, K: int, forms: tuple[str, str] = ("4g64", "4g64")) -> Case:
    rng = np.random.default_rng(T + N + K)
    arrays = {"step": step(rows=T), "x": act(normal(rng, T, K)), "a": act_blank(T, N)}
    gate, up = (weight(rng, N, K, form).add(arrays, name) for form, name in zip(forms, ("gate", "up"), strict=True))
    args = make("LilyGemmArgs", fmt=_format(forms[0]), up=_format(forms[1]), K=K, N=N)
    launch = Launch("gate_up_rows", args, ["step", "x", "a", *gate, *up], blocks(N, 64), rows=T)
    return Case(arrays, [launch], {"a": PAIR}, forms=tiles("gate_up_rows"))


def swiglu_rows(T: int, N: int, per_token: int) -> Case:
    rng = np.random.default_rng(N)
    rows = T * per_token
    arrays = {"step": step(rows=T - 1), "gate": normal(rng, rows, N, scale=3), "up": normal(rng, rows, N), "a": act_blank(rows, N)}
    args = make("LilyGemmArgs", N=N, rows_per_token=per_token)
    return Case(arrays, [Launch("swiglu_rows", args, ["step", "gate", "up", "a"], T, rows=T)], {"a": Rounded()})


def expand_rows(N: int, K: int, form: str) -> Case:
    rng = np.random.default_rng(N)
    arrays = {"w": act_blank(N, K)}
    parts = weight(rng, N, K, form).add(arrays, "w4")
    return Case(arrays, [Launch("expand_rows", make("LilyGemmArgs", fmt=_format(form), K=K, N=N), [*parts, "w"], N)], {"w": Same()})


def specs() -> Iterator[Spec]:
    for form in FORMATS:
        yield Spec("gemv", f"33 x 384, {form}", partial(gemv, 33, 384, form))
        yield Spec("gemm", f"7 rows, 70 x 384, {form}", partial(gemm, 7, 70, 384, form))
        yield Spec("expand_rows", f"3 x 1152, {form}", partial(expand_rows, 3, 1152, form))
    for K in (512, 2048, 4096, 8192):
        yield Spec("gemv", f"64 x {K}", partial(gemv, 64, K))
    for rows in (16, 48):
        yield Spec("gemv_residual", f"{rows} x 192", partial(gemv, rows, 192, kernel="gemv_residual"))
    # The normed input is held in one of two sizes: up to 2,048 values, and up to 6,144.
    for K in (256, 2048, 2112, 6144):
        yield Spec("gemv_norm", f"48+20+1+32 x {K}", partial(gemv_norm, (48, 20, 1, 32), K))
        yield Spec("gate_up_norm", f"80 x {K}", partial(gate_up_norm, 80, K))
    yield Spec("gemv_norm", "33 x 256, 6g32", partial(gemv_norm, (33,), 256, "6g32"))
    yield Spec("gate_up_norm", "80 x 384, 8g64 and 4g64", partial(gate_up_norm, 80, 384, ("8g64", "4g64")))
    # Tiles of 16 rows up to 16 rows, of 32 from there on; K that is not a whole number of blocks.
    for T in (1, 16, 17, 32, 33, 65):
        yield Spec("gemm", f"{T} rows, 130 x 320", partial(gemm, T, 130, 320, expand=T == 17))
    yield Spec("gemm", "37 rows, 50 x 272, bf16", partial(gemm, 37, 50, 272, "bf16"))
    yield Spec("gemm_residual", "17 rows, 100 x 256", partial(gemm, 17, 100, 256, kernel="gemm_residual"))
    for T in (16, 33):
        yield Spec("gate_up_rows", f"{T} rows, 72 x 192", partial(gate_up_rows, T, 72, 192))
    yield Spec("gate_up_rows", "7 rows, 40 x 192, 3g64 and bf16", partial(gate_up_rows, 7, 40, 192, ("3g64", "bf16")))
    yield Spec("swiglu_rows", "5 rows x 3, 100", partial(swiglu_rows, 5, 100, 3))

    def real(kernel: str, shape: str, build: partial[Case]) -> Spec:
        return Spec(kernel, shape, build, real=True, slow=kernel in ("gemm", "gemm_residual", "gate_up_rows"))

    yield real("gemv", "32768 x 2048, 8g64", partial(gemv, 32768, 2048, "8g64"))  # a slice of the vocabulary
    yield real("gemv", "32768 x 2048", partial(gemv, 32768, 2048))
    yield real("gemv_residual", "2048 x 4096", partial(gemv, 2048, 4096, kernel="gemv_residual"))
    yield real("gemv_norm", "8192+4096+32+32 x 2048", partial(gemv_norm, (8192, 4096, 32, 32), 2048))
    yield real("gemv_norm", "8192+512+512 x 2048", partial(gemv_norm, (8192, 512, 512), 2048))
    yield real("gate_up_norm", "512 x 2048", partial(gate_up_norm, 512, 2048))
    yield real("gemm", "256 rows, 8192 x 2048", partial(gemm, 256, 8192, 2048))
    yield real("gemm", "16 rows, 8192 x 2048", partial(gemm, 16, 8192, 2048))
    yield real("gemm", "64 rows, 8192 x 2048, 8g64", partial(gemm, 64, 8192, 2048, "8g64"))
    yield real("gemm_residual", "256 rows, 2048 x 4096", partial(gemm, 256, 2048, 4096, kernel="gemm_residual"))
    yield real("gate_up_rows", "256 rows, 512 x 2048", partial(gate_up_rows, 256, 512, 2048))
    yield real("swiglu_rows", "512 rows x 8, 512", partial(swiglu_rows, 512, 512, 8))
    yield real("expand_rows", "2048 x 2048, 4g64", partial(expand_rows, 2048, 2048, "4g64"))
