"""Runs arms against each other in one run, in alternating order, and keeps only what can be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lily.bench import limits as limits_module
from lily.bench.arms import Arm, Outcome, Setting, run
from lily.bench.limits import FLOAT_KINDS, Limit
from lily.bench.measure import ROUNDS, BenchError, Sample, Shape, Spread, check_digests, check_possible, order
from lily.bench.work import Work, work_of

Runner = Callable[[Arm, Sequence[Shape], Setting], Outcome]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ceilings:
    """Rates that nothing on this machine can pass, measured before and after the arms."""

    limits: list[Limit]

    @property
    def read(self) -> float:
        """Bytes a second from a working set as large as the model: what a decode step is compared with."""
        reads = [limit for limit in self.limits if limit.kind == "read"]
        return max(reads, key=lambda limit: limit.nbytes).best

    @property
    def reread_ceiling(self) -> float:
        """Bytes a second from one step's working set, caches included: no decode step can be faster."""
        return max(limit.ceiling for limit in self.limits if limit.kind == "read")

    @property
    def matrix(self) -> float:
        """Operations a second on floats."""
        return max(limit.best for limit in self.limits if limit.kind in FLOAT_KINDS)

    def matrix_ceiling(self, engine: str) -> float:
        """Operations a second that an engine cannot pass; llama.cpp rounds activations to 8 bits, so for it those of any kind."""
        arithmetic = [limit for limit in self.limits if limit.kind not in ("read", "lookup")]
        return max(limit.ceiling for limit in arithmetic if engine == "llama.cpp" or limit.kind in FLOAT_KINDS)


@dataclass(frozen=True)
class Row:
    """One arm at one shape. Shares are of what the machine was measured at, None where that is unknown."""

    arm: str
    shape: Shape
    prefill: Spread
    decode: Spread
    decode_bytes: float  # a second
    prefill_share: float | None
    decode_share: float | None


@dataclass(frozen=True)
class Ratio:
    """The first arm's rate over a peer's, from the same rounds. `arm` is the peer's fastest mode."""

    peer: str
    arm: str
    shape: Shape
    what: str
    spread: Spread


@dataclass
class Bench:
    """The outcome of a run."""

    model: str
    shapes: list[Shape]
    rounds: int
    threads: int
    arms: list[str]
    samples: list[list[Sample]]  # by round, in the order in which they ran
    about: dict[str, dict[str, Any]]
    works: dict[str, Work]
    ceilings: Ceilings | None
    machine: dict[str, Any]
    pilot: list[Sample] = field(default_factory=list)

    def of(self, arm: str, shape: Shape) -> list[Sample]:
        """An arm's samples at a shape, one for each round."""
        return [sample for turn in self.samples for sample in turn if sample.arm == arm and sample.shape == shape]

    def rows(self) -> list[Row]:
        """One for each shape and arm."""
        return [self._row(arm, shape) for shape in self.shapes for arm in self.arms]

    def _row(self, arm: str, shape: Shape) -> Row:
        found, work = self.of(arm, shape), self.works[_engine(arm)]
        prefill, decode = Spread.of(s.prefill_rate for s in found), Spread.of(s.decode_rate for s in found)
        moved = decode.median * work.decode_bytes(shape)
        shares: list[float | None] = [None, None]
        if self.ceilings is not None:
            limit = work.prefill_limit(shape.prompt, self.ceilings.read, self.ceilings.matrix)
            shares = [prefill.median / limit, moved / self.ceilings.read]
        return Row(arm, shape, prefill, decode, moved, *shares)

    def ratios(self) -> list[Ratio]:
        """The first arm over each peer, each quantity against the peer's best mode."""
        first = self.arms[0]
        peers: dict[str, list[str]] = {}
        for arm in self.arms[1:]:
            peers.setdefault(_engine(arm) if _engine(arm) != _engine(first) else arm, []).append(arm)
        return [
            self._ratio(first, peer, modes, shape, what)
            for shape in self.shapes for peer, modes in peers.items() for what in ("prefill", "decode")
        ]  # fmt: skip

    def _ratio(self, first: str, peer: str, modes: list[str], shape: Shape, what: str) -> Ratio:
        def rates(arm: str) -> list[float]:
            return [getattr(sample, f"{what}_rate") for sample in self.of(arm, shape)]

        best = max(modes, key=lambda arm: median(rates(arm)))
        return Ratio(peer, best, shape, what, Spread.of(a / b for a, b in zip(rates(first), rates(best), strict=True)))

    def check(self) -> None:
        """Raise `BenchError` for ids that do not repeat and rates that cannot be."""
        every = [*self.pilot, *(sample for turn in self.samples for sample in turn)]
        check_digests(every)
        if self.ceilings is None:
            return
        for sample in every:
            engine = _engine(sample.arm)
            work, where = self.works[engine], f"{sample.arm} at {sample.shape.prompt} tokens"
            check_possible(f"{where}, decode", sample.decode_rate * work.decode_bytes(sample.shape), self.ceilings.reread_ceiling)
            operations = work.prefill_operations(sample.shape.prompt) / sample.prefill_seconds
            check_possible(f"{where}, prefill", operations, self.ceilings.matrix_ceiling(engine), "operations")


