"""The stand-in for Metal from Python: what it was told, faults it is to show, and what it has to complain about."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NEEDS_STANDIN = pytest.mark.skipif(
    not os.environ.get("LILY_SIM") or sys.platform == "darwin", reason="LILY_SIM is not set: no stand-in for Metal"
)


class Standin:
    """The library behind LILY_SIM; the extension has it open too."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL(os.environ["LILY_SIM"])
        for name in ("log", "complaints", "selectors"):
            getattr(library, f"lily_standin_{name}").restype = ctypes.c_char_p
        for name in ("sent", "alive"):
            getattr(library, f"lily_standin_{name}").restype = ctypes.c_uint64
        library.lily_standin_set.argtypes = [ctypes.c_char_p, ctypes.c_double]

    def reset(self) -> None:
        self._library.lily_standin_reset()

    def set(self, **properties: float) -> None:
        """Of the GPU: family, os (26.2 is 2602), working_set, max_buffer, seconds_per_dispatch, residency, low_power, gpu..."""
        for name, value in properties.items():
            self._library.lily_standin_set(name.encode(), float(value))

    def fault(self, selector: str, action: str = "nil", nth: int = 0) -> None:
        """The nth message from now on comes to nothing; `commit` takes "error:CODE", "hang" or "slow:MILLISECONDS"."""
        self._library.lily_standin_fault(selector.encode(), nth, action.encode())

    def sent(self, selector: str) -> int:
        return self._library.lily_standin_sent(selector.encode())

    def all_sent(self) -> dict[str, int]:
        lines = self._library.lily_standin_selectors().decode().splitlines()
        return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in lines)}

    def alive(self, cls: str) -> int:
        return self._library.lily_standin_alive(cls.encode())

    def complaints(self) -> list[str]:
        return self._library.lily_standin_complaints().decode().splitlines()

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        """The messages sent inside of the block, in the list when it ends."""
        lines: list[str] = []
        self._library.lily_standin_record(1)
        try:
            yield lines
        finally:
            self._library.lily_standin_record(0)
            lines += self._library.lily_standin_log().decode().splitlines()


@pytest.fixture
def standin() -> Iterator[Standin]:
    """A stand-in as new; a test that leaves it something to complain about fails."""
    found = Standin()
    found.reset()
    yield found
    complaints = found.complaints()
    found.reset()
    assert not complaints
