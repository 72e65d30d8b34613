"""The Metal kernels run on a simulator that is built once, when there is a clang; without one its tests are skipped by name. Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
#: What uses it: a run of other files alone builds nothing.
_USERS = ("tests", "kernels", "metal", "test_sim", "test_metal", "test_selftest")


def pytest_configure(config) -> None:
    """`LILY_SIM` names a library; set to nothing it asks for none."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a script begins so, and its children with it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "LILY_SIM" in os.environ or not _wanted(config.args):
        return
    built = subprocess.run([sys.executable, "-m", "tests.sim", "build"], cwd=TESTS.parent, capture_output=True, text=True)
    if built.returncode == 0:
        os.environ["LILY_SIM"] = built.stdout.splitlines()[-1]
    elif "clang" not in built.stderr:
        raise RuntimeError(f"the simulator of the Metal kernels could not be built:\n{built.stderr}")


def _wanted(args: list[str]) -> bool:
    return any(Path(arg.split("::")[0]).name.startswith(_USERS) or arg in (".", "") for arg in args)
