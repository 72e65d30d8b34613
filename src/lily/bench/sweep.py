"""The published sweep: prefill and decode at ten prompt lengths, against a peer that runs the same numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from lily.bench import harness, report
from lily.bench.arms import Arm, Setting
from lily.bench.harness import Bench, Runner, Say
from lily.bench.measure import ROUNDS, Shape

LENGTHS = tuple(256 << i for i in range(10))  # 256 to 128K
# The next length is at least twice as long, and its attention costs more than twice as much.
_GROWTH = 1.2


@dataclass
class Sweep:
    """A run at the lengths that fitted the budget; `left_out` are the others."""

    bench: Bench
    left_out: list[int]
    seconds: float

    def mean_ratios(self) -> dict[str, dict[str, float]]:
        """For each peer the mean over the lengths of the median ratio, of prefill and of decode."""
        found: dict[str, dict[str, list[float]]] = {}
        for ratio in self.bench.ratios():
            found.setdefault(ratio.peer, {}).setdefault(ratio.what, []).append(ratio.spread.median)
        return {peer: {what: mean(values) for what, values in by.items()} for peer, by in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return report.to_dict(self.bench) | {"left_out": self.left_out, "seconds": self.seconds, "mean_ratios": self.mean_ratios()}

    def to_markdown(self) -> str:
        """The tables of the run, the mean ratios, and what did not fit."""
        lines = [report.to_markdown(self.bench)]
        for peer, by in self.mean_ratios().items():
            lines.append(
                f"Mean ratio to {peer} over {len(self.bench.shapes)} lengths: prefill {by['prefill']:.3g}, decode {by['decode']:.3g}."
            )
        if self.left_out:
            lines.append(f"Not run, they did not fit the budget or the context: {', '.join(map(str, self.left_out))}.")
        return "\n".join(lines) + "\n"


def sweep(
    arms: Sequence[Arm],
    setting: Setting,
    *,
    budget: float,
    lengths: Sequence[int] = LENGTHS,
    steps: int = 64,
    rounds: int = ROUNDS,
    max_context: int | None = None,
    runner: Runner = harness.run,
    say: Say = lambda line: None,
) -> Sweep:
    """Measure length after length while the next one is expected to fit into `budget` seconds; the first always runs.

    Raises `BenchError`, and `ValueError` when no length fits the model's context.
    """
    begin = time.monotonic()
    fitting = [n for n in sorted(lengths) if max_context is None or n + steps + 1 <= max_context]
    if not fitting:
        raise ValueError(f"no length of {list(lengths)} fits a context of {max_context} tokens")
    parts: list[Bench] = []
    took = 0.0
    for i, length in enumerate(fitting):
        expected = took * length / fitting[i - 1] * _GROWTH if i else 0.0
        if i and time.monotonic() - begin + expected > budget:
            break
        # What was open is chosen at the first length and kept.
        chosen = [Arm.parse(arm) for arm in parts[0].arms] if parts else list(arms)
        start = time.monotonic()
        parts.append(harness.measure(chosen, [Shape(length, steps)], setting, rounds=rounds, runner=runner, say=say))
        took = time.monotonic() - start
    done = [part.shapes[0].prompt for part in parts]
    return Sweep(_joined(parts), [n for n in sorted(lengths) if n not in done], time.monotonic() - begin)


def _joined(parts: list[Bench]) -> Bench:
    """One run with all shapes; the limits of all parts together."""
    first = parts[0]
    ceilings = first.ceilings
    for part in parts[1:]:
        if ceilings is not None and part.ceilings is not None:
            ceilings = harness.Ceilings([a.merged(b) for a, b in zip(ceilings.limits, part.ceilings.limits, strict=True)])
    return Bench(
        first.model, [part.shapes[0] for part in parts], first.rounds, first.threads, first.arms,
        [turn for part in parts for turn in part.samples], first.about, first.works, ceilings, first.machine,
        [sample for part in parts for sample in part.pilot],
    )  # fmt: skip
