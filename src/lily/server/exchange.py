"""From a checked request to its HTTP answer, streamed or whole; every endpoint goes this way."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from lily.errors import OutOfMemoryError
from lily.model import Model
from lily.results import Memory
from lily.server.errors import ApiError, api_error, request_error
from lily.server.metrics import Metrics
from lily.server.naming import Names
from lily.server.scheduler import Job, Scheduler
from lily.server.settings import Settings
from lily.stepping import Piece, Reading, Steps

_log = logging.getLogger("lily.server")
_UNREAD_SECONDS = 120.0  # a client that takes nothing for so long has gone
encode = msgspec.json.Encoder().encode


class Prepared(Protocol):
    """What `ChatSteps` and `TextSteps` are."""

    prompt_tokens: int

    def check_length(self) -> None: ...
    def steps(self) -> Steps: ...


class Reply(Protocol):
    """One answer in the form of an endpoint. `add` takes every step; what the others return are whole events."""

    def opening(self) -> bytes: ...
    def add(self, step: Reading | Piece) -> bytes: ...
    def closing(self) -> bytes: ...
    def failure(self, error: ApiError) -> bytes: ...
    def whole(self) -> dict[str, Any]: ...


T = TypeVar("T")
P = TypeVar("P", bound=Prepared)


class Server:
    """What the endpoints share: the model, its names, the scheduler and the counts."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.names = Names(model.source, settings.aliases, any_model=settings.any_model)
        self.scheduler = Scheduler(max_active=settings.max_active, max_queue=settings.max_queue, room=self._room)
        self.metrics = Metrics(self._state, model.memory)
        self.created = int(time.time())

    def show_prompt(self, text: str) -> None:
        """Log a prompt, if that was asked for."""
        if self.settings.log_prompts:
            _log.info("prompt: %s", text)

    def _state(self) -> dict[str, float]:
        scheduler, sessions = self.scheduler, self.model.sessions
        return {
            "queued_requests": scheduler.queued, "active_requests": scheduler.active,
            "stored_sessions": len(sessions), "stored_session_bytes": sessions.nbytes,
        }  # fmt: skip

    def check_room(self, tokens: int) -> None:
        """Raises `OutOfMemoryError` when a prompt would not fit if nothing else ran and every stored session were dropped."""
        memory = self.model.memory()
        if memory.limit:
            held = memory.kv + memory.states + memory.snapshots + memory.requests
            _fits([tokens], memory, memory.limit - memory.total + held)

    def _room(self, prompts: Sequence[int]) -> None:
        """Whether the first prompt fits beside what runs and what of the others is still to be read, without stored sessions."""
        memory = self.model.memory()
        if memory.limit:
            _fits(prompts, memory, memory.limit - memory.total + self.model.sessions.nbytes)


def _fits(prompts: Sequence[int], memory: Memory, available: int) -> None:
    needed = sum(prompts) * memory.kv_bytes_per_token + 2 * memory.state_bytes * len(prompts)
    if needed > available:
        what = f"a prompt of {prompts[0]} tokens needs {needed} bytes, {max(available, 0)} are available"
        raise OutOfMemoryError(what, needed=needed, available=max(available, 0), hint="shorten it, or raise the memory limit")


def new_id(kind: str) -> str:
    """An id such as `chatcmpl-...`."""
    return f"{kind}{secrets.token_hex(12)}"


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, by the encoder of the streams."""
    return Response(encode(value), status, headers, "application/json")


async def in_thread(make: Callable[[], T]) -> T:
    """Render and tokenise in a thread, the event loop stays free. Raises `ApiError`."""
    try:
        return await asyncio.to_thread(make)
    except Exception as error:
        raise request_error(error) from error


async def prepare(server: Server, make: Callable[[], P]) -> P:
    """A request that may run: the server has place for it, and the context and the memory for its prompt. Raises `ApiError`."""
    server.scheduler.check()

    def checked() -> P:
        prepared = make()
        prepared.check_length()
        server.check_room(prepared.prompt_tokens)
        return prepared

    return await in_thread(checked)


async def exchange(request: Request, prepared: Prepared, reply: Reply, *, stream: bool) -> Response:
    """Run a prepared request. Raises `ApiError` while no byte is sent; later failures are events of the stream."""
    server: Server = request.app.state.server
    job = Job(prepared.steps, prepared.prompt_tokens)
    server.scheduler.submit(job)
    if stream:
        return EventSourceResponse(
            _events(server, job, reply), sep="\n", ping=server.settings.keep_alive_seconds, ping_message_factory=_keep_alive,
            send_timeout=_UNREAD_SECONDS,
        )  # fmt: skip
    return await _whole(request, server, job, reply)


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")


async def _events(server: Server, job: Job, reply: Reply) -> AsyncIterator[bytes]:
    counted = _Counted(server, job)
    try:
        yield reply.opening()
        try:
            async for steps in job.batches():
                counted.add(steps)
                events = b"".join(map(reply.add, steps))
                if events:
                    yield events
            yield reply.closing()
        except Exception as error:
            yield reply.failure(counted.failure(error))
    finally:
        counted.leave()


async def _whole(request: Request, server: Server, job: Job, reply: Reply) -> Response:
    counted = _Counted(server, job)

    async def collect() -> None:
        async for steps in job.batches():
            counted.add(steps)
            for step in steps:
                reply.add(step)

    work, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody reads it
        await work
        return json_response(reply.whole())
    except Exception as error:
        raise counted.failure(error) from error
    finally:
        counted.leave()
        for task in (work, gone):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Counted:
    """A request in the metrics, the log and the scheduler, from its first step to its last."""

    def __init__(self, server: Server, job: Job) -> None:
        self._server, self._job = server, job
        self._answers = 0
        self._tokens = 0
        self._waited: float | None = None
        self._failed = False

    def add(self, steps: list[Reading | Piece]) -> None:
        metrics = self._server.metrics
        if self._waited is None and self._job.begun is not None:
            self._waited = self._job.begun - self._job.submitted
            metrics.begun(self._waited)
        for step in steps:
            if isinstance(step, Piece) and step.delta.finish_reason is not None:
                usage, timing = step.delta.usage, step.delta.timing
                if not self._answers:
                    metrics.prompt(usage)
                self._answers += 1
                self._tokens += usage.generated_tokens
                metrics.answer(usage, timing, self._waited or 0.0)
                _log.info(
                    "read %d of %d tokens, wrote %d (%s), waited %.3f s, first token after %.3f s, %.1f tokens/s",
                    usage.prompt_tokens - usage.reused_tokens, usage.prompt_tokens, usage.generated_tokens, step.delta.finish_reason,
                    self._waited or 0.0, timing.first_token_seconds or 0.0, timing.decode_tokens_per_second,
                )  # fmt: skip

    def failure(self, error: Exception) -> ApiError:
        self._failed = True
        found = api_error(error)
        self._server.metrics.failed.labels(found.code or "error").inc()
        return found

    def leave(self) -> None:
        """Whatever happened, the request costs nothing from here on."""
        if not self._job.over and not self._failed:
            self._server.metrics.cancelled.inc()
            _log.info("the client went away")
        self._server.scheduler.cancel(self._job)
