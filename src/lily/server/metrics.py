"""Counts and times for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from lily.results import Memory, Timing, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_RATES = (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 1000)


class Metrics:
    """One server's. `state()` gives the gauges by name, `memory()` the bytes by kind."""

    def __init__(self, state: Callable[[], dict[str, float]], memory: Callable[[], Memory]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("lily_requests", "Requests by endpoint and HTTP status", ["endpoint", "status"], registry=registry)
        self.cancelled = Counter("lily_cancelled_requests", "Requests whose client went away", registry=registry)
        self.failed = Counter("lily_failed_answers", "Answers that ended with an error", ["code"], registry=registry)
        self._prompt = Counter("lily_prompt_tokens", "Tokens of prompts", registry=registry)
        self._reused = Counter("lily_reused_tokens", "Tokens of prompts that were not read again", registry=registry)
        self._generated = Counter("lily_generated_tokens", "Tokens of answers, thoughts included", registry=registry)
        self._thoughts = Counter("lily_reasoning_tokens", "Tokens of thoughts", registry=registry)
        self._first = Histogram("lily_time_to_first_token_seconds", "From arrival to the first token", buckets=_SECONDS, registry=registry)
        self._waited = Histogram("lily_queue_seconds", "Time in the queue", buckets=_SECONDS, registry=registry)
        self._rate = Histogram("lily_decode_tokens_per_second", "Of one answer", buckets=_RATES, registry=registry)
        registry.register(_Gauges(state, memory))  # type: ignore[arg-type]

    def begun(self, waited_seconds: float) -> None:
        """A request left the queue."""
        self._waited.observe(waited_seconds)

    def prompt(self, usage: Usage) -> None:
        """A prompt was read."""
        self._prompt.inc(usage.prompt_tokens)
        self._reused.inc(usage.reused_tokens)

    def answer(self, usage: Usage, timing: Timing, waited_seconds: float) -> None:
        """An answer is complete."""
        self._generated.inc(usage.generated_tokens)
        self._thoughts.inc(usage.reasoning_tokens)
        if timing.first_token_seconds is not None:
            self._first.observe(waited_seconds + timing.first_token_seconds)
        if timing.decode_tokens_per_second > 0:
            self._rate.observe(timing.decode_tokens_per_second)

    def page(self) -> bytes:
        """Everything in Prometheus' text form."""
        return generate_latest(self._registry)


class _Gauges:
    """Values that are read when somebody looks."""

    def __init__(self, state: Callable[[], dict[str, float]], memory: Callable[[], Memory]) -> None:
        self._state, self._memory = state, memory

    def collect(self) -> Iterator[Any]:
        for name, value in self._state().items():
            yield GaugeMetricFamily(f"lily_{name}", name.replace("_", " "), value=value)
        memory = self._memory()
        kinds = GaugeMetricFamily("lily_memory_bytes", "Bytes held, by kind", labels=["kind"])
        for kind in ("weights", "kv", "states", "snapshots", "workspace", "requests"):
            kinds.add_metric([kind], getattr(memory, kind) or 0)
        yield kinds
        if memory.limit:
            yield GaugeMetricFamily("lily_memory_limit_bytes", "The memory limit", value=memory.limit)

    def describe(self) -> Iterable[Any]:
        return []