def _engine(arm: str) -> str:
    return arm.partition(":")[0].partition("@")[0]


def measure(
    arms: Sequence[Arm],
    shapes: Sequence[Shape],
    setting: Setting,
    *,
    rounds: int = ROUNDS,
    runner: Runner = run,
    say: Say = lambda line: None,
) -> Bench:
    """Run every arm once a round at all shapes. Raises `BenchError`, `ValueError` for fewer than five rounds."""
    if rounds < ROUNDS:
        raise ValueError(f"rounds is {rounds}, expected at least {ROUNDS}")
    if len({str(arm) for arm in arms}) != len(arms) or not arms:
        raise ValueError("expected at least one arm, each once")
    works = {engine: work_of(setting.model, gguf=engine == "llama.cpp") for engine in {arm.engine for arm in arms}}
    before = None if setting.gpu else _ceilings(works.values(), setting, say)
    about: dict[str, dict[str, Any]] = {}

    def once(arm: Arm, label: str) -> list[Sample]:
        outcome = runner(arm, shapes, setting)
        about[str(arm)] = outcome.about
        for sample in outcome.samples:
            say(
                f"{label} {arm}, {sample.shape.prompt} tokens: {sample.prefill_rate:,.1f} read, {sample.decode_rate:,.1f} generated a second"
            )
        return outcome.samples

    chosen, pilot = _choose(arms, setting, once)
    samples = [[s for arm in order(chosen, turn) for s in once(arm, f"round {turn + 1}/{rounds}:")] for turn in range(rounds)]
    ceilings = before
    if before is not None:
        after = _ceilings(works.values(), setting, say)
        ceilings = Ceilings([one.merged(other) for one, other in zip(before.limits, after.limits, strict=True)])
    machine = limits_module.machine()
    bench = Bench(
        str(setting.model),
        list(shapes),
        rounds,
        setting.threads,
        [str(arm) for arm in chosen],
        samples,
        about,
        works,
        ceilings,
        machine,
        pilot,
    )
    bench.check()
    return bench


def _ceilings(works: Iterable[Work], setting: Setting, say: Say) -> Ceilings:
    say("measuring this machine's limits")
    largest = max(works, key=lambda work: work.step_bytes)
    return Ceilings(limits_module.measure_all(working_sets=(largest.step_bytes, largest.weight_bytes), threads=setting.threads))


def _choose(arms: Sequence[Arm], setting: Setting, once: Callable[[Arm, str], list[Sample]]) -> tuple[list[Arm], list[Sample]]:
    """Closed arms as they are; of an open one the modes that are fastest at something, found by one run of each."""
    chosen: list[Arm] = []
    pilot: list[Sample] = []
    for arm in arms:
        modes = [mode for mode in arm.modes() if mode.kind is None or arm.kind is not None or setting.gguf(mode.kind).is_file()]
        if not modes:
            raise BenchError(f"{arm}: there is no GGUF file in {setting.model / 'gguf'}; `lily bench synthetic` writes it")
        if len(modes) == 1:
            chosen += modes
            continue
        tried = {mode: once(mode, "trial:") for mode in modes}
        pilot += [sample for found in tried.values() for sample in found]
        chosen += [mode for mode in modes if mode in _winners(tried)]
    return chosen, pilot


def _winners(tried: dict[Arm, list[Sample]]) -> set[Arm]:
    count = len(next(iter(tried.values())))
    return {
        max(tried, key=lambda mode: getattr(tried[mode][i], what))
        for i in range(count) for what in ("prefill_rate", "decode_rate")
    }  # fmt: skip
