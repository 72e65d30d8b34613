"""What a run found, as JSON, as Markdown and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lily.bench.harness import Bench, Row
from lily.bench.limits import Limit


def to_dict(bench: Bench) -> dict[str, Any]:
    """Everything, as JSON can hold it: samples, medians, ratios, limits, versions."""
    return {
        "model": Path(bench.model).name,
        "machine": bench.machine,
        "threads": bench.threads,
        "rounds": bench.rounds,
        "arms": {arm: bench.about.get(arm, {}) for arm in bench.arms},
        "rows": [asdict(row) for row in bench.rows()],
        "ratios": [asdict(ratio) for ratio in bench.ratios()],
        "limits": [] if bench.ceilings is None else [limit.to_dict() for limit in bench.ceilings.limits],
        "work": {engine: work.to_dict() for engine, work in bench.works.items()},
        "samples": [[asdict(sample) for sample in turn] for turn in bench.samples],
        "trials": [asdict(sample) for sample in bench.pilot],
    }


def to_markdown(bench: Bench) -> str:
    """Tables: one row for each prompt length and arm, then the ratios, then what stands beside them."""
    lines = [
        "| prompt | arm | prefill, tokens/s | of the limit | decode, tokens/s | GB/s | of the read rate |",
        "|---|---|---|---|---|---|---|",
        *(_row(row) for row in bench.rows()),
    ]
    ratios = bench.ratios()
    if ratios:
        lines += ["", f"| prompt | {bench.arms[0]} over | prefill | its mode | decode | its mode |", "|---|---|---|---|---|---|"]
        for prefill, decode in zip(ratios[::2], ratios[1::2], strict=True):
            lines.append(f"| {prefill.shape.prompt} | {prefill.peer} | {prefill.spread} | {prefill.arm} | {decode.spread} | {decode.arm} |")
    machine = bench.machine
    lines += [
        "",
        f"Medians of {bench.rounds} rounds in alternating order (least to greatest), each arm in a fresh process after a warm-up of the same "
        f"shape; {bench.shapes[0].steps} decode steps after each prompt, greedy, {bench.threads} threads. "
        f"{machine['cpu']}, {machine['cores']} cores, {', '.join(machine['units'])}.",
    ]
    lines += ["", *(f"* {arm}: {about.get('version', 'unknown version')}" for arm, about in bench.about.items() if arm in bench.arms)]
    if bench.ceilings is not None:
        lines += ["", *(f"* {limit}" for limit in bench.ceilings.limits)]
    return "\n".join(lines) + "\n"


def _row(row: Row) -> str:
    shares = ["" if share is None else f"{share:.1%}" for share in (row.prefill_share, row.decode_share)]
    return f"| {row.shape.prompt} | {row.arm} | {row.prefill} | {shares[0]} | {row.decode} | {row.decode_bytes / 1e9:.2f} | {shares[1]} |"


def limits_markdown(limits: list[Limit]) -> str:
    """The machine's limits as a list."""
    return "\n".join(f"* {limit}" for limit in limits) + "\n"


def write(directory: Path, name: str, found: dict[str, Any], markdown: str, bench: Bench | None) -> list[Path]:
    """NAME.json, NAME.md and, where matplotlib is installed, NAME.png; returns what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"{name}.json", directory / f"{name}.md"]
    files[0].write_text(json.dumps(found, indent=1) + "\n")
    files[1].write_text(markdown)
    if bench is not None and (figure := plot(bench)) is not None:
        files.append(directory / f"{name}.png")
        figure.savefig(files[-1], dpi=120, bbox_inches="tight")
    return files


def new_figure(columns: int, width: float = 10, height: float = 4) -> tuple[Any, Any]:
    """A matplotlib figure with `columns` axes side by side, drawn without a display; (None, None) when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None, None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def plot(bench: Bench) -> Any:
    """Rates against prompt length, each arm a line with the spread of its rounds; None when matplotlib is not installed."""
    figure, axes = new_figure(2)
    if figure is None:
        return None
    rows = bench.rows()
    for axis, what in zip(axes, ("prefill", "decode"), strict=True):
        for arm in bench.arms:
            own = [row for row in rows if row.arm == arm]
            spreads = [getattr(row, what) for row in own]
            middle = [spread.median for spread in spreads]
            errors = [[s.median - s.least for s in spreads], [s.greatest - s.median for s in spreads]]
            axis.errorbar([row.shape.prompt for row in own], middle, yerr=errors, marker="o", capsize=3, label=arm)
        axis.set_xscale("log", base=2)
        axis.set_xticks([shape.prompt for shape in bench.shapes], [str(shape.prompt) for shape in bench.shapes])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("prompt, tokens")
        axis.set_title(f"{what}, tokens/s")
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure
