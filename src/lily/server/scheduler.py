"""One device, many requests: a thread that takes a step of each in turn.

Requests wait in order of arrival; one that memory has no place for yet lets a few smaller ones pass. Of those that run, each writes one token, then the next; a prompt is read one chunk at a
time, the prompts in turn, and while answers are being written reading takes at most half of the time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from lily.errors import CancelledError, OutOfMemoryError
from lily.server.errors import ApiError
from lily.stepping import Reading, Steps

_log = logging.getLogger("lily.server")

_GAP_SECONDS = 0.02
_MAY_PASS = 8  # smaller requests that begin before one that waits for memory
_BATCH_ITEMS = 64  # more would keep the event loop from its other work
_UNREAD_ITEMS = 1024  # a request whose client reads no faster rests here


class Job:
    """A request on the way through the scheduler, and the items that it has produced.

    The scheduler's thread fills it, the event loop that made it empties it with `batches`.
    """

    def __init__(self, steps: Callable[[], Steps], tokens: int) -> None:
        self.tokens = tokens  # of the prompt
        self.to_read = tokens  # of them, what has no memory yet
        self.passed = 0  # later requests that began before this one
        self.cancelled = False
        self.submitted = time.perf_counter()
        self.begun: float | None = None
        self.writing = False
        self._steps = steps
        self._running: Steps | None = None
        self._loop = asyncio.get_running_loop()
        self._items: deque[Any] = deque()
        self._ready = asyncio.Event()
        self._notified = False
        self.over = False
        self._error: BaseException | None = None

    async def batches(self, gap_seconds: float = _GAP_SECONDS) -> AsyncIterator[list[Any]]:
        """The items as they come, up to 64 at a time. Raises what the request raised.

        Two batches are `gap_seconds` apart at least: waking up and sending cost the same for one token and for several.
        """
        last = 0.0
        while True:
            if (left := last + gap_seconds - time.monotonic()) > 0 and not self.over:
                await asyncio.sleep(left)
            over = self.over  # before the items are looked at: none come after it was set
            batch = [self._items.popleft() for _ in range(min(len(self._items), _BATCH_ITEMS))]
            if batch:
                last = time.monotonic() if len(batch) < _BATCH_ITEMS else 0.0
                yield batch
            if over and not self._items:
                if self._error is not None:
                    raise self._error
                return
            if not self._items and not self.over:
                await self._ready.wait()
            self._ready.clear()
            self._notified = False

    # The scheduler's side.

    @property
    def unread(self) -> bool:
        """Whether so much waits for the client that more would only pile up."""
        return len(self._items) >= _UNREAD_ITEMS

    def advance(self) -> bool:
        """One step; False when the request is over."""
        if self._running is None:
            self.begun = time.perf_counter()
            self._running = self._steps()
        try:
            item = next(self._running)
        except StopIteration:
            self.end(None)
            return False
        except BaseException as error:
            self.end(error)
            return False
        self.to_read = item.total - item.done if isinstance(item, Reading) else 0
        self.writing = not self.to_read
        self._items.append(item)
        self._notify()
        return True

    def end(self, error: BaseException | None) -> None:
        """Stop the device for this request and keep what was read; `error` goes to whoever waits."""
        if self._running is not None:
            try:
                self._running.close()
            except Exception as closing:
                _log.error("a request did not close cleanly", exc_info=closing)
        self._running = None
        self._error, self.over = error, True
        self._notify()

    def _notify(self) -> None:
        if self._notified:
            return
        self._notified = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop has gone, and with it whoever waited
            self.cancelled = True


class Scheduler:
    """Runs jobs on one thread.

    `room(prompts)` raises `OutOfMemoryError` when a prompt does not fit now: `prompts` are its tokens, and what those that run
    have still to read.
    """

    def __init__(self, *, max_active: int, max_queue: int, room: Callable[[Sequence[int]], None] = lambda prompts: None) -> None:
        self._max_active, self._max_queue, self._room = max_active, max_queue, room
        self._wake = threading.Condition()
        self._queue: deque[Job] = deque()
        self._active: list[Job] = []
        self._draining: float | None = None  # the time at which what still runs is cancelled
        self._credit = 0.0  # seconds of writing that are due before the next chunk is read
        self._thread = threading.Thread(target=self._run, name="lily-device", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """Requests that are read or answered."""
        return len(self._active)

    @property
    def draining(self) -> bool:
        """Whether no new requests are taken."""
        return self._draining is not None

    def check(self) -> None:
        """Raises `ApiError` 429 or 503 when a request would not be taken."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})
        taken = len(self._queue) + len(self._active)
        if taken >= self._max_queue + self._max_active:
            what = f"{taken} requests are waiting or running, which is the limit; try again later"
            raise ApiError(429, what, code="queue_full", headers={"Retry-After": str(self._retry_after())})

    def submit(self, job: Job) -> None:
        """Queue a job. Raises as `check`."""
        with self._wake:
            self.check()
            self._queue.append(job)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """End a job before its next step. May be called at any time, more than once."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no new requests; cancel after `seconds` what is not finished. A second call may only shorten the time."""
        with self._wake:
            until = time.monotonic() + seconds
            self._draining = until if self._draining is None else min(until, self._draining)
            self._wake.notify()

    def close(self) -> None:
        """Cancel everything and end the thread."""
        self.drain(0)
        self._thread.join()

    def _retry_after(self) -> int:
        return max(1, min(60, len(self._queue) // max(1, self._max_active)))

    # On the thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._active and not self.draining:
                    self._wake.wait()
                if self.draining and not self._queue and not self._active:
                    return
                over = [*self._leave(), *self._admit()]
            for job, error in over:  # not under the lock, which the event loop takes: this may wait for the device
                job.end(error)
            if not self._round():
                with self._wake:
                    self._wake.wait(0.005)  # all that runs rests until its client has read

    def _leave(self) -> list[tuple[Job, BaseException]]:
        """Those that were cancelled, or all when the time to drain is over."""
        late = self._draining is not None and time.monotonic() >= self._draining
        over: list[tuple[Job, BaseException]] = []
        for job in [job for job in (*self._active, *self._queue) if late or job.cancelled]:
            (self._active if job in self._active else self._queue).remove(job)
            over.append((job, CancelledError("the request was cancelled" if job.cancelled else "the server is shutting down")))
        return over

    def _admit(self) -> list[tuple[Job, BaseException]]:
        """Take from the queue what has room; return what can never run."""
        over: list[tuple[Job, BaseException]] = []
        waiting: list[Job] = []  # for memory that those that run hold
        for job in list(self._queue):
            if len(self._active) >= self._max_active or any(other.passed >= _MAY_PASS for other in waiting):
                break
            if any(job.tokens >= other.tokens for other in waiting):
                continue
            try:
                self._room([job.tokens, *(other.to_read for other in self._active if other.to_read)])
            except OutOfMemoryError as error:
                if self._active:
                    waiting.append(job)
                    continue
                over.append((job, error))
            except Exception as error:
                over.append((job, error))
            else:
                self._active.append(job)
                for other in waiting:
                    other.passed += 1
            self._queue.remove(job)
        return over

    def _round(self) -> bool:
        """A token of each that writes, and a chunk of one that reads; False when there was nothing to do."""
        awake = [job for job in self._active if not job.cancelled and not job.unread]
        writing = [job for job in awake if job.writing]
        before = time.perf_counter()
        for job in writing:
            if not job.advance():
                self._active.remove(job)
        self._credit -= time.perf_counter() - before
        job = next((job for job in awake if not job.writing), None)
        if job is None or (writing and self._credit > 0):
            return bool(awake)
        before = time.perf_counter()
        more = job.advance()
        self._active.remove(job)
        if more:
            self._active.append(job)  # behind the others that read
        self._credit = time.perf_counter() - before
        return True
