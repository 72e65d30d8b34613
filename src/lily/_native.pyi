"""Lily's engine."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

from lily._native import selftest as selftest, testing as testing


def set_exceptions(classes: dict) -> None:
    """
    Registers the Python exception classes, by name, that errors of the engine are raised as.
    """

def devices() -> list: ...

def set_kernel_root(folder: str) -> None:
    """Where the Metal device finds its kernel sources."""

def metal_missing() -> str:
    """Why there is no Metal device here; empty when there is one."""

def plan(spec: dict, weights: list, device: str = 'auto') -> dict:
    """The programs of a configuration, recorded without a device."""

class Model:
    """A checkpoint loaded on a device."""

    def __init__(self, spec: dict, weights: list, device: str = 'auto', max_context: int | None = None, memory_limit: int | None = None, progress: object | None = None) -> None: ...

    def session(self) -> Session:
        """A new, empty session."""

    def memory(self) -> dict:
        """Bytes in use by kind, and the limit."""

    def held_bytes(self, sessions: Sequence[Session]) -> int:
        """
        Bytes that these sessions hold together; what they share is counted once.
        """

    def trim(self) -> None:
        """Gives back memory that no session holds."""

    @property
    def fused(self) -> bool:
        """Whether the plan is the fused one."""

    def plan(self) -> dict:
        """The decode step and the prefill chunk as recorded."""

    def close(self) -> None:
        """
        Lets go of the engine; its memory is returned when the last session has gone too.
        """

    def set_chunk(self, rows: int) -> None: ...

    @property
    def device(self) -> dict: ...

    @property
    def chunk(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

class Session:
    """Tokens and the state after them."""

    def append(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], progress: object | None = None, marks: Sequence[int] = [], keep_end: bool = True) -> None: ...

    def rewind(self, n: int, progress: object | None = None) -> tuple: ...

    @property
    def snapshots(self) -> list[int]: ...

    def append_rows(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], mode: str, progress: object | None = None) -> NDArray[numpy.float32]: ...

    def logits(self) -> NDArray[numpy.float32]: ...

    def fork(self) -> Session: ...

    def keep(self) -> None:
        """
        Kept for reuse only: from now on the engine may let go of it when memory is short, the one kept longest ago first.
        """

    @property
    def evicted(self) -> bool:
        """Whether the engine has let go of it, or it was closed."""

    def start(self, sampling: dict, max_tokens: int) -> Decoder: ...

    def close(self) -> None: ...

    @property
    def tokens(self) -> object: ...

    @property
    def origins(self) -> object: ...

    @property
    def length(self) -> int: ...

    @property
    def pending(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def busy(self) -> bool: ...

class Decoder:
    """An open generation; always close it."""

    def next(self, mask: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> object: ...

    def close(self) -> None: ...

    @property
    def limit(self) -> object: ...

def export_session(session: Session) -> dict:
    """
    Everything a session holds, as arrays of bytes; views of memory that does not change.
    """

def import_session(model: Model, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], origins: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], consumed: int, states: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]], snapshots: list, kv: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]]) -> Session:
    """
    A session from what export_session gave. ValueError when it does not fit the model.
    """

def limit_kinds() -> list[str]:
    """What measure_limit can measure on this machine's CPU."""

def measure_limit(kind: str, bytes: int = 0, threads: int = 1, windows: int = 5, seconds: float = 0.1) -> list[tuple[float, float]]:
    """
    Rates of the CPU for each window, by the clock and by the threads' own time: bytes, codes or operations a second.
    """

def start_clock(model: Model) -> None:
    """From now on the time of each stage is kept."""

def stop_clock(model: Model) -> list:
    """
    Programs that ran since start_clock, with the seconds of each stage of each run.
    """
