"""Sessions kept for reuse: each request begins from the longest stored prefix whose state is still there."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.prefix import Prefix
from lily.results import Reuse
from lily.session import Session
from lily.session_cache import DEFAULT_LIMIT, SessionCache, Stored, default_directory

if TYPE_CHECKING:
    from lily.model import Model
    from lily.progress import Report
    from lily.rendering import Rendering

_log = logging.getLogger(__name__)

_SHARE = 0.5  # of the memory that the weights leave free
_SLACK = 64  # tokens that may be read again so that an entry need not be kept
_DISK_TOKENS = 256  # a file must spare the reading of so many tokens to be loaded


class _Entry(Prefix):
    """A stored session; never moved, requests work on forks."""

    def __init__(self, session: Session) -> None:
        native = session._native
        super().__init__(native.tokens, native.origins, native.snapshots)
        self.session = session
        self.native = native
        native.keep()


class Lease:
    """A session for one request, already at the place from which it reads on."""

    def __init__(self, store: SessionStore, native: Any, ids: np.ndarray[Any, Any], rendering: Rendering, reuse: Reuse) -> None:
        self._store = store
        self._ids = ids
        self._rendering = rendering
        self.native = native
        self.reuse = reuse

    def read(self, report: Report | None) -> None:
        """Read the rest of the prompt."""
        done = self.native.length
        if done < len(self._ids):
            marks = [mark - done for mark in self._rendering.marks() if done < mark < len(self._ids)]
            self.native.append(self._ids[done:], report, marks)

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

    Stored sessions hold at most `budget` bytes, what they share counted once, and are part of what `memory_limit` bounds: room is
    made before memory is asked for, and whatever a request of this model needs is taken from the least recently used first.
    `keep_on_disk` lets those that leave go to files. Calls are safe from any thread.

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
        self._disk: SessionCache | None = None
        self._budget = _default_budget(model) if budget is None else _checked("budget", budget)

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
            self._budget = _checked("budget", value)
            leaving = self._fit(0)
        self._let_go(leaving)
        self._model._native.trim()

    @property
    def nbytes(self) -> int:
        """Bytes that the stored sessions hold, what they share counted once.

        >>> import lily
        >>> lily.Model.demo().sessions.nbytes
        0
        """
        with self._lock:
            return self._held(self._present())

    def __len__(self) -> int:
        with self._lock:
            return len(self._present())

    def __repr__(self) -> str:
        return f"SessionStore({len(self)} sessions, {self.nbytes / (1 << 20):.1f} of {self.budget / (1 << 20):.1f} MiB)"

    def keep_on_disk(self, directory: str | os.PathLike[str] | None = None, *, limit: int = DEFAULT_LIMIT) -> Path:
        """Let sessions that leave the memory go to files, and find them again, also in a later process. Returns the directory.

        `directory` None is the user's cache directory of this system. All files in it together take at most `limit` bytes; the least
        recently used are deleted first. A file is written when its session leaves because of `budget`, by `flush`, and when the
        model is closed; it is never changed. A full disk, or a damaged file, costs a cached session and nothing else.
        Raises `OSError` when the directory cannot be made.

        >>> import lily, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> question = [{"role": "user", "content": "What colour is the sky? " * 40}]
        >>> with lily.Model.demo() as model:
        ...     _ = model.sessions.keep_on_disk(directory, limit=1 << 30)
        ...     _ = model.chat(question, max_tokens=1)
        >>> with lily.Model.demo() as model:
        ...     _ = model.sessions.keep_on_disk(directory, limit=1 << 30)
        ...     print(model.chat(question, max_tokens=1).usage.reused_tokens > 200)
        True
        """
        cache = SessionCache(self._model, default_directory() if directory is None else Path(directory), _checked("limit", limit))
        with self._lock:
            self._disk = cache
        return cache.directory.parent

    def flush(self) -> int:
        """Write the stored sessions that are on no disk yet; returns how many files hold them now. 0 without `keep_on_disk`.

        >>> import lily
        >>> lily.Model.demo().sessions.flush()
        0
        """
        with self._lock:
            disk = self._disk
            copies = []
            for entry in self._present() if disk is not None else ():
                with suppress(ValueError):  # let go of meanwhile
                    copies.append((entry, entry.native.fork()))
        written = 0
        for entry, copy in copies:
            written += disk.write(copy, entry)  # type: ignore[union-attr]
            copy.close()
        return written

    def clear(self, *, disk: bool = False) -> None:
        """Drop every stored session and give its memory back; with `disk` delete this model's files too.

        >>> import lily
        >>> lily.Model.demo().sessions.clear()
        """
        with self._lock:
            for entry in self._entries:
                entry.session.close()
            self._entries.clear()
            if disk and self._disk is not None:
                self._disk.clear()
        self._model._native.trim()

    def _close(self) -> None:
        """The model goes: what may go to disk does."""
        self.flush()
        self._disk = None

    def _lease(self, rendering: Rendering, *, reuse_generated: bool = True) -> Lease:
        """A session placed where the request goes on: a fork of the best stored one, a copy of the best file, or a new one."""
        ids = np.asarray(rendering.ids, np.int32)
        with self._lock:
            native, start, nearest = self._take(ids, reuse_generated)
            leaving = self._fit(self._needed(len(ids) - start))
        self._let_go(leaving)
        try:
            if native.length != start:
                native.rewind(start)
        except BaseException:
            native.close()
            raise
        message = rendering.message_at(nearest) if nearest is not None else None
        reuse = Reuse(start, len(ids) - start, nearest, message)
        if nearest is not None and start < nearest:
            _log.info("%d tokens are read again: token %d, in message %s, differs from what was stored", nearest - start, nearest, message)
        _log.debug("%d tokens reused, %d to read; first difference at token %s, message %s", start, reuse.read, nearest, message)
        return Lease(self, native, ids, rendering, reuse)

    def _take(self, ids: np.ndarray[Any, Any], reuse_generated: bool) -> tuple[Any, int, int | None]:
        """A session that nobody else has, where it can go on, and where the nearest stored one differs."""
        entries = self._present()
        files = [] if self._disk is None else self._disk.entries()
        best, start, nearest = _best(entries, ids, reuse_generated)
        file, place, nearest_file = _best([stored.prefix for stored in files], ids, reuse_generated)
        native = None
        if file is not None and place >= start + _DISK_TOKENS:
            stored: Stored = next(stored for stored in files if stored.prefix is file)
            native = self._disk.load(stored)  # type: ignore[union-attr]
            if native is not None:
                best, start, nearest = None, place, nearest_file
        for entry in [entry for entry in entries if len(entry) == entry.usable(entry.common(ids)) or entry is best]:
            self._entries.remove(entry)
            self._entries.append(entry)
            entry.native.keep()
        if best is not None:
            try:
                native = best.native.fork()  # type: ignore[attr-defined]
            except ValueError:  # memory ran short in another thread, and it was let go of
                return self._take(ids, reuse_generated)
        return self._model._native.session() if native is None else native, start, nearest

    def _put(self, native: Any) -> None:
        """Store a session as an entry, in place of those that it makes useless."""
        with self._lock:
            self._model.memory()  # a ValueError when the model was closed, which stored sessions would keep in memory
            entry = _Entry(Session(self._model, native))
            if len(entry) == 0 or self._held([entry]) > self._budget:
                entry.session.close()
                return
            for other in list(self._present()):
                if self._covered(other, entry):
                    self._entries.remove(other)
                    other.session.close()
            self._entries.append(entry)
            leaving = self._fit(0)
        self._let_go(leaving)

    def _newest(self) -> Session | None:
        with self._lock:
            present = self._present()
            return present[-1].session if present else None

    def _covered(self, old: _Entry, new: _Entry) -> bool:
        """Whether other entries serve what `old` does.

        Its end may be lost when little would have to be read again: an answer that was rendered anew does not come back. Of its
        other places the first must be elsewhere too (other conversations share the system text); the rest thin out as they age.
        """
        common = new.common(old.tokens)
        if (new.origins[:common] > old.origins[:common]).any():
            return False
        kept = {0, *new.serves(old)}
        for other in self._entries:
            if other is not old:
                kept.update(other.serves(old))
        end = len(old)
        return kept.issuperset(old.snapshots[:1]) and (common == end or end - max(kept) <= _SLACK)

    def _present(self) -> list[_Entry]:
        """The entries that the engine has not let go of."""
        for entry in [entry for entry in self._entries if entry.native.evicted]:
            self._entries.remove(entry)
            entry.session.close()
        return self._entries

    def _held(self, entries: list[_Entry]) -> int:
        return self._model._native.held_bytes([entry.native for entry in entries])

    def _needed(self, tokens: int) -> int:
        memory = self._model._native.memory()
        return tokens * memory["kv_bytes_per_token"] + 2 * memory["state_bytes"]

    def _fit(self, nbytes: int) -> list[_Entry]:
        """Take out, the least recently used first, what leaves no place for `nbytes` more."""
        entries, leaving = self._present(), []
        while entries and self._held(entries) + nbytes > self._budget:
            leaving.append(entries.pop(0))
        return leaving

    def _let_go(self, leaving: list[_Entry]) -> None:
        """Without the lock: writing takes its time."""
        disk = self._disk
        for entry in leaving:
            if disk is not None and not entry.native.evicted:
                disk.write(entry.native, entry)
            entry.session.close()


def _best(found: list[Any], ids: np.ndarray[Any, Any], reuse_generated: bool) -> tuple[Any, int, int | None]:
    """The prefix from which most is reused, where it goes on, and where the nearest one differs (None when none does)."""
    best, start, nearest, furthest = None, 0, None, -1
    for prefix in found:
        common = prefix.common(ids)
        place = prefix.usable(common if reuse_generated else min(common, prefix.read))
        if place > start:
            best, start = prefix, place
        if common > furthest:
            furthest, nearest = common, common if common < min(len(prefix), len(ids)) else None
    return best, start, nearest


def _checked(name: str, nbytes: int) -> int:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"{name} is {nbytes!r}, expected a number of bytes")
    if nbytes < 0:
        raise ValueError(f"{name} is {nbytes}, expected 0 or more bytes")
    return nbytes


def _default_budget(model: Model) -> int:
    memory = model._native.memory()
    limit = memory.get("limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, int((limit - memory["weights"]) * _SHARE))
