"""The stub of the extension says what was built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).resolve().parents[1] / "src/lily/_native.pyi"


def test_the_stub_is_what_nanobind_makes_of_the_extension(tmp_path):
    fresh = tmp_path / "_native.pyi"
    run = subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "lily._native", "-o", fresh], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert STUB.read_text() == fresh.read_text(), "run python -m nanobind.stubgen -m lily._native -o src/lily/_native.pyi"
