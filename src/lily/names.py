"""Tensor names: every wrapper's prefix comes off, so that one table of names serves all exports."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?(?=(?:embed_tokens|layers|norm|lm_head)(?:\.|$))")
_SKIPPED = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?(?:vision_tower|visual)\.|(?:^|\.)mtp\.")


def canonical(name: str) -> str:
    """`language_model.model.layers.0.x`, `model.language_model.layers.0.x`, `model.layers.0.x` -> `layers.0.x`.

    A name of another kind comes back as it is.
    """
    return _PREFIX.sub("", name, count=1)


def skipped(name: str) -> bool:
    """Whether the tensor belongs to the vision tower or the multi-token-prediction head, which Lily does not run."""
    return _SKIPPED.search(name) is not None
