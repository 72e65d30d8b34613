"""float64 references of the Gated DeltaNet kernels; one function per kernel name, on float64 arrays of what the kernel reads."""

from __future__ import annotations

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def _gates(a, b, A, dt_bias):
    """g and beta in the last axis."""
    return np.stack([np.exp(A * np.logaddexp(0, a + dt_bias)), 1 / (1 + np.exp(-b))], -1)


def conv_rows(qkv, conv_w, conv_in, snapshot_rows=()):
    """y [T,C], conv_out [3,C] and the conv rows after each snapshot row."""
    rows = np.concatenate([conv_in, qkv])
    n = len(qkv)
    y = silu(sum(conv_w[j] * rows[j : j + n] for j in range(4)))
    return y, rows[n : n + 3], [rows[r + 1 : r + 4] for r in snapshot_rows]


def gdn_prepare_rows(y, b, a, A, dt_bias, Nk, Dk):
    """y with q and k normalised, gates [T,Nv,2]."""
    y = y.copy()
    qk = y[:, : 2 * Nk * Dk].reshape(len(y), 2, Nk, Dk)
    qk /= np.sqrt((qk**2).sum(-1, keepdims=True) + 1e-6)
    qk[:, 0] *= Dk**-0.5
    return y, _gates(a, b, A, dt_bias)


def gdn_scan(y, gates, S, Nk, snapshot_rows=()):
    """o [T,Nv,Dv], S after the last row, S after each snapshot row. Written as the model defines it: decay, predict, correct, read."""
    Nv, Dk, Dv = S.shape
    q, k, v = np.split(y, [Nk * Dk, 2 * Nk * Dk], axis=1)
    q = np.repeat(q.reshape(-1, Nk, Dk), Nv // Nk, 1)
    k = np.repeat(k.reshape(-1, Nk, Dk), Nv // Nk, 1)
    v = v.reshape(-1, Nv, Dv)
    o, states = np.empty(v.shape), {}
    for t in range(len(y)):
        g, beta = gates[t, :, 0, None, None], gates[t, :, 1, None]
        S = g * S
        m = np.einsum("nkv,nk->nv", S, k[t])
        S = S + k[t][:, :, None] * (beta * (v[t] - m))[:, None]
        o[t] = np.einsum("nkv,nk->nv", S, q[t])
        states[t] = S if t in snapshot_rows else None
    return o, S, [states[r] for r in snapshot_rows]


def gated_norm_rows(o, z, norm, eps):
    """o, z [T,Nv,Dv]."""
    return o / np.sqrt((o**2).mean(-1, keepdims=True) + eps) * norm * silu(z)


def gdn_step(proj, conv_w, A, dt_bias, norm, conv_in, S, Nk, eps):
    """x [Nv,Dv], conv_out, S after this token."""
    Nv, Dk, Dv = S.shape
    C = 2 * Nk * Dk + Nv * Dv
    qkv, z, b, a = np.split(proj, [C, C + Nv * Dv, C + Nv * Dv + Nv])
    y, conv_out, _ = conv_rows(qkv[None], conv_w, conv_in)
    y, gates = gdn_prepare_rows(y, b[None], a[None], A, dt_bias, Nk, Dk)
    o, S, _ = gdn_scan(y, gates, S, Nk)
    return gated_norm_rows(o, z.reshape(1, Nv, Dv), norm, eps)[0], conv_out, S
