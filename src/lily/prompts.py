"""What may stand for a prompt: text or token ids, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from lily.tokenizer import Tokenizer

    Prompt = str | Sequence[int] | np.ndarray[Any, Any]


def to_ids(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> np.ndarray[Any, Any]:
    """int32 `[n]` of valid ids, n at least 1. Raises `TypeError` for other types, `ValueError` for empty or bad ids."""
    import numpy as np

    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt)
    elif isinstance(prompt, (bytes, bytearray)):
        raise TypeError("the prompt is bytes, expected text or token ids")
    try:
        ids = np.asarray(prompt)
    except ValueError as error:
        raise ValueError("token ids must form one flat list") from error
    if ids.ndim == 0:
        raise TypeError(f"the prompt is {type(prompt).__name__}, expected text or token ids")
    if ids.ndim != 1:
        raise ValueError(f"token ids have {ids.ndim} dimensions, expected one flat list")
    if ids.size == 0:
        raise ValueError("the prompt is empty, expected at least one token")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"the prompt holds {ids.dtype}, expected text or integer token ids")
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise ValueError(f"token id {int(bad[0])} is outside the vocabulary, expected 0 to {vocab_size - 1}")
    return np.ascontiguousarray(ids, dtype=np.int32)


def is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts rather than one."""
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and hasattr(prompt[0], "__len__")
