"""MLX's affine quantisation, bit for bit: each group of columns becomes codes, a scale and a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_EPSILON = np.float32(1e-7)


def quantize(values: Array, bits: int, group: int) -> tuple[Array, Array, Array]:
    """float32 `[n, cols]` -> packed codes uint32 `[n, cols * bits / 32]`, scales and biases, each as the bits of bfloat16
    in uint16 `[n, cols / group]`.

    `values` are those of a bfloat16 matrix and finite; `group` divides `cols`. The edge of larger magnitude becomes the
    bias, so that about half of the scales are negative.

    >>> import numpy as np
    >>> codes, scales, biases = quantize(np.linspace(-1, 1, 32, dtype=np.float32)[None], 4, 32)
    >>> codes.shape, from_bf16(biases).item()
    ((1, 4), 1.0)
    """
    rows, cols = values.shape
    grouped = np.ascontiguousarray(values, np.float32).reshape(rows, cols // group, group)
    top = np.float32(2**bits - 1)
    high, low = grouped.max(axis=2), grouped.min(axis=2)
    from_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / top, _EPSILON)
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    steps = np.rint(edge / scale)
    zero = steps == 0
    scale = np.where(zero, scale, edge / np.where(zero, np.float32(1), steps))
    bias = np.where(zero, np.float32(0), edge)
    codes = np.rint((grouped - bias[..., None]) / scale[..., None]).clip(0, top).astype(np.uint8)
    return pack(codes.reshape(rows, cols), bits), to_bf16(scale), to_bf16(bias)


def pack(codes: Array, bits: int) -> Array:
    """uint8 codes `[n, cols]` as a little-endian bit stream for each row, in uint32 words; 32 divides `cols`."""
    rows, cols = codes.shape
    eights = codes.reshape(rows, cols // 8, 8)
    stream = np.zeros((rows, cols // 8), np.uint64)
    for i in range(8):
        stream |= eights[..., i].astype(np.uint64) << np.uint64(bits * i)
    taken = stream.astype("<u8").view(np.uint8).reshape(rows, cols // 8, 8)[..., :bits]
    return np.ascontiguousarray(taken).reshape(rows, cols * bits // 8).view("<u4")


def to_bf16(values: Array) -> Array:
    """float32 -> the bits of the nearest bfloat16 (ties to even), as uint16. The values are no NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """The bits of bfloat16 -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
