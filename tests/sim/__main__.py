"""python -m tests.sim build: prints the value for LILY_SIM as its last line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    b = commands.add_parser("build", help="compile the kernels and the simulator; the last line is the library's path")
    b.add_argument("--out", type=Path, help="folder for objects and the library, kept between builds")
    b.add_argument("--jobs", type=int, help="compilers at a time (default: one per core)")
    r = commands.add_parser("report", help="what every kernel moves at the widths of the 35B model, as Markdown")
    r.add_argument("names", nargs="*", help="cases; all by default")
    r.add_argument("--out", type=Path, help="folder for objects and the library, kept between builds")
    r.add_argument("--jobs", type=int, help="compilers at a time (default: one per core)")
    args = parser.parse_args(argv)

    from lily.msl import KernelSourceError

    from .build import BuildError, NoCompiler, build

    begin = time.monotonic()
    try:
        library = build(args.out, jobs=args.jobs)
    except (BuildError, NoCompiler, KernelSourceError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"built in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    if args.command == "build":
        print(library)
        return 0
    os.environ["LILY_SIM"] = str(library)
    from .report import report

    text, faults = report(args.names)
    print(text)
    for fault in faults:
        print(f"missed: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
