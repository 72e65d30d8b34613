"""What is checked when a model is loaded, beside its files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lily._engine import native
from lily.device import device_info
from lily.errors import CheckpointError, DeviceError
from lily.progress import check_progress

if TYPE_CHECKING:
    from lily.config import ModelConfig
    from lily.tokenizer import Tokenizer


_log = logging.getLogger(__name__)
_MAX_BYTES = 2**63 - 1


def open_engine(spec: Any, weights: Any, device: str, max_context: int, memory_limit: int | None, report: Any) -> Any:
    """The engine's model. What it runs on, and what the device decided about itself, goes to the log."""
    engine = native().Model(spec, weights, device, max_context, memory_limit, report)
    _log.info("running on %s", device_info(engine.device))
    return engine


def check_options(*, device: Any, max_context: Any, memory_limit: Any, quantize: Any, refresh: Any, progress: Any) -> None:
    """Check what `Model.from_pretrained` was given, before anything is downloaded or read.

    Raises `TypeError`, `ValueError`, and `DeviceError` for a device that this machine lacks.
    """
    check_positive("max_context", max_context)
    check_positive("memory_limit", memory_limit)
    if memory_limit is not None and memory_limit > _MAX_BYTES:
        raise ValueError(f"memory_limit is {memory_limit}, expected at most {_MAX_BYTES} bytes")
    check_bits(quantize)
    if not isinstance(refresh, bool):
        raise TypeError(f"refresh is {refresh!r}, expected True or False")
    check_progress(progress)
    if not isinstance(device, str):
        raise TypeError(f"device is {device!r}, expected a name such as 'auto' or 'cpu'")
    known = ["auto", *(entry["name"] for entry in native().devices())]
    if device not in known:
        reason = native().metal_missing() if device.split(":")[0] == "metal" else ""
        raise DeviceError(f"device {device!r} is not available here{f' ({reason})' if reason else ''}, expected one of: {', '.join(known)}")


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
