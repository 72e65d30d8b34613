"""What a stored session can serve: its tokens, who made them, and the places from which one can go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

GENERATED = 1


class Prefix:
    """int32 `tokens` `[n]`, uint8 `origins` `[n]` (1: generated), and the ascending positions of `snapshots`."""

    def __init__(self, tokens: np.ndarray[Any, Any], origins: np.ndarray[Any, Any], snapshots: Sequence[int]) -> None:
        self.tokens = tokens
        self.origins = origins
        self.snapshots = list(snapshots)
        generated = np.flatnonzero(origins == GENERATED)
        self.read = int(generated[0]) if len(generated) else len(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def common(self, ids: np.ndarray[Any, Any]) -> int:
        """Tokens that it shares with `ids` from the start."""
        n = min(len(self.tokens), len(ids))
        different = np.flatnonzero(self.tokens[:n] != ids[:n])
        return int(different[0]) if len(different) else n

    def usable(self, common: int) -> int:
        """Where a request that shares `common` tokens can go on."""
        if common == len(self.tokens):
            return common
        return max((at for at in self.snapshots if at <= common), default=0)

    def serves(self, other: Prefix) -> list[int]:
        """The places of `other` that this one has too, with no token generated that `other` has read."""
        shared = self.common(other.tokens)
        later = np.flatnonzero(self.origins[:shared] > other.origins[:shared])
        shared = int(later[0]) if len(later) else shared
        return [at for at in self.snapshots if at <= shared]

    def digest(self) -> str:
        """A name for these tokens, origins and places."""
        places = np.array(self.snapshots, np.int32)
        parts = (self.tokens.astype("<i4"), self.origins.astype(np.uint8), places.astype("<i4"))
        import hashlib

        return hashlib.sha256(b"|".join(part.tobytes() for part in parts)).hexdigest()[:32]
