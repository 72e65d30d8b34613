"""Float64 references of the attention kernels, one function per kernel name (attn_prepare and attn_combine share theirs with the rows).

`a` is a LilyAttnArgs. Inputs are arrays of values (already rounded where the kernel reads a rounded buffer); results are float64, not
rounded: what the storage rounds is the caller's business, except for the probabilities, which are rounded inside.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from harness import rb

KEY_BLOCK = 64


def split_qkv(a, qkv):
    """qkv [T, ld] -> queries [T,Hq,D], gates [T,Hq,D], keys [T,Hkv,D], values [T,Hkv,D]."""
    t = len(qkv)
    at = 2 * a.Hq * a.D
    qg = qkv[:, :at].reshape(t, a.Hq, 2, a.D)
    keys, values = (qkv[:, at + i * a.Hkv * a.D : at + (i + 1) * a.Hkv * a.D].reshape(t, a.Hkv, a.D) for i in (0, 1))
    return qg[:, :, 0], qg[:, :, 1], keys, values


def norm(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float64(np.float32(eps))) * weight


def rope(a, x, positions):
    """x [T, heads, D], half-split pairs in the first R dims; the angle is an fp32 product."""
    half = a.R // 2
    frequency = (np.float64(a.rope_theta) ** (-np.arange(half) / half)).astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * frequency).astype(np.float64)[:, None]
    cos, sin = np.cos(angle), np.sin(angle)
    y = x.astype(np.float64).copy()
    first, second = y[..., :half].copy(), y[..., half : a.R].copy()
    y[..., :half] = first * cos - second * sin
    y[..., half : a.R] = second * cos + first * sin
    return y


def head_norm_rows(a, qkv, weight):
    queries, _, keys, _ = split_qkv(a, qkv)
    return norm(keys if a.key else queries, weight, a.eps)


def rope_rows(a, x, position):
    return rope(a, x, position + np.arange(len(x)))


def kv_write_rows(a, k, qkv, position):
    """What is written at the rows' positions: K and V, [T, Hkv, D] each."""
    return rope_rows(a, k, position), split_qkv(a, qkv)[3].astype(np.float64)


def attn_prepare_rows(a, qkv, q_norm, k_norm, position):
    """q [T,Hq,D], then K and V [T,Hkv,D] of the rows."""
    queries, _, keys, values = split_qkv(a, qkv)
    return (
        rope_rows(a, norm(queries, q_norm, a.eps), position),
        rope_rows(a, norm(keys, k_norm, a.eps), position),
        values.astype(np.float64),
    )


attn_prepare = attn_prepare_rows


def gate_rows(a, o, qkv):
    """o [T,Hq,D] times the sigmoid of the gates."""
    gates = split_qkv(a, qkv)[1].astype(np.float64)
    return o / (1 + np.exp(-gates))


def online(a, q, k, v, limits, storage, first=0):
    """Softmax attention in blocks of 64 keys: q [T,Hq,D], k and v [n,Hkv,D] of keys first.., row t sees keys below limits[t].

    Returns o (not divided) [T,Hq,D], max and sum [T,Hq]. Blocks matter only because a probability is rounded against the running maximum.
    """
    t, group = len(q), a.Hq // a.Hkv
    o, m, total = np.zeros((t, a.Hq, a.D)), np.full((t, a.Hq), -np.inf), np.zeros((t, a.Hq))
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale = np.float64(a.scale)
    for begin in range(0, len(k), KEY_BLOCK):
        keys = slice(begin, min(begin + KEY_BLOCK, len(k)))
        seen = (first + np.arange(keys.start, keys.stop))[None, :] < limits[:, None]
        live = seen.any(1)
        for h in range(a.Hq):
            s = q[live, h] @ k[keys, h // group].T * scale
            s[~seen[live]] = -np.inf
            now = np.maximum(m[live, h], s.max(1))
            decay = np.exp(m[live, h] - now)
            p = np.exp(s - now[:, None])
            total[live, h] = total[live, h] * decay + p.sum(1)
            if storage == "bfloat16":
                p = rb(p).astype(np.float64)
            o[live, h] = o[live, h] * decay[:, None] + p @ v[keys, h // group]
            m[live, h] = now
    return o, m, total


def attn_rows(a, q, k, v, position, storage):
    """o [T,Hq,D] before the gate; k and v are the keys 0 .. position+T-1."""
    o, _, total = online(a, q, k, v, position + 1 + np.arange(len(q)), storage)
    return o / total[..., None]


def attn_split(a, q, k, v, storage):
    """q [Hq,D], k and v all keys so far: per split (o [Hq,D] not divided, max, sum), or None past the last key."""
    return _split_at(a, [s * a.blocks_per_split for s in range(a.n_splits + 1)], q, k, v, storage)


def attn_split_long(a, q, k, v, storage):
    """The same; 64 splits share the context's own blocks."""
    blocks = -(-len(k) // 256)
    return _split_at(a, [s * blocks // 64 for s in range(65)], q, k, v, storage)


def _split_at(a, blocks, q, k, v, storage):
    parts = []
    for first, end in pairwise(blocks):
        lo, hi = first * 256, min(end * 256, len(k))
        if lo >= hi:
            parts.append(None)
            continue
        o, m, total = online(a, q[None], k[lo:hi], v[lo:hi], np.array([hi]), storage, lo)
        parts.append((o[0], m[0], total[0]))
    return parts


def attn_combine(a, parts):
    """o [Hq,D] before the gate, of what attn_split gives."""
    parts = [p for p in parts if p is not None]
    highest = np.max([m for _, m, _ in parts], axis=0)
    o = sum(np.exp(m - highest)[:, None] * o for o, m, _ in parts)
    total = sum(np.exp(m - highest) * total for _, m, total in parts)
    return o / total[:, None]
