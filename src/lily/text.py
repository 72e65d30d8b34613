"""Stop strings, matched on text as it arrives."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Passes text through until one of `stops` has appeared, holding back only what may become one.

    How the text is cut into pieces makes no difference: the stop that is complete first wins, and of several that are
    complete at the same character, the longest.

    >>> from lily.text import StopMatcher
    >>> matcher = StopMatcher(["END"])
    >>> matcher.push("fine E"), matcher.push("N"), matcher.push("D and more"), matcher.matched
    ('fine ', '', '', 'END')
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what may be shown. After a match nothing more is."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        buffer = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return buffer[:start]
        keep = self._undecided(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The held text, at the end of the stream when no stop was found."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = min(max(map(len, self._stops)) - 1, len(buffer))
        for size in range(longest, 0, -1):
            if any(stop.startswith(buffer[len(buffer) - size :]) for stop in self._stops):
                return size
        return 0
