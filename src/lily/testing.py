"""Test hooks: faults, schedules, traces and states of a real model, and a model whose tokens come from a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lily._engine import native
from lily.config import ModelConfig
from lily.errors import ContextOverflowError, GPUError
from lily.model import DEMO, Model
from lily.results import Memory
from lily.session import Session
from lily.template import ChatTemplate
from lily.tokenizer import Tokenizer

if TYPE_CHECKING:
    Script = str | int | Sequence[str | int] | Callable[[Sequence[int]], np.ndarray[Any, Any]]

_READ, _GENERATED = 0, 1


def fail_at(model: Model, step: int, stage: int) -> None:
    """Make a submission fail in the given stage with a `GPUError`: `step` 0 is the next one. A decode step is two submissions, forward and sample."""
    engine = model._native
    if isinstance(engine, ScriptedEngine):
        engine.fail_step = step
    else:
        native().testing.fail_at(engine, step, stage)


def set_schedule(model: Model, schedule: str) -> None:
    """How programs are replayed: "stages", "stages:drop:N", "serial", "shuffle:SEED", or "shuffle:SEED:drop:N"
    (without the barrier after stage N)."""
    native().testing.set_schedule(model._native, schedule)


def trace(model: Model, ids: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """float32 outputs of every part of the model for these ids, by the fixtures' names, from the unfused plan."""
    return native().testing.trace(model._native, model._ids(ids))


def state(session: Session) -> dict[str, np.ndarray[Any, Any]]:
    """The session's recurrent states, convolution rows, keys and values, by the fixtures' names."""
    return native().testing.state(session._native)


