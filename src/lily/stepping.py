"""Requests as sequences of small steps, so that one thread can take turns between many of them.

Each step is a chunk of a prompt or a token of an answer; between two steps a request may rest or end. Results are those of
`chat` and `generate`, and prompts go through the store in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lily.chat import _Chat
from lily.errors import ContextOverflowError, OutOfMemoryError
from lily.generation import Run
from lily.results import Chunk, MessageDelta
from lily.store import Lease, SessionStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lily.model import Model
    from lily.prompts import Prompt
    from lily.request import Request

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """A prompt is being read: `done` of its `total` tokens, of which `reused` were there already."""

    done: int
    total: int
    reused: int


@dataclass(frozen=True)
class Piece:
    """What one step added to answer number `index`."""

    index: int
    delta: Any


Steps = Generator["Reading | Piece", None, None]


class ChatSteps:
    """A checked chat request; `prompt_tokens` are what its prompt has. The arguments are those of `Model.chat`, and `n` answers.

    >>> import lily
    >>> from lily.stepping import ChatSteps, Piece
    >>> request = ChatSteps(lily.Model.demo(), [{"role": "user", "content": "What is a young dog called?"}], {"thinking": False, "temperature": 0})
    >>> "".join(step.delta.content for step in request.steps() if isinstance(step, Piece))
    'A young dog is called a puppy.'
    """

    def __init__(self, model: Model, messages: Sequence[Any], options: Mapping[str, Any], n: int = 1) -> None:
        self._model = model
        self._n = n
        self._chat = _Chat(model, messages, options)
        self.prompt_ids = self._chat._rendering.ids
        self.prompt_text = self._chat._rendering.text
        self.prompt_tokens = len(self.prompt_ids)

    def check_length(self) -> None:
        """Raises `ContextOverflowError` when the context cannot hold the prompt."""
        _check_length(self._model, self.prompt_tokens)

    def steps(self) -> Steps:
        """Raises what `chat` raises. Closing the generator stops the device; what was read is kept."""
        self.check_length()
        chat = self._chat
        lease = self._model.sessions._lease(chat._rendering, reuse_generated=chat._reuse_generated)

        def answers(run: Run) -> Iterator[MessageDelta]:
            return chat.split(run.answer(), run, lease.reuse)

        yield from _steps(self._model, lease, [chat._request, *(chat.request(i) for i in range(1, self._n))], answers)


class TextSteps:
    """A checked request to continue a prompt, as `Model.generate` takes it, with `n` answers."""

    def __init__(self, model: Model, prompt: Prompt, options: Mapping[str, Any], n: int = 1) -> None:
        self._model = model
        self._ids = model._ids(prompt)
        self._request = model._request(options)
        self._n = n
        self.prompt_ids = self._ids.tolist()
        self.prompt_tokens = len(self._ids)

    def check_length(self) -> None:
        """Raises `ContextOverflowError` when the context cannot hold the prompt."""
        _check_length(self._model, self.prompt_tokens)

    def steps(self) -> Steps:
        """Raises what `generate` raises. Closing the generator stops the device; what was read is kept."""
        self.check_length()
        lease = self._model.sessions._lease(_Plain(self.prompt_ids))  # type: ignore[arg-type]
        requests = [self._request.with_seed_of(i) for i in range(self._n)]
        yield from _steps(self._model, lease, requests, lambda run: run.answer())


class _Plain:
    """A prompt without turns, as the store takes it."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def marks(self) -> list[int]:
        return []

    def message_at(self, token: int) -> int | None:
        return None


def _check_length(model: Model, tokens: int) -> None:
    if tokens > model.max_context:
        what = f"the prompt has {tokens} tokens, but the context holds {model.max_context}; shorten it"
        raise ContextOverflowError(what, tokens=tokens, limit=model.max_context)


def _steps(model: Model, lease: Lease, requests: list[Request], answers: Callable[[Run], Iterator[Chunk | MessageDelta]]) -> Steps:
    """Read the prompt once, then the answers in turn, each on its own fork; the first one's session is kept."""
    with ExitStack() as stack:
        stack.callback(lease.keep)
        first = Run(model, lease.native, None, requests[0])
        yield from _read(model, lease)
        open_answers: deque[tuple[int, Iterator[Any]]] = deque()
        for index, request in enumerate(requests):
            run = first
            if index:
                native = lease.native.fork()
                stack.callback(native.close)
                run = first.twin(native, request)
            answer = answers(run)
            stack.enter_context(closing(answer))  # type: ignore[type-var]
            open_answers.append((index, answer))
        while open_answers:
            index, answer = open_answers.popleft()
            delta = next(answer, None)
            if delta is not None:
                open_answers.append((index, answer))
                yield Piece(index, delta)


def _read(model: Model, lease: Lease) -> Iterator[Reading]:
    """Read the rest of the prompt up to one border of the engine's chunks after the other."""
    ids, native, reused = lease._ids, lease.native, lease.reuse.reused
    total, chunk = len(ids), model._native.chunk
    yield Reading(reused, total, reused)
    marks = lease._rendering.marks() if reused < total else []
    while (done := native.length) < total:
        end = min(done + chunk - done % chunk, total)
        inside = [mark - done for mark in marks if done < mark <= end]
        keep_end = end == total or (bool(inside) and inside[-1] == end - done)
        try:
            native.append(ids[done:end], None, [mark for mark in inside if mark < end - done], keep_end)
        except OutOfMemoryError:
            if not _give_one_up(model.sessions):
                raise
            continue
        yield Reading(end, total, reused)


def _give_one_up(sessions: SessionStore) -> bool:
    """Let the store drop what it used least recently; False when it holds nothing."""
    if not len(sessions):
        return False
    budget = sessions.budget
    sessions.budget = max(0, sessions.nbytes - 1)
    sessions.budget = budget
    return True
