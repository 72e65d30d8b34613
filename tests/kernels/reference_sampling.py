"""References of the sampling kernels: adjusted logits in float32 (the order of operations is the contract), the rest in float64 with a sort."""

from __future__ import annotations

from itertools import product

import numpy as np

FLOAT_MAX = np.finfo(np.float32).max


def score_rows(logits, targets):
    x = logits.astype(np.float64)
    m = x.max(1, keepdims=True)
    total = m[:, 0] + np.log(np.exp(x - m).sum(1))
    return np.where(targets < 0, 0, x[np.arange(len(x)), np.maximum(targets, 0)] - total)


def sample_adjust(s, logits, counts=None, bias=None, allowed=None):
    """y of a settings struct; counts, bias and allowed (bool) are None without their flag."""
    y = logits.astype(np.float32).copy()
    with np.errstate(invalid="ignore", over="ignore"):
        if counts is not None:
            r, times = np.float32(s.repetition_penalty), counts & 0x7FFFFFFF
            y = np.where(counts != 0, np.where(y > 0, y / r, y * r), y)
            y = np.where(counts != 0, y - np.float32(s.frequency_penalty) * times.astype(np.float32), y)
            y = np.where(times > 0, y - np.float32(s.presence_penalty), y)
        if bias is not None:
            y = y + bias
    if allowed is not None:
        y = np.where(allowed, y, -np.inf)
    y = np.where(np.isnan(y), -np.inf, y)
    return np.minimum(y, FLOAT_MAX).astype(np.float32) + np.float32(0)


def logprobs(y):
    y = y.astype(np.float64)
    m = y.max()
    return y - (m + np.log(np.exp(y - m).sum()))


def order(y):
    """Ids by descending value, ties to the lower id, without -inf."""
    return np.argsort(-y.astype(np.float64), kind="stable")[: int(np.isfinite(y).sum())]


def sample_mass(s, y):
    """exp((y-M)/T) of every token."""
    y = y.astype(np.float64)
    return np.exp((y - y.max()) / np.float64(s.temperature))


def survivors(s, y, slack=0.0, slack_min=0.0, ids=None):
    """Ids that may be drawn, ascending. `slack` moves a threshold by a relative amount."""
    ids, w = order(y) if ids is None else ids, sample_mass(s, y)
    if s.top_k:
        ids = ids[: s.top_k]
    if s.top_p < 1:
        mass = np.cumsum(w[ids])
        ids = ids[: np.searchsorted(mass, np.float64(s.top_p) * mass[-1] * (1 + slack), "left") + 1]
    return np.sort(ids[w[ids] >= np.float64(s.min_p) * (1 + slack_min)])


def philox(key, counter):
    """Philox4x32-10."""
    k, x = list(key), list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ x[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def uniform(s):
    return (philox((s.seed_lo, s.seed_hi), (s.position, 0, 0, 0))[0] >> 8) * 2.0**-24


def sample_draw(s, y, slack=0.0):
    """The tokens that are right: one, or a few when a threshold lies within `slack` (relative) of a token's edge."""
    if not np.isfinite(y).any():
        return set()
    ids = order(y)
    if s.flags & 1:
        return {int(ids[0])}
    w, u, right = sample_mass(s, y), uniform(s), set()
    moves = (0.0,) if slack == 0 else (-slack, 0.0, slack)
    for a, b in product(moves if s.top_p < 1 else (0.0,), moves if s.min_p > 0 else (0.0,)):
        kept = survivors(s, y, a, b, ids)
        cumulative = np.cumsum(w[kept])
        for move in moves:
            at = np.searchsorted(cumulative, (u + move) * cumulative[-1], "right")
            right.add(int(kept[min(at, len(kept) - 1)]))
    return right