def scripted(
    script: Script,
    *,
    max_context: int = 4096,
    repeat: bool = False,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Model:
    """A `Model` without weights whose likeliest tokens are those of `script`; the tokenizer is the shipped model's.

    `script` is text, ids, a list of both, or a function from the session's tokens to logits `[vocab]`. After its end
    come end tokens, or with `repeat` the script again. Penalties, bias, mask, temperature and seed act on its logits.

    >>> from lily.testing import scripted
    >>> answer = scripted("It was red.").generate("What colour?")
    >>> str(answer), answer.finish_reason
    ('It was red.', 'stop')
    """
    config = ModelConfig.from_file(DEMO)
    tokenizer = tokenizer or Tokenizer.from_directory(DEMO)
    if not callable(script):
        parts = [script] if isinstance(script, (str, int)) else script
        ids = [i for part in parts for i in (tokenizer.encode(part) if isinstance(part, str) else [int(part)])]
        script = _from_ids(ids, config.vocab_size, repeat, min(tokenizer.end_tokens()))
    engine = ScriptedEngine(script, config.vocab_size, max_context)
    return Model._from_native(
        engine,
        config=config,
        tokenizer=tokenizer,
        template=ChatTemplate.from_directory(DEMO),
        generation_config=generation_config,
        source="scripted",
    )


def _from_ids(ids: list[int], vocab: int, repeat: bool, end: int) -> Callable[..., np.ndarray[Any, Any]]:
    def logits(generated: Sequence[int]) -> np.ndarray[Any, Any]:
        at = len(generated)
        if repeat and ids:
            at %= len(ids)
        row = np.zeros(vocab, np.float32)
        row[ids[at] if at < len(ids) else end] = 10.0
        return row

    logits.counts_generated = True  # type: ignore[attr-defined]
    return logits


class ScriptedEngine:
    """The engine's model interface, answered from a function of tokens to logits."""

    def __init__(self, logits: Callable[..., np.ndarray[Any, Any]], vocab: int, max_context: int) -> None:
        self.logits, self.vocab, self.max_context = logits, vocab, max_context
        self.chunk = 64
        self.in_flight = 0
        self.fail_step: int | None = None
        self.closed = False
        self.device = {"name": "scripted", "kind": "scripted", "threads": 1}

    def session(self) -> ScriptedSession:
        if self.closed:
            raise ValueError("model is closed")
        return ScriptedSession(self)

    def memory(self) -> dict[str, int]:
        if self.closed:
            raise ValueError("model is closed")
        return dict.fromkeys(Memory.__dataclass_fields__, 0)

    def held_bytes(self, sessions: Sequence[ScriptedSession]) -> int:
        return sum(session.nbytes for session in sessions)

    def trim(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class ScriptedSession:
    """The engine's session interface."""

    def __init__(self, engine: ScriptedEngine, tokens: Sequence[int] = (), origins: Sequence[int] = ()) -> None:
        self.engine = engine
        self._tokens, self._origins = list(tokens), list(origins)
        self._request_start = len(self._tokens)
        self.snapshots: list[int] = []
        self.busy = False
        self.evicted = False

    def append(self, ids: np.ndarray[Any, Any], progress: Any = None, marks: Sequence[int] = (), keep_end: bool = True) -> None:
        self._ready()
        before = len(self._tokens)
        total = len(self._tokens) + len(ids)
        if total > self.engine.max_context:
            limit = self.engine.max_context
            raise ContextOverflowError(f"{total} tokens do not fit {limit}", tokens=total, limit=limit)
        for start in range(0, len(ids), self.engine.chunk):
            piece = ids[start : start + self.engine.chunk].tolist()
            self._tokens += piece
            self._origins += [_READ] * len(piece)
            self.snapshots += [before + mark for mark in marks if start < mark <= start + len(piece)]
            if progress is not None:
                progress("prefill", start + len(piece), len(ids))
        self._request_start = len(self._tokens)
        if keep_end:
            self.snapshots.append(self._request_start)

    def rewind(self, n: int, progress: Any = None) -> tuple[int, int]:
        self._ready()
        kept = max((at for at in self.snapshots if at <= n), default=0)
        del self._tokens[n:], self._origins[n:]
        self.snapshots = [at for at in self.snapshots if at <= n]
        return kept, n - kept

    def append_rows(self, ids: np.ndarray[Any, Any], mode: str, progress: Any = None) -> np.ndarray[Any, Any]:
        rows = []
        for token in ids.tolist():
            self.append(np.array([token], np.int32), progress)
            rows.append(self.logits())
        logits = np.stack(rows)
        if mode == "logits":
            return logits
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return np.append(logprobs[np.arange(len(ids) - 1), ids[1:]], 0).astype(np.float32)

    def logits(self) -> np.ndarray[Any, Any]:
        if not self._tokens:
            raise ValueError("the session is empty")
        counted = getattr(self.engine.logits, "counts_generated", False)
        return self.engine.logits(self._tokens[self._request_start :] if counted else self._tokens)

    def start(self, sampling: Mapping[str, Any], max_tokens: int) -> ScriptedDecoder:
        self._ready()
        self.busy = True
        self._request_start = len(self._tokens)
        return ScriptedDecoder(self, sampling, max_tokens)

    def fork(self) -> ScriptedSession:
        other = ScriptedSession(self.engine, self._tokens, self._origins)
        other.snapshots = list(self.snapshots)
        return other

    def keep(self) -> None:
        pass

    def close(self) -> None:
        self._tokens.clear()
        self._origins.clear()

    def _ready(self) -> None:
        if self.engine.closed:
            raise ValueError("model is closed")
        if self.busy:
            raise ValueError("session is busy")

    @property
    def tokens(self) -> np.ndarray[Any, Any]:
        return np.array(self._tokens, np.int32)

    @property
    def origins(self) -> np.ndarray[Any, Any]:
        return np.array(self._origins, np.uint8)

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def pending(self) -> bool:
        return bool(self._origins) and self._origins[-1] == _GENERATED

    @property
    def nbytes(self) -> int:
        return 4 * len(self._tokens)


class ScriptedDecoder:
    """The engine's decoder interface: the same filters in the same order, on the scripted logits."""

    def __init__(self, session: ScriptedSession, sampling: Mapping[str, Any], max_tokens: int) -> None:
        self.session, self.sampling, self.left = session, sampling, max_tokens
        self.limit: str | None = None
        session.engine.in_flight += 1

    def next(self, mask: np.ndarray[Any, Any] | None = None) -> tuple[int, float, list[int], list[float]] | None:
        session, engine = self.session, self.session.engine
        if self.left == 0 or session.length >= engine.max_context:
            self.limit = "max_tokens" if self.left == 0 else "context"
            return None
        if engine.fail_step is not None:
            engine.fail_step -= 1
            if engine.fail_step < 0:
                engine.fail_step = None
                raise GPUError("the step failed as asked", stage="decode")
        if self.sampling["masked"] and mask is None:
            raise ValueError("a masked request needs a mask for each token")
        logits = self._adjusted(session.logits().astype(np.float64), mask)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        token = self._choose(logits)
        self.left -= 1
        session._tokens.append(token)
        session._origins.append(_GENERATED)
        count = self.sampling["logprobs"]
        top = np.argsort(-logprobs, kind="stable")[:count].tolist() if count > 0 else []
        return token, float(logprobs[token]), top, [float(logprobs[i]) for i in top]

    def close(self) -> None:
        if self.session.busy:
            self.session.busy = False
            self.session.engine.in_flight -= 1

    def _adjusted(self, logits: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        session, settings = self.session, self.sampling
        for token in set(session._tokens):
            factor = settings["repetition_penalty"]
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        output = session._tokens[session._request_start :]
        for token in set(output):
            logits[token] -= settings["presence_penalty"] + settings["frequency_penalty"] * output.count(token)
        for token, bias in settings["logit_bias"].items():
            logits[token] += bias
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
            logits[allowed == 0] = -np.inf
        return logits

    def _choose(self, logits: np.ndarray[Any, Any]) -> int:
        settings = self.sampling
        if settings["temperature"] == 0:
            return int(logits.argmax())
        scaled = logits / settings["temperature"]
        p = np.exp(scaled - scaled.max())
        order = np.argsort(-p, kind="stable")
        if settings["top_k"]:
            p[order[settings["top_k"] :]] = 0
        p /= p.sum()
        p[order[np.searchsorted(np.cumsum(p[order]), settings["top_p"]) + 1 :]] = 0
        p[p < settings["min_p"] * p.max()] = 0
        key = np.random.Philox(key=settings["seed"], counter=self.session.length)
        draw = np.random.Generator(key).random() * p.sum()
        return int(np.searchsorted(np.cumsum(p), draw, side="right"))
