"""What is checked when a model is loaded, beside its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lily.errors import CheckpointError

if TYPE_CHECKING:
    from lily.config import ModelConfig
    from lily.tokenizer import Tokenizer


def check_positive(name: str, value: int | None) -> None:
    """Raise `TypeError` or `ValueError` unless the argument `name` is a positive integer or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, expected a positive integer or None")
    if value < 1:
        raise ValueError(f"{name} is {value}, expected a positive integer or None")


def check_bits(bits: int | None) -> None:
    """Raise `TypeError` or `ValueError` unless `quantize` is 4, 8 or None."""
    if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int)):
        raise TypeError(f"quantize is {bits!r}, expected 4, 8 or None")
    if bits not in (None, 4, 8):
        raise ValueError(f"quantize is {bits}, expected 4, 8 or None")


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise `CheckpointError` when the tokenizer has ids that the model has not."""
    if len(tokenizer) > config.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has ids up to {len(tokenizer) - 1}, but the model's vocabulary has {config.vocab_size}; "
            "the files are not of one checkpoint",
            found=len(tokenizer), expected=config.vocab_size, tensor="embed_tokens",
        )  # fmt: skip
