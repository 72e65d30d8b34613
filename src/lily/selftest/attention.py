"""Attention: norms, rotation and the K/V write, decode by splits of the keys, prefill by tiles of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lily.selftest.case import EPS, Case, Form, Launch, Spec, act, act_blank, blank, blocks, normal
from lily.selftest.contract import make, step
from lily.selftest.measure import Check, Near, Rms, Rounded, Same

BLOCK, SPLITS = 256, 64
# Probabilities are rounded to bfloat16 relative to the greatest score so far, which is taken over 32 keys on a GPU and 64 on the CPU.
# Against float64 each is within 4e-4 (decode, and the CPU's prefill) or 1e-3 (a GPU's prefill) of the RMS; the bounds are their sums.
DECODE = Rms(8e-4)
PREFILL = Rms(1.4e-3)
# Where the two share out the keys differently, each probability is rounded on its own: 2^-8 / sqrt(12) of it, twice.
APART = Rms(1.6e-3)
GATED = Rms(4e-3)  # rounded once more: a value moved by 1e-3 is rounded the other way one time in four
MAXIMA = Near(2e-5, value=2e-5)

Shape = tuple[int, int, int, int]  # query heads, key heads, head dim, rotary dims


class Context:
    """Queries, projections and, up to `tokens`, keys and values in arenas under a permuted block table; the rest is not-a-number."""

    def __init__(self, shape: Shape, tokens: int, rows: int = 1) -> None:
        self.Hq, self.Hkv, self.D, self.R = shape
        self.tokens, self.rows = tokens, rows
        self.rng = rng = np.random.default_rng(tokens + self.D)
        n = blocks(tokens, BLOCK)
        table = (rng.permutation(n) + 1).astype(np.uint32)
        self.ld = 2 * self.Hq * self.D + 2 * self.Hkv * self.D
        self.arrays = {
            "step": step(position=tokens - rows, rows=rows),
            "table": table,
            "q": act(normal(rng, rows, self.Hq, self.D, scale=1.5)),
            "qkv": normal(rng, rows, self.ld),
            "q_norm": rng.uniform(0.5, 1.5, self.D).astype(np.float32),
            "k_norm": rng.uniform(0.5, 1.5, self.D).astype(np.float32),
        }

    def keys(self) -> None:
        n = len(self.arrays["table"])
        for name in ("K", "V"):
            values = act(normal(self.rng, n * BLOCK, self.Hkv, self.D)).reshape(n, BLOCK, self.Hkv, self.D)
            arena = act_blank(n + 1, self.Hkv, BLOCK, self.D)
            for block, at in enumerate(self.arrays["table"]):
                live = min(BLOCK, self.tokens - block * BLOCK)
                arena[at, :, :live] = values[block, :live].swapaxes(0, 1)
            self.arrays[name] = arena

    def empty_arenas(self) -> None:
        """For the rows alone: what stands before them is in one block that nobody touches."""
        first, last = (self.tokens - self.rows) // BLOCK, (self.tokens - 1) // BLOCK
        table = np.zeros(last + 1, np.uint32)
        table[first:] = 1 + self.rng.permutation(last + 1 - first)
        self.arrays["table"] = table
        for name in ("K", "V"):
            self.arrays[name] = act_blank(2 + last - first, self.Hkv, BLOCK, self.D)

    def args(self, **more: Any) -> Any:
        values = {"n_splits": 1, "blocks_per_split": 1, "rows_per_group": 8, "rope_theta": 1e7, "eps": EPS, "scale": self.D**-0.5}
        return make("LilyAttnArgs", Hq=self.Hq, Hkv=self.Hkv, D=self.D, R=self.R, ld=self.ld, **(values | more))

    def kv_bytes(self) -> int:
        return 2 * self.tokens * self.Hkv * self.D * 2


def prepare(shape: Shape, position: int, rows: int = 1, kernel: str = "attn_prepare_rows") -> Case:
    c = Context(shape, position + rows, rows)
    c.empty_arenas()
    c.arrays["q"] = act_blank(rows, c.Hq, c.D)
    groups = c.Hq + c.Hkv if kernel == "attn_prepare" else rows
    launch = Launch(kernel, c.args(gated=1), ["step", "qkv", "q_norm", "k_norm", "table", "K", "V", "q"], groups, rows=rows)
    moved = c.arrays["qkv"].nbytes + 2 * rows * (c.Hq + 2 * c.Hkv) * c.D
    return Case(c.arrays, [launch], {"q": Rounded(), "K": Rounded(), "V": Same()}, bytes=moved)


def twin(kernel: str, shape: Shape, position: int, rows: int) -> Case:
    """The parts of attn_prepare_rows as kernels of their own, and the gate."""
    c = Context(shape, position + rows, rows)
    arrays, rng = c.arrays, c.rng
    key = kernel == "head_norm_rows"
    if kernel == "head_norm_rows":  # of the keys
        arrays["out"] = blank(rows, c.Hkv, c.D)
        buffers, checks = ["step", "qkv", "k_norm", "out"], {"out": Near()}
    elif kernel == "rope_rows":
        arrays |= {"x": normal(rng, rows, c.Hq, c.D), "q": act_blank(rows, c.Hq, c.D)}
        buffers, checks = ["step", "x", "q"], {"q": Rounded()}
    elif kernel == "kv_write_rows":
        c.empty_arenas()
        arrays["k"] = normal(rng, rows, c.Hkv, c.D)
        buffers, checks = ["step", "k", "qkv", "table", "K", "V"], {"K": Rounded(), "V": Same()}
    else:
        arrays |= {"o": normal(rng, rows, c.Hq, c.D), "x": act_blank(rows, c.Hq, c.D)}
        buffers, checks = ["step", "o", "qkv", "x"], {"x": Rounded()}
    written: dict[str, Check] = checks
    moved = None if kernel != "kv_write_rows" else 3 * rows * c.Hkv * c.D * 4
    return Case(arrays, [Launch(kernel, c.args(key=int(key)), buffers, rows, rows=rows)], written, bytes=moved)


def _split(c: Context, kernel: str, n: int, per: int) -> Launch:
    return Launch(kernel, c.args(n_splits=n, blocks_per_split=per), ["step", "q", "table", "K", "V", "o", "ml"], c.Hkv * n)


def split(shape: Shape, tokens: int, n: int, per: int) -> Case:
    """Each split on its own; those past the last key say that they saw none."""
    c = Context(shape, tokens)
    c.keys()
    c.arrays |= {"o": blank(n, c.Hq, c.D), "ml": blank(n, c.Hq, 2)}
    forms = [Form("one_head", variant="attn_split=one_head")]
    if c.Hq == 8 * c.Hkv and c.D == 256 and n == SPLITS:
        forms.append(Form("long's general", [_split(c, "attn_split_long", n, per)], "attn_split_long=general"))
    return Case(
        c.arrays, [_split(c, "attn_split", n, per)], {"o": DECODE, "ml": MAXIMA}, forms=forms, bytes=c.kv_bytes() + c.arrays["o"].nbytes
    )


def split_long(shape: Shape, tokens: int) -> Case:
    """The form for long contexts shares the keys among 64 splits in its own way: what comes out of the combination is compared."""
    c = Context(shape, tokens)
    c.keys()
    n, per = SPLITS, blocks(blocks(tokens, BLOCK), SPLITS)
    c.arrays |= {"o": blank(n, c.Hq, c.D), "ml": blank(n, c.Hq, 2), "x": blank(c.Hq, c.D)}
    combine = Launch("attn_combine", c.args(n_splits=n, blocks_per_split=per), ["step", "o", "ml", "x", None], c.Hq)
    device, cpu = [_split(c, "attn_split_long", n, per), combine], [_split(c, "attn_split", n, per), combine]
    return Case(c.arrays, device, {"x": DECODE if per == 1 else APART}, cpu, bytes=c.kv_bytes() + 2 * c.arrays["o"].nbytes)


def combine(shape: Shape, n: int, live: int, gated: int) -> Case:
    """`live` of `n` splits saw keys."""
    c = Context(shape, 1)
    rng = c.rng
    ml = np.stack([normal(rng, n, c.Hq, scale=3), rng.uniform(1, 50, (n, c.Hq)).astype(np.float32)], -1)
    ml[live:] = [-np.inf, 0]
    o = normal(rng, n, c.Hq, c.D, scale=20)
    o[live:] = np.nan
    c.arrays |= {"o": o, "ml": ml, "x": act_blank(c.Hq, c.D) if gated else blank(c.Hq, c.D)}
    args = c.args(n_splits=n, gated=gated)
    launch = Launch("attn_combine", args, ["step", "o", "ml", "x", "qkv" if gated else None], c.Hq)
    return Case(c.arrays, [launch], {"x": Rounded() if gated else Near()})


def attn_rows(shape: Shape, position: int, rows: int, gated: int = 0) -> Case:
    c = Context(shape, position + rows, rows)
    c.keys()
    c.arrays["x"] = act_blank(rows, c.Hq, c.D) if gated else blank(rows, c.Hq, c.D)
    groups = c.Hkv * blocks(rows, 8)
    buffers: list[str | None] = ["step", "q", "qkv" if gated else None, "table", "K", "V", "x"]
    launch = Launch("attn_rows", c.args(gated=gated), buffers, groups, rows=rows)
    forms = []
    n = len(c.arrays["table"])
    if n > 1:
        c.arrays |= {"part.o": blank(rows, c.Hq, c.D), "part.ml": blank(rows, c.Hq, 2)}
        parts = [
            Launch(
                "attn_rows",
                c.args(gated=gated, first_block=i, key_blocks=1),
                [*buffers, "part.o", "part.ml"],
                groups,
                rows,
                access="rrrrrrbbb",
            )
            for i in range(n)
        ]
        forms.append(Form("cut256", parts, "attn_rows=cut256"))
    moved = c.kv_bytes() + c.arrays["q"].nbytes + c.arrays["x"].nbytes
    return Case(c.arrays, [launch], {"x": GATED if gated else PREFILL}, forms=forms, bytes=moved)


WIDE, REAL = (8, 1, 256, 64), (16, 2, 256, 64)


def _name(shape: Shape) -> str:
    return f"{shape[0]}/{shape[1]} heads of {shape[2]}"


def specs() -> Iterator[Spec]:
    for shape in ((4, 2, 256, 64), (4, 1, 64, 16), (2, 2, 48, 48)):
        for position in (0, 255, 300_000):
            if position < 1000 or shape[2] == 48:
                at = f"at {position}, {_name(shape)}"
                yield Spec("attn_prepare", at, partial(prepare, shape, position, kernel="attn_prepare"))
                yield Spec("attn_prepare_rows", f"5 rows {at}", partial(prepare, shape, position, 5))
    for kernel in ("head_norm_rows", "rope_rows", "kv_write_rows", "gate_rows"):
        yield Spec(kernel, f"5 rows at 254, {_name((4, 2, 256, 64))}", partial(twin, kernel, (4, 2, 256, 64), 254, 5))
    # One instance each for head dims up to 64, 128 and 256; four query heads share keys, six and five leave a rest.
    for shape in ((4, 4, 64, 16), (5, 1, 128, 16), (6, 2, 256, 64), WIDE):
        yield Spec("attn_split", f"301 keys in 2, {_name(shape)}", partial(split, shape, 301, 2, 1))
    for tokens in (1, 256, 257):
        yield Spec("attn_split", f"{tokens} keys in 64, {_name(WIDE)}", partial(split, WIDE, tokens, SPLITS, 1))
        yield Spec("attn_split_long", f"{tokens} keys, {_name(WIDE)}", partial(split_long, WIDE, tokens))
    yield Spec("attn_split_long", f"600 keys, {_name(REAL)}", partial(split_long, REAL, 600))
    for n, live, gated in ((1, 1, 1), (3, 2, 0), (64, 5, 1)):
        yield Spec("attn_combine", f"{live} of {n} splits{', gated' * gated}", partial(combine, REAL, n, live, gated))
    # Tiles of 32 (row, head) pairs: 4 rows of 8 heads fill one, 5 begin a second.
    for shape, position, rows in ((WIDE, 0, 4), (WIDE, 0, 5), (WIDE, 254, 3), ((4, 2, 128, 64), 0, 17), ((4, 1, 64, 16), 520, 7)):
        yield Spec("attn_rows", f"{rows} rows from {position}, {_name(shape)}", partial(attn_rows, shape, position, rows))
    yield Spec("attn_rows", f"5 rows from 254, gated, {_name(WIDE)}", partial(attn_rows, WIDE, 254, 5, 1))

    # From a capacity of 32,768 tokens on, decode takes the form for long contexts.
    yield Spec("attn_split", f"32768 keys in 64, {_name(WIDE)}", partial(split, WIDE, 32768, SPLITS, 2), real=True)
    yield Spec("attn_split_long", f"32769 keys, {_name(WIDE)}", partial(split_long, WIDE, 32769), real=True)

    name = _name(REAL)
    yield Spec("attn_prepare", f"at 4095, {name}", partial(prepare, REAL, 4095, kernel="attn_prepare"), real=True)
    yield Spec("attn_prepare_rows", f"256 rows at 4000, {name}", partial(prepare, REAL, 4000, 256), real=True, slow=True)
    for kernel in ("head_norm_rows", "rope_rows", "kv_write_rows", "gate_rows"):
        yield Spec(kernel, f"256 rows, {name}", partial(twin, kernel, REAL, 0, 256), real=True, slow=True)
    yield Spec("attn_split", f"4096 keys in 16, {name}", partial(split, REAL, 4096, 16, 1), real=True)
    yield Spec("attn_split", f"32768 keys in 64, {name}", partial(split, REAL, 32768, SPLITS, 2), real=True, slow=True)
    yield Spec("attn_split_long", f"32769 keys, {name}", partial(split_long, REAL, 32769), real=True, slow=True)
    yield Spec("attn_rows", f"64 rows from 4000, {name}", partial(attn_rows, REAL, 4000, 64, 1), real=True, slow=True)
    yield Spec("attn_rows", f"3 rows from 32766, {name}", partial(attn_rows, REAL, 32766, 3), real=True, slow=True)
