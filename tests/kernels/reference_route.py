"""References of the three kernels that make the tile map, in numpy integers: one function per kernel name. ids are [rows, k], live rows only."""

from __future__ import annotations

import numpy as np

BLOCK_ROWS = 64


def moe_histogram(ids, E):
    """counts [B,E]: rows of each block of 64 that chose each expert."""
    return np.stack([np.bincount(ids[b : b + BLOCK_ROWS].reshape(-1), minlength=E) for b in range(0, len(ids), BLOCK_ROWS)])


def moe_scan(counts, tile_rows, N_a, N_b):
    """offsets [E+1], base [B,E], tiles [n,4], grids [2,3]."""
    totals = counts.sum(0)
    offsets = np.concatenate([[0], np.cumsum(totals)])
    base = offsets[:-1] + np.cumsum(counts, 0) - counts
    tiles = [
        (e, first, min(tile_rows, offsets[e + 1] - first), 0)
        for e in range(len(totals))
        for first in range(offsets[e], offsets[e + 1], tile_rows)
    ]
    return offsets, base, np.array(tiles), np.array([[-(-n // 64), len(tiles), 1] for n in (N_a, N_b)])


def moe_scatter(ids, base):
    """slot_row [rows*k], slot_of [rows,k], given where each block's rows of each expert begin."""
    slot_row, slot_of = np.full(ids.size, -1), np.empty(ids.shape, np.int64)
    at = base.copy()
    for t, row in enumerate(ids):
        for j, e in enumerate(row):
            slot_of[t, j] = at[t // BLOCK_ROWS, e]
            slot_row[slot_of[t, j]] = t
            at[t // BLOCK_ROWS, e] += 1
    return slot_row, slot_of
