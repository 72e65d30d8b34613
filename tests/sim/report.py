"""The counters' report: what each kernel moves at the widths of the 35B model, as a Markdown table, and whether it keeps the bars."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from .cases import CASES, Case
from .cases_small import SMALL

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from harness import run_sim  # noqa: E402

COALESCED_KINDS = ("codes", "kv")
WEIGHT_KINDS = ("codes", "scales")  # their bar is on all weights of a dispatch together


@dataclass
class Row:
    """One stream of a case, as counted. Sizes in bytes."""

    stream: str
    kind: str
    read: int
    written: int
    expected: int
    at_most: float
    coalescing: float
    whole_lines: float = 0.95

    @property
    def times(self) -> float:
        return self.read / self.expected if self.expected else 0.0

    def faults(self) -> list[str]:
        found = []
        if self.kind not in WEIGHT_KINDS:
            found += bounds(self.stream, self.read, self.expected, self.at_most)
        if self.kind in COALESCED_KINDS and self.read and self.coalescing < self.whole_lines:
            found.append(f"{self.stream}: coalescing {self.coalescing:.1%}, at least {self.whole_lines:.0%}")
        return found


def bounds(what: str, read: int, expected: int, at_most: float) -> list[str]:
    """Whether `expected` bytes were read at least once and at most so often."""
    if not expected:
        return []
    times = read / expected
    if times > at_most * (1 + 1e-9):
        return [f"{what}: read {times:.3f} times, at most {at_most:g}"]
    return [f"{what}: read {times:.3f} times, expected all of it"] if times < 1 - 1e-9 else []


@dataclass
class Counted:
    case: Case
    function: str
    threadgroups: int
    barriers: int
    threadgroup_bytes: int
    rows: list[Row]
    seconds: float
    faults: list[str] = field(default_factory=list)
    weights_times: float | None = None  # bytes of all weights read, over what must be read


def count(case: Case) -> Counted:
    """Runs the case's dispatch on the simulator that LILY_SIM names, checked and counted."""
    begin = time.monotonic()
    buffers = [s.array for s in case.streams]
    result = run_sim(case.kernel, case.args, buffers, case.groups, rows=case.rows, indirect=case.indirect, variant=case.variant)
    traffic = list(result["traffic"].values())
    rows = []
    for stream, t in zip(case.streams, traffic, strict=True):
        moved = 128 * t["transactions"]
        coalescing = t["useful_bytes"] / moved if moved else 1.0
        moved = t["bytes_read"], t["bytes_written"]
        rows.append(Row(stream.name, stream.kind, *moved, stream.expected, stream.at_most, coalescing, stream.whole_lines))
    counted = Counted(
        case, result["function"], result["threadgroups"], result["barriers"], result["threadgroup_bytes"], rows, time.monotonic() - begin
    )
    for row in rows:
        counted.faults += row.faults()
    weights = [r for r in rows if r.kind in WEIGHT_KINDS]
    if weights:
        read, expected = sum(r.read for r in weights), sum(r.expected for r in weights)
        counted.weights_times = read / expected
        counted.faults += bounds("weights", read, expected, weights[0].at_most)
    for kind, total in case.totals.items():
        moved = sum(r.read + r.written for r in rows if r.kind == kind)
        if moved != total:
            counted.faults.append(f"{kind}: {moved} bytes moved, expected {total}")
    return counted


def _bytes(n: int) -> str:
    if n >= 1 << 20:
        return f"{n / (1 << 20):.2f} MiB"
    return f"{n / 1024:.1f} KiB" if n >= 1024 else f"{n} B"


def table(counted: list[Counted]) -> str:
    """Markdown: one table for launches, one line for every stream with a bar, one for the rest."""
    lines = [
        "| dispatch | kernel | threadgroups | barriers | threadgroup memory | bytes read | bytes written | weights read | at most |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for c in counted:
        read, written = sum(r.read for r in c.rows), sum(r.written for r in c.rows)
        most = next((f"{r.at_most:g}" for r in c.rows if r.kind in WEIGHT_KINDS), "")
        times = f"{c.weights_times:.3f}" if c.weights_times is not None else ""
        cells = [c.case.label, f"`{c.function}`", f"{c.threadgroups:,}", f"{c.barriers:,}", _bytes(c.threadgroup_bytes), _bytes(read)]
        lines.append("| " + " | ".join([*cells, _bytes(written), times, most]) + " |")
    lines += ["", *(f"{c.case.label}: {c.case.note}." for c in counted if c.case.note), ""]
    lines += ["| dispatch | stream | bytes read | bytes written | times its size | coalescing |", "|---|---|--:|--:|--:|--:|"]
    for c in counted:
        for r in c.rows:
            if r.kind == "other" or not (r.read or r.written):
                continue
            times = f"{r.times:.3f}" if r.expected else ""
            lines.append(f"| {c.case.label} | {r.stream} | {_bytes(r.read)} | {_bytes(r.written)} | {times} | {r.coalescing:.1%} |")
    return "\n".join(lines)


def report(names: list[str] | None = None) -> tuple[str, list[str]]:
    """The Markdown and what misses its bar."""
    counted, cases = [], CASES | SMALL
    for name in names or list(cases):
        counted.append(count(cases[name]()))
        print(f"{name}: {counted[-1].seconds:.1f} s", *counted[-1].faults, sep="\n  ", file=sys.stderr)
    faults = [f"{c.case.label}: {f}" for c in counted for f in c.faults]
    return table(counted), faults
