"""Progress: a callable `(stage, done, total)`, a bar on stderr, or silence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Report = Callable[[str, int, int], None]
Progress = bool | Report | None


def check_progress(progress: object) -> None:
    """Raise `TypeError` unless this can be a `progress` argument."""
    if not callable(progress) and not isinstance(progress, bool) and progress is not None:
        raise TypeError(f"progress is {progress!r}, expected True, False or a callable (stage, done, total)")


@contextmanager
def reporting(progress: Progress) -> Iterator[Report | None]:
    """Turn a `progress` argument into a report function, or None for silence, and clean up after it.

    True shows a bar when stderr is a terminal (or in a notebook); False and None are silent.
    """
    check_progress(progress)
    if callable(progress):
        yield progress
    elif not progress or not visible():
        yield None
    else:
        bar = _Bar()
        try:
            yield bar
        finally:
            bar.close()


def visible() -> bool:
    """Whether somebody can see a bar: stderr is a terminal, or this is a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


class _Bar:
    """One tqdm bar for each stage, closed when the next begins."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            from tqdm.auto import tqdm

            self.close()
            self._stage, self._bar = stage, tqdm(total=total, desc=stage, unit_scale=True, leave=False, file=sys.stderr)
        if self._bar.total != total:
            self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._stage = self._bar = None
