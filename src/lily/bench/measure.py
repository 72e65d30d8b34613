"""What is measured and which results count: shapes, samples, the rules that a run must obey."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from lily.errors import LilyError

ROUNDS = 5  # fewest samples of a median
STEPS = 64  # decode steps after a prompt
# Two clocks that see the same event may differ by this much before a rate counts as impossible.
_TOLERANCE = 1.02


class BenchError(LilyError):
    """A measurement that cannot be believed, or an arm that did not run."""


@dataclass(frozen=True)
class Shape:
    """One prompt of `prompt` tokens, then `steps` decode steps."""

    prompt: int
    steps: int = STEPS


@dataclass(frozen=True)
class Sample:
    """One timed run of a shape. `digest` is of the ids; None for an engine that does not show them."""

    arm: str
    shape: Shape
    prefill_seconds: float
    decode_seconds: float
    digest: str | None

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.shape.prompt / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """Decode steps a second."""
        return self.shape.steps / self.decode_seconds


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several rates."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises `BenchError` for fewer than five values."""
        found = sorted(values)
        if len(found) < ROUNDS:
            raise BenchError(f"a median of {len(found)} runs says little; at least {ROUNDS} are needed")
        return cls(median(found), found[0], found[-1])

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.least)} to {_short(self.greatest)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def prompt_ids(tokens: int, vocab: int) -> np.ndarray[Any, Any]:
    """The prompt of every arm: id i is `((i * 2654435761) mod 2^32) mod vocab`, int32 `[tokens]`.

    >>> prompt_ids(4, 1000).tolist()
    [0, 761, 226, 987]
    """
    spread = (np.arange(tokens, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(1 << 32)
    return (spread % np.uint64(vocab)).astype(np.int32)


def digest(ids: Sequence[int]) -> str:
    """A short digest of the ids that an arm chose."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:16]


def order(arms: Sequence[Any], turn: int) -> list[Any]:
    """The arms of one round: forward and backward in turn, so that a drift of the machine favours none."""
    return list(arms) if turn % 2 == 0 else list(reversed(arms))


def check_digests(samples: Iterable[Sample]) -> None:
    """Raise `BenchError` when an arm chose other ids in another run of the same shape."""
    seen: dict[tuple[str, Shape], str] = {}
    for sample in samples:
        if sample.digest is None:
            continue
        first = seen.setdefault((sample.arm, sample.shape), sample.digest)
        if first != sample.digest:
            raise BenchError(
                f"{sample.arm} at {sample.shape.prompt} tokens: the ids of one run have the digest {first}, those of another "
                f"{sample.digest}; greedy decoding must repeat itself"
            )


def check_possible(what: str, rate: float, ceiling: float, unit: str = "bytes") -> None:
    """Raise `BenchError` when a rate is above what this machine was measured to reach over the same working set."""
    if rate > ceiling * _TOLERANCE:
        raise BenchError(
            f"{what}: {rate / 1e9:,.1f} billion {unit} a second, but this machine was measured at {ceiling / 1e9:,.1f} at most over "
            "the same working set; the measurement is wrong or the ceiling was taken while the machine was busy"
        )
