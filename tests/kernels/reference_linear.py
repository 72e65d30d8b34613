"""float64 references of the linear kernels, one per kernel name. Inputs are what a kernel reads: rounded activations and weights."""

from __future__ import annotations

import numpy as np


def silu(x):
    return x / (1.0 + np.exp(-x))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def normed(h, weight, eps):
    """h / rms(h) * weight, before the rounding to the activation storage."""
    h = h.astype(np.float64)
    return h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * weight


def ssq(h):
    """Sums of 16 squares."""
    h = h.astype(np.float64)
    pad = np.zeros(-len(h) % 16)
    return (np.concatenate([h, pad]).reshape(-1, 16) ** 2).sum(1)


def gemv(x, w):
    return w @ x.astype(np.float64)


def gemv_norm(x, ws):
    """x: normed and rounded; one product per segment."""
    return [gemv(x, w) for w in ws]


def gemv_residual(x, h, w):
    h = h + gemv(x, w)
    return h, ssq(h)


def gate_up_norm(x, gate, up):
    return silu(gemv(x, gate)) * gemv(x, up)


def gemm(x, w):
    return x.astype(np.float64) @ w.T


def gemm_residual(x, h, w):
    return h + gemm(x, w)


def gate_up_rows(x, gate, up):
    return silu(gemm(x, gate)) * gemm(x, up)


def swiglu_rows(gate, up):
    return silu(gate.astype(np.float64)) * up


def expand_rows(values):
    """The weights themselves `[N, K]`; rounding to the storage is the caller's."""
    return values
