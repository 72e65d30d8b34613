"""float64 references of the embedding, norm and residual kernels; one function per kernel name, on float64 arrays of what the kernel reads."""

from __future__ import annotations

import numpy as np


def _ssq(h: np.ndarray) -> np.ndarray:
    return (h.reshape(-1, 16) ** 2).sum(1)


def embed_step(table: np.ndarray, token: int):
    """h, ssq. An id outside the vocabulary reads row 0."""
    h = table[token if 0 <= token < len(table) else 0]
    return h, _ssq(h)


def embed_rows(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return table[np.where((ids >= 0) & (ids < len(table)), ids, 0)]


def rmsnorm_rows(h: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return h / np.sqrt((h**2).mean(-1, keepdims=True) + eps) * weight


def norm_final(h: np.ndarray, weight: np.ndarray, eps: float):
    """x, hidden."""
    return rmsnorm_rows(h[None], weight, eps)[0], h


def residual_rows(y: np.ndarray, h: np.ndarray) -> np.ndarray:
    return h + y


def residual_norm_rows(y: np.ndarray, h: np.ndarray, weight: np.ndarray, eps: float):
    """h, x."""
    return h + y, rmsnorm_rows(h + y, weight, eps)


def residual_step(y: np.ndarray, h: np.ndarray):
    """h, ssq."""
    return h + y, _ssq(h + y)


def take_rows(h: np.ndarray, snapshot_rows: list[int]):
    """hidden, snapshots, all."""
    return h[-1], [h[r] for r in snapshot_rows], h


def assert_agrees(buffer: np.ndarray, expected: np.ndarray) -> None:
    """float32: within 1e-5 of the output's RMS; bfloat16 (uint16): within its rounding.

    The relative part is for outputs with a few values far above the RMS (30 times in a recurrent state): after 300 tokens
    plain numpy in float32 is off by 1e-5 of the RMS there too.
    """
    expected = np.asarray(expected, np.float64)
    bar = 1e-5 * np.sqrt((expected**2).mean()) + 2e-6 * np.abs(expected)
    if buffer.dtype == np.uint16:
        buffer = (buffer.astype(np.uint32) << 16).view(np.float32)
        bar += 2.0**-8 * np.abs(expected)
    error = np.abs(buffer.reshape(expected.shape) - expected)
    assert (error <= bar).all(), f"{np.nanmax(error / bar):.3g} times the bar, {np.isnan(error).sum()} NaN"  # a NaN fails
