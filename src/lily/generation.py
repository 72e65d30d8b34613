"""The loop from decode steps to chunks: end tokens, stop strings, masks, text and counts."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from lily.errors import SamplingError
from lily.progress import reporting
from lily.request import Request
from lily.results import Chunk, Generation, Timing, TokenLogprob, Usage
from lily.text import StopMatcher
from lily.tokenizer import Detokenizer

if TYPE_CHECKING:
    import numpy as np

    from lily.model import Model
    from lily.progress import Report


_BAR_TOKENS = 512  # prompts up to this length show no bar


class Run:
    """One request on one native session: reads the prompt, then yields a chunk for each token."""

    def __init__(self, model: Model, session: Any, ids: np.ndarray[Any, Any] | None, request: Request) -> None:
        self._model = model
        self._session = session
        self._ids = ids
        self.request = request
        self._text = Detokenizer(model.tokenizer)
        self._stops = StopMatcher(request.stop)
        self._tokens: list[int] = []
        self._first: float | None = None
        self._finished = False
        self._begun = time.perf_counter()
        self._reused = session.length
        self.read_tokens = 0  #: of the prompt, as far as it has been read

    def chunks(self, report: Report | None = None) -> Generator[Chunk, None, None]:
        """Closing the iterator stops the device; the session stays valid."""
        self._begun = time.perf_counter()
        self._reused = self._session.length
        try:
            self._read(report)
        finally:
            self.read_tokens = self._session.length - self._reused
        yield from self.answer()

    def answer(self) -> Generator[Chunk, None, None]:
        """The chunks behind a prompt that the session has read."""
        self._prompt = self._session.length
        self._read_until = time.perf_counter()
        limit = self._limit()
        if limit == 0:
            yield self._last("length")
            return
        decoder = self._session.start(self.request.native(), limit)
        try:
            yield from self._decode(decoder, limit)
        finally:
            decoder.close()

    def twin(self, session: Any, request: Request) -> Run:
        """Another answer to the prompt that this run has read, on a fork of its session."""
        run = type(self)(self._model, session, None, request)
        run._begun, run._reused = self._begun, self._reused
        return run

    def finish(self) -> None:
        """End the answer before its next token, as an end token would."""
        self._finished = True

    def _read(self, report: Report | None) -> None:
        if self._ids is None:
            return
        if report is not None:
            self._session.append(self._ids, report)
            return
        # As at loading; no bar for what is read in a blink.
        progress = self._model._progress
        with reporting(progress if callable(progress) or len(self._ids) > _BAR_TOKENS else None) as shown:
            self._session.append(self._ids, shown)

    def _limit(self) -> int:
        room = max(self._model.max_context - self._prompt, 0)
        return room if self.request.max_tokens is None else min(self.request.max_tokens, room)

    def _decode(self, decoder: Any, limit: int) -> Generator[Chunk, None, None]:
        ends = frozenset() if self.request.ignore_eos else self._model.end_tokens
        while True:
            if self._finished:
                yield self._last("stop")
                return
            step = decoder.next(self._mask())
            if step is None:
                yield self._last("length")
                return
            token, logprob, top_ids, top_logprobs = step
            if self._first is None:
                self._first = time.perf_counter()
            self._tokens.append(token)
            entry = TokenLogprob(token, logprob, tuple(zip(top_ids, top_logprobs, strict=True)))
            if token in ends:
                yield self._last("stop", entry)
                return
            text = self._stops.push(self._text.push(token))
            if self._stops.matched is not None:
                yield self._last("stop", entry, text)
                return
            if len(self._tokens) == limit:
                yield self._last("length", entry, text)
                return
            yield Chunk(text, [token], self._entries(entry))

    def _mask(self) -> np.ndarray[Any, Any] | None:
        if self.request.token_mask is None:
            return None
        import numpy as np

        mask = np.asarray(self.request.token_mask(list(self._tokens)))
        words = -(-self._model.config.vocab_size // 32)
        if mask.dtype != np.uint32 or mask.shape != (words,):
            raise ValueError(f"token_mask returned {mask.dtype} {list(mask.shape)}, expected uint32 [{words}]")
        mask = np.array(mask)  # a copy: the bits behind the vocabulary mean nothing, whoever set them
        if spare := -self._model.config.vocab_size % 32:
            mask[-1] &= np.uint32((1 << (32 - spare)) - 1)
        if not mask.any():
            raise SamplingError("token_mask allows no token at all", field="token_mask")
        return mask

    def _entries(self, entry: TokenLogprob | None) -> list[TokenLogprob] | None:
        if self.request.logprobs < 0:
            return None
        return [] if entry is None else [entry]

    def _last(self, reason: str, entry: TokenLogprob | None = None, text: str = "") -> Chunk:
        if self._stops.matched is None:
            text += self._stops.push(self._text.finish())
            text += self._stops.finish()
        now = time.perf_counter()
        count = len(self._tokens)
        usage = Usage(self._prompt, self._reused, count)
        timing = Timing(
            prefill_seconds=self._read_until - self._begun,
            decode_seconds=now - self._read_until if count else 0.0,
            first_token_seconds=None if self._first is None else self._first - self._begun,
            read_tokens=self._prompt - self._reused,
            generated_tokens=count,
        )
        return Chunk(text, [] if entry is None else [entry.token], self._entries(entry), reason, usage, timing, self._stops.matched)


def collect(chunks: Generator[Chunk, None, None], request: Request) -> Generation:
    """Run a stream to its end."""
    text: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    with closing(chunks):  # also when Ctrl-C lands here rather than inside the iterator
        for chunk in chunks:
            text.append(chunk.text)
            tokens += chunk.tokens
            logprobs += chunk.logprobs or []
    assert chunk.finish_reason is not None and chunk.usage is not None and chunk.timing is not None
    return Generation(
        text="".join(text),
        tokens=tokens,
        finish_reason=chunk.finish_reason,
        logprobs=None if request.logprobs < 0 else logprobs,
        usage=chunk.usage,
        timing=chunk.timing,
        sampling=request.sampling,
    )
