"""Random weights in every format the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from harness import bf16, from_bf16, quantize, rb, structs, unaligned

AFFINE, BF16, F16, F32 = range(4)
FAST = ["4g64", "8g64", "bf16"]
OTHER = ["2g32", "3g64", "5g128", "6g32", "4g32", "4g128", "8g32", "f16", "f32"]


@dataclass
class Weight:
    format: dict
    buffers: list  # codes, scales, biases
    values: np.ndarray  # float64, exact

    def rounded(self, storage: str) -> np.ndarray:
        """The weights prefill multiplies by."""
        single = self.values.astype(np.float32)
        return (single if storage == "float32" else rb(single)).astype(np.float64)

    def unaligned(self) -> Weight:
        return Weight(
            self.format, [None if b is None else unaligned(b, shift) for b, shift in zip(self.buffers, (1, 3, 5), strict=True)], self.values
        )

    def stacked(self, experts: int) -> np.ndarray:
        return self.values.reshape(experts, -1, self.values.shape[1])


def weight(rng, rows: int, cols: int, form: str = "4g64") -> Weight:
    structs()
    if form[0].isdigit():
        bits, group = map(int, form.split("g"))
        codes, scales, biases, values = quantize(rng, rows, cols, bits, group)
        if bits == 8:  # keep the outputs of one size
            scales = bf16(from_bf16(scales) / 16)
            q = codes.view(np.uint8).reshape(rows, cols).astype(np.float64)
            values = np.repeat(from_bf16(scales).astype(np.float64), group, 1) * q + np.repeat(
                from_bf16(biases).astype(np.float64), group, 1
            )
        return Weight({"kind": AFFINE, "bits": bits, "group": group}, [codes, scales, biases], values)
    plain = rng.normal(0, 0.1, (rows, cols)).astype(np.float32)
    if form == "bf16":
        data = bf16(plain)
        return Weight({"kind": BF16}, [data, None, None], from_bf16(data).astype(np.float64))
    if form == "f16":
        data = plain.astype(np.float16)
        data.reshape(-1)[:3] = [6e-8, -3e-5, 0]  # subnormals and zero
        return Weight({"kind": F16}, [data, None, None], data.astype(np.float64))
    return Weight({"kind": F32}, [plain, None, None], plain.astype(np.float64))


def blocks(rows: int, size: int = 16) -> int:
    return -(-rows // size)


def grid(T: int, N: int) -> int:
    """Threadgroups of a matrix product of T rows and N outputs on the CPU: 64 outputs for 256 rows each."""
    return blocks(T, 256) * blocks(N, 64)


def close(got, want, scale=None, rounded: bool = False, factor: float = 1) -> None:
    """Within 1e-5 (times `factor`) of the output's RMS (or `scale`); one bf16 step more where the output is rounded to it."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    limit = factor * 1e-5 * (scale or np.sqrt((want**2).mean())) + (2**-8 * np.abs(want) if rounded else 0)
    worst = (np.abs(got - want) / limit).max()
    assert worst <= 1, f"{worst:.2f} times the tolerance"
