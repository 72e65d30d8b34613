"""Lily runs Qwen3.5 and Qwen3.6 from 4-bit checkpoints on the machine in front of you.

>>> import lily
>>> model = lily.Model.demo()
>>> print(len(model.generate("Once upon a time", max_tokens=16).tokens) <= 16)
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lily import _engine as _engine  # registers the errors with the extension
from lily.errors import (
    CancelledError,
    CheckpointError,
    ContextOverflowError,
    DeviceError,
    GPUError,
    LilyError,
    MessageError,
    OutOfMemoryError,
    SamplingError,
    SessionMismatchError,
    TemplateError,
)

if TYPE_CHECKING:
    from lily.config import ModelConfig
    from lily.device import DeviceInfo, devices
    from lily.inspection import Inspection, inspect
    from lily.model import Model
    from lily.planning import Plan, plan
    from lily.profile import Profile
    from lily.results import Chunk, Generation, Memory, Message, MessageDelta, Ranked, Reuse, Rewind, Score, Timing, TokenLogprob, Usage
    from lily.sampling import Sampling
    from lily.server import serve
    from lily.session import Session
    from lily.store import SessionStore
    from lily.tokenizer import Tokenizer
    from lily.tool_calls import ToolCall, ToolCallDelta

    __version__: str

# Loaded at first use, so that `import lily` costs nothing.
_LAZY = {
    "Chunk": "results",
    "DeviceInfo": "device",
    "Inspection": "inspection",
    "Generation": "results",
    "Memory": "results",
    "Message": "results",
    "MessageDelta": "results",
    "Model": "model",
    "ModelConfig": "config",
    "Plan": "planning",
    "Profile": "profile",
    "Ranked": "results",
    "Sampling": "sampling",
    "Reuse": "results",
    "Rewind": "results",
    "Score": "results",
    "Session": "session",
    "SessionStore": "store",
    "Timing": "results",
    "TokenLogprob": "results",
    "Tokenizer": "tokenizer",
    "ToolCall": "tool_calls",
    "ToolCallDelta": "tool_calls",
    "Usage": "results",
    "devices": "device",
    "inspect": "inspection",
    "plan": "planning",
    "serve": "server",
}

__all__ = [
    "CancelledError",
    "CheckpointError",
    "Chunk",
    "ContextOverflowError",
    "DeviceError",
    "DeviceInfo",
    "GPUError",
    "Generation",
    "Inspection",
    "LilyError",
    "Memory",
    "Message",
    "MessageDelta",
    "MessageError",
    "Model",
    "ModelConfig",
    "OutOfMemoryError",
    "Plan",
    "Profile",
    "Ranked",
    "Sampling",
    "SamplingError",
    "Reuse",
    "Rewind",
    "Score",
    "Session",
    "SessionMismatchError",
    "SessionStore",
    "TemplateError",
    "Timing",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "devices",
    "inspect",
    "plan",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f"lily.{_LAZY[name]}"), name)
    elif name == "__version__":
        value = _version()
    elif name == "testing":
        return import_module("lily.testing")
    else:
        raise AttributeError(f"module 'lily' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, "__version__"])


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("lily-inference")
    except metadata.PackageNotFoundError:
        return "0.0.0+source"
