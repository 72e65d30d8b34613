"""The errors that Lily raises. Each says what was found, what was expected and what to do."""

from __future__ import annotations

__all__ = [
    "CancelledError",
    "CheckpointError",
    "ContextOverflowError",
    "DeviceError",
    "GPUError",
    "LilyError",
    "MessageError",
    "OutOfMemoryError",
    "SamplingError",
    "SessionMismatchError",
    "TemplateError",
]


class LilyError(Exception):
    """Base class of every error that is Lily's own.

    Wrong argument types and values are plain `TypeError` and `ValueError`.

    >>> import lily
    >>> issubclass(lily.CheckpointError, lily.LilyError)
    True
    """


class CheckpointError(LilyError):
    """A checkpoint is missing, incomplete, damaged or of a kind that Lily does not run.

    `found` and `expected` say how the two differ, `tensor` names the tensor (or config field); each may be None.

    >>> import lily
    >>> lily.CheckpointError("bad shape", found=[2, 2], expected=[2, 4], tensor="norm").expected
    [2, 4]
    """

    def __init__(self, message: str, *, found: object = None, expected: object = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.found = found
        self.expected = expected
        self.tensor = tensor


class DeviceError(LilyError):
    """A device is unknown, absent, or refused the work.

    >>> import lily
    >>> try:
    ...     lily.Model.demo(device="no-such-device")
    ... except lily.DeviceError as error:
    ...     print("refused")
    refused
    """


class GPUError(DeviceError):
    """Work failed on the device (any device, the CPU included). The model stays usable.

    `stage` names what failed, `log` holds the driver's text; both are strings or None.

    >>> import lily
    >>> lily.GPUError("command buffer failed", stage="decode").stage
    'decode'
    """

    def __init__(self, message: str, *, stage: str | None = None, log: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.log = log


class OutOfMemoryError(LilyError, MemoryError):
    """The memory limit does not allow this. `needed` and `available` are bytes, `hint` says what would help.

    >>> import lily
    >>> issubclass(lily.OutOfMemoryError, MemoryError)
    True
    """

    def __init__(self, message: str, *, needed: int | None = None, available: int | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.hint = hint


class ContextOverflowError(LilyError):
    """More tokens than the context holds. `tokens` is what the request needs, `limit` what there is.

    >>> import lily
    >>> with lily.Model.demo(max_context=256) as model:
    ...     try:
    ...         model.prefill([1] * 300)
    ...     except lily.ContextOverflowError as error:
    ...         print(error.limit)
    256
    """

    def __init__(self, message: str, *, tokens: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.limit = limit


class TemplateError(LilyError):
    """The chat template is missing, does not parse, or refused the messages.

    >>> import lily
    >>> from lily.template import ChatTemplate
    >>> try:
    ...     ChatTemplate("{{ raise_exception('no question') }}").render([])
    ... except lily.TemplateError as error:
    ...     print(error)
    the chat template refused these messages: no question
    """


class MessageError(TemplateError, ValueError):
    """A message, a tool or another part of a chat request cannot be used; `path` is its place, as in `messages[0].role`.

    >>> import lily
    >>> try:
    ...     lily.Model.demo().chat([{"role": "narrator", "content": "Hi"}])
    ... except lily.MessageError as error:
    ...     print(error.path)
    messages[0].role
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message if path is None else f"{path} {message}")
        self.path = path


class SamplingError(LilyError, ValueError):
    """A sampling setting has a value it cannot have; `field` names it.

    >>> import lily
    >>> try:
    ...     lily.Sampling(top_p=2.0)
    ... except lily.SamplingError as error:
    ...     print(error.field)
    top_p
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class SessionMismatchError(LilyError):
    """A saved session belongs to another model or another build.

    >>> import lily
    >>> issubclass(lily.SessionMismatchError, lily.LilyError)
    True
    """


class CancelledError(LilyError):
    """A request was cancelled from another thread. Ctrl-C is `KeyboardInterrupt` instead.

    >>> import lily
    >>> issubclass(lily.CancelledError, lily.LilyError)
    True
    """
