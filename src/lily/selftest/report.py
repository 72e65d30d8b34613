"""What a selftest found: lines for the terminal, a summary to send in, Markdown and JSON."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import lily
from lily._engine import machine
from lily.selftest.runner import FAILED, LEFT_OUT, PASSED, Report, Row

HEADER = ("kernel", "shapes", "error", "bound", "ms", "GB/s", "ok")
_WIDTHS = (17, 60, 8, 22, 9, 7, 0)


def line(cells: tuple[str, ...]) -> str:
    """Cells in columns; numbers stand on the right."""
    parts = [
        cell.rjust(width) if column in (2, 4, 5) else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return "  ".join(parts).rstrip()


def cells(row: Row) -> tuple[str, ...]:
    """A row's cells in the order of `HEADER`."""
    error, bound = "", ""
    if row.error is not None:
        error, bound = f"{row.error.value:.2g}", f"{row.error.bound:.2g} {row.error.unit}"
    ms = "" if row.seconds is None else f"{row.seconds * 1e3:.3f}"
    rate = "" if row.rate is None else f"{row.rate:.1f}"
    shape = row.shape + (f", {row.form}" if row.form else "")
    return row.kernel, shape, error, bound, ms, rate, {PASSED: "yes", FAILED: "NO", LEFT_OUT: "left out"}[row.status]


def summary(report: Report) -> str:
    """What to paste into a bug report."""
    device, rows = report.device, report.rows
    counts = ", ".join(f"{len(report.having(status))} {status}" for status in (PASSED, FAILED, LEFT_OUT))
    options = [flag for flag, on in (("--quick", report.options.quick), ("--full", report.options.full)) if on]
    options += [f"--kernel {pattern}" for pattern in report.options.kernels]
    threads = f"{device['threads']} threads, " if device["threads"] else ""
    lines = [
        f"Lily {lily.__version__}, selftest of {device['name']}" + (f" ({' '.join(options)})" if options else ""),
        f"{machine()}",
        f"Device: {device['description']}; {device['isa']}, {threads}{device['memory_bytes'] / (1 << 30):.0f} GiB, {device['storage']}",
        f"{counts} of {len(rows)} rows in {report.seconds:.0f} s; the device opened in {report.open_seconds:.2f} s, its programs were made ready in {report.prepare_seconds:.2f} s",
    ]
    if report.kernels:
        lines.append(f"LILY_KERNEL={report.kernels}: no other forms are compared.")
    if report.interrupted:
        lines.append("Stopped before its end.")
    for row in report.having(FAILED):
        lines.append(f"FAILED {row.name}: {row.text}")
    for reason, found in _left_out(report).items():
        kernels = Counter(row.kernel for row in found)
        shown = "; ".join(row.name for row in found) if len(found) <= 8 else ", ".join(f"{kernel} {n}" for kernel, n in kernels.items())
        lines.append(f"Left out ({reason}): {shown}")
    return "\n".join(lines)


def _left_out(report: Report) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in report.having(LEFT_OUT):
        found.setdefault(row.text, []).append(row)
    return found


def to_markdown(report: Report) -> str:
    """The summary, then the table."""
    shown = [row for row in report.rows if row.status != LEFT_OUT]
    table = [HEADER, ("---",) * len(HEADER), *(cells(row) for row in shown)]
    return (
        f"```\n{summary(report)}\n```\n\n"
        + "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in one) + " |" for one in table)
        + "\n"
    )


def to_dict(report: Report) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    return {
        "version": lily.__version__,
        "machine": machine(),
        "device": report.device,
        "options": {"quick": report.options.quick, "full": report.options.full, "kernels": list(report.options.kernels)},
        "lily_kernel": report.kernels,
        "ok": report.ok,
        "interrupted": report.interrupted,
        "passed": len(report.having(PASSED)),
        "failed": len(report.having(FAILED)),
        "left_out": len(report.having(LEFT_OUT)),
        "seconds": report.seconds,
        "open_seconds": report.open_seconds,
        "prepare_seconds": report.prepare_seconds,
        "rows": [_row(row) for row in report.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    found = asdict(row) | {"gb_per_second": row.rate}
    if row.error is not None and not math.isfinite(row.error.value):
        found["error"]["value"] = str(row.error.value)  # JSON has no infinity
    return found
