"""Sessions kept for reuse: each request begins from the longest stored prefix whose state is still there."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.errors import OutOfMemoryError
from lily.session import Session

if TYPE_CHECKING:
    from lily.model import Model
    from lily.progress import Report
    from lily.rendering import Rendering

_log = logging.getLogger(__name__)

_SHARE = 0.5  # of the memory that the weights leave free
_SLACK = 64  # tokens that may be read again so that an entry need not be kept
_GENERATED = 1


@dataclass(frozen=True)
class Reuse:
    """What a request took from the store: tokens `reused` and `read`. When the nearest stored session went another way,
    `differs_at` is the first token that differed and `message` the index of the message that it belongs to (None for the
    tools and the beginning of the answer).

    >>> import lily
    >>> model = lily.Model.demo()
    >>> reply = model.chat([{"role": "user", "content": "Hi"}], max_tokens=1)
    >>> reply.reuse.reused, reply.reuse.differs_at
    (0, None)
    """

    reused: int
    read: int
    differs_at: int | None = None
    message: int | None = None


class _Entry:
    """A stored session; never moved, requests work on forks."""

    def __init__(self, session: Session) -> None:
        native = session._native
        self.session = session
        self.tokens: np.ndarray[Any, Any] = native.tokens
        self.origins: np.ndarray[Any, Any] = native.origins
        self.snapshots: list[int] = list(native.snapshots)
        self.nbytes: int = native.nbytes
        generated = np.flatnonzero(self.origins == _GENERATED)
        self.read = int(generated[0]) if len(generated) else len(self.tokens)

    def common(self, ids: np.ndarray[Any, Any]) -> int:
        """Tokens that it shares with `ids` from the start."""
        n = min(len(self.tokens), len(ids))
        different = np.flatnonzero(self.tokens[:n] != ids[:n])
        return int(different[0]) if len(different) else n

    def usable(self, common: int) -> int:
        """Where a request that shares `common` tokens can go on."""
        if common == len(self.tokens):
            return common
        return max((at for at in self.snapshots if at <= common), default=0)


class Lease:
    """A fork for one request, already at the place from which it reads on."""

    def __init__(self, store: SessionStore, native: Any, ids: np.ndarray[Any, Any], rendering: Rendering, reuse: Reuse) -> None:
        self._store = store
        self._ids = ids
        self._rendering = rendering
        self.native = native
        self.reuse = reuse

    def read(self, report: Report | None) -> None:
        """Read the rest of the prompt; when memory is short, stored sessions go first."""
        marks = self._rendering.marks()
        while (done := self.native.length) < len(self._ids):
            try:
                self.native.append(self._ids[done:], report, [mark - done for mark in marks if done < mark < len(self._ids)])
            except OutOfMemoryError:
                if not self._store._evict_one():
                    raise

    def keep(self) -> None:
        """Hand the session to the store, however far it has come."""
        try:
            self._store._put(self.native)
        except ValueError:  # the model was closed meanwhile
            self.native.close()


class SessionStore:
    """The sessions that `Model.chat` goes on from, in `model.sessions`.

    A request finds the stored session that shares the most tokens with its prompt, forks it, goes back to the newest state
    at or before the first difference and reads the rest. Results are those of a session that did nothing else: with
    generated tokens taken over as they were generated, or, with `reuse_generated=False`, equal in every bit to a cold run.
    Entries are dropped, the least recently used first, before they exceed `budget` bytes; what sessions share is counted for
    each of them. Calls are safe from any thread.

    >>> import lily
    >>> model = lily.Model.demo()
    >>> question = [{"role": "user", "content": "What colour is the sky?"}]
    >>> _ = model.chat(question, max_tokens=4)
    >>> model.chat(question, max_tokens=4).usage.reused_tokens > 0
    True
    """

    def __init__(self, model: Model, budget: int | None = None) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._entries: list[_Entry] = []  # the least recently used first
        self._budget = _default_budget(model) if budget is None else _checked(budget)

    @property
    def budget(self) -> int:
        """The most bytes that stored sessions may hold. Setting it drops what no longer fits.

        >>> import lily
        >>> model = lily.Model.demo()
        >>> model.sessions.budget = 64 << 20
        >>> model.sessions.budget
        67108864
        """
        return self._budget

    @budget.setter
    def budget(self, value: int) -> None:
        with self._lock:
            self._budget = _checked(value)
            self._fit(0)

    @property
    def nbytes(self) -> int:
        """Bytes that the stored sessions hold.

        >>> import lily
        >>> lily.Model.demo().sessions.nbytes
        0
        """
        with self._lock:
            return sum(entry.nbytes for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"SessionStore({len(self)} sessions, {self.nbytes / (1 << 20):.1f} of {self.budget / (1 << 20):.1f} MiB)"

    def clear(self) -> None:
        """Drop every stored session.

        >>> import lily
        >>> lily.Model.demo().sessions.clear()
        """
        with self._lock:
            while self._evict_one():
                pass

    def _lease(self, rendering: Rendering, *, reuse_generated: bool = True) -> Lease:
        """A fork of the best stored session, or a new one, placed where the request goes on."""
        ids = np.asarray(rendering.ids, np.int32)
        with self._lock:
            best, start, nearest = self._find(ids, reuse_generated)
            native = self._model._native.session() if best is None else best.session._native.fork()
            self._fit(self._needed(len(ids) - start))
        try:
            if native.length != start:
                native.rewind(start)
        except BaseException:
            native.close()
            raise
        message = rendering.message_at(nearest) if nearest is not None else None
        reuse = Reuse(start, len(ids) - start, nearest, message)
        _log.debug("%d tokens reused, %d to read; first difference at token %s, message %s", start, reuse.read, nearest, message)
        return Lease(self, native, ids, rendering, reuse)

    def _put(self, native: Any) -> None:
        """Store a session as an entry, in place of those that it makes useless."""
        with self._lock:
            self._model.memory()  # a ValueError when the model was closed, which stored sessions would keep in memory
            entry = _Entry(Session(self._model, native))
            if len(entry.tokens) == 0 or entry.nbytes > self._budget:
                entry.session.close()
                return
            for other in list(self._entries):
                if self._covered(other, entry):
                    self._drop(other)
            self._fit(entry.nbytes)
            self._entries.append(entry)

    def _newest(self) -> Session | None:
        with self._lock:
            return self._entries[-1].session if self._entries else None

    def _evict_one(self) -> bool:
        """Drop the least recently used entry; False when there is none."""
        with self._lock:
            if not self._entries:
                return False
            self._drop(self._entries[0])
            return True

    def _find(self, ids: np.ndarray[Any, Any], reuse_generated: bool) -> tuple[_Entry | None, int, int | None]:
        """The best entry, where it can go on, and where the nearest entry differs (None when none does)."""
        best, start, nearest, furthest = None, 0, None, -1
        used = []
        for entry in self._entries:
            common = entry.common(ids)
            place = entry.usable(common if reuse_generated else min(common, entry.read))
            if place == len(entry.tokens):
                used.append(entry)
            if place > start:
                best, start = entry, place
            if common > furthest:
                furthest, nearest = common, common if common < min(len(entry.tokens), len(ids)) else None
        for entry in [*used, *([best] if best is not None and best not in used else [])]:
            self._entries.remove(entry)
            self._entries.append(entry)
        return best, start, nearest

    def _covered(self, old: _Entry, new: _Entry) -> bool:
        """Whether the places at which a request could go on from `old` are in other entries too.

        Its end may be lost when little would have to be read again: an answer that was rendered anew does not come back.
        """
        common = new.common(old.tokens)
        if (new.origins[:common] > old.origins[:common]).any():
            return False
        kept = {0, *(at for at in new.snapshots if at <= common)}
        for other in self._entries:
            if other is not old:
                shared = other.common(old.tokens)
                kept.update(at for at in other.snapshots if at <= shared and not (other.origins[:at] > old.origins[:at]).any())
        end = len(old.tokens)
        return kept.issuperset(at for at in old.snapshots if at <= common) and (common == end or end - max(kept) <= _SLACK)

    def _needed(self, tokens: int) -> int:
        memory = self._model._native.memory()
        return tokens * memory["kv_bytes_per_token"] + 2 * memory["state_bytes"]

    def _fit(self, nbytes: int) -> None:
        """Make room for `nbytes` more."""
        while self._entries and sum(entry.nbytes for entry in self._entries) + nbytes > self._budget:
            self._drop(self._entries[0])

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.session.close()


def _checked(budget: int) -> int:
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget is {budget!r}, expected a number of bytes")
    if budget < 0:
        raise ValueError(f"budget is {budget}, expected 0 or more bytes")
    return budget


def _default_budget(model: Model) -> int:
    memory = model._native.memory()
    limit = memory.get("limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, int((limit - memory["weights"]) * _SHARE))
