"""float64 references of the mixture-of-experts kernels, one per kernel name. Expert weights are [E, N, K]."""

from __future__ import annotations

import numpy as np
from reference_linear import sigmoid, silu, ssq


def moe_topk_rows(logits, k):
    """ids and weights: the k largest of each row, ties to the lower index, softmax over the chosen."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    chosen = np.take_along_axis(logits, ids, -1).astype(np.float64)
    p = np.exp(chosen - chosen.max(-1, keepdims=True))
    return ids, p / p.sum(-1, keepdims=True)


def moe_gate_up(x, logits, k, gate, up):
    ids, route = moe_topk_rows(logits, k)
    return ids, route, np.stack([silu(gate[e] @ x) * (up[e] @ x) for e in ids])


def moe_gemv(ids, x, w):
    """x: [K], or [k, K] with an input per expert."""
    return np.stack([w[e] @ (x[j] if x.ndim == 2 else x) for j, e in enumerate(ids)])


def moe_down(a, ids, route, shared, shared_logit, h, down, shared_down):
    y = moe_gemv(ids, a.astype(np.float64), down)
    h = h + route.astype(np.float64) @ y + sigmoid(float(shared_logit)) * (shared_down @ shared.astype(np.float64))
    return h, ssq(h)


def moe_group(ids, E):
    """offsets [E+1], slot_row, slot_of: slots sorted by expert, then by row."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    slot_of = np.empty(flat.size, np.int64)
    slot_of[order] = np.arange(flat.size)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=E))])
    return offsets, order // ids.shape[1], slot_of.reshape(ids.shape)


def moe_gemm_rows(offsets, x, w):
    """x: [slots, K], gathered already."""
    return np.concatenate([x[b:e].astype(np.float64) @ w[i].T for i, (b, e) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))])


def moe_gate_up_rows(offsets, x, gate, up):
    return silu(moe_gemm_rows(offsets, x, gate)) * moe_gemm_rows(offsets, x, up)


def moe_combine_rows(slot_of, route, y, shared, shared_logit, h):
    sums = np.einsum("tk,tkh->th", route.astype(np.float64), y.astype(np.float64)[slot_of])
    return h + sums + sigmoid(shared_logit.astype(np.float64))[:, None] * shared
