"""`lily selftest`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--device", default="auto", show_default=True, help="A name listed by `lily devices`.")
@click.option("--quick", is_flag=True, help="Small shapes alone.")
@click.option("--full", is_flag=True, help="Large shapes on the simulator too; minutes.")
@click.option("--kernel", "kernels", multiple=True, help='Only this kernel, or this pattern ("moe_*"), or "model"; several times.')
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything into this file.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the summary and the table into this file, as Markdown."
)
def selftest(device: str, quick: bool, full: bool, kernels: tuple[str, ...], json_file: Path | None, output: Path | None) -> int:
    """Run every kernel of a device against the CPU and say how far apart they are, how long each takes, and whether all is well.

    Exits 0 only if every row passed. The last lines are for a bug report.
    """
    from lily.selftest import report
    from lily.selftest.device import variants
    from lily.selftest.model import NAME
    from lily.selftest.runner import LEFT_OUT, Options, Row, run

    if quick and full:
        raise click.UsageError("--quick and --full exclude each other")
    options = Options(quick, full, kernels)
    known = [*variants(), NAME]
    for pattern in kernels:
        if not any(Options(kernels=(pattern,)).wants(name) for name in known):
            raise click.UsageError(f"no kernel is named {pattern!r}, expected one of: {', '.join(known)}")

    def started(found: Any) -> None:
        click.echo(f"{found.device['name']}: {found.device['description']}\n")
        click.echo(report.line(report.HEADER))

    def say(row: Row) -> None:
        if row.status != LEFT_OUT:
            click.echo(report.line(report.cells(row)))

    found = run(device, options, say, started)
    click.echo(f"\n{report.summary(found)}")
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(found), indent=1) + "\n", encoding="utf-8")
    if output is not None:
        output.write_text(report.to_markdown(found), encoding="utf-8")
    if found.interrupted:
        raise click.Abort
    return 0 if found.ok else 1
