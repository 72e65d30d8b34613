"""The simulator for tests: the libraries, built once; without clang the tests are skipped by name."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.sim.build import NoCompiler, build, compiler  # noqa: E402
from tests.sim.library import Simulator  # noqa: E402


@lru_cache
def clang() -> list[str] | None:
    try:
        return compiler()
    except NoCompiler:
        return None


def needs_clang() -> None:
    if clang() is None:
        pytest.skip("the simulator needs clang")


@lru_cache
def library(*names: str) -> Path:
    """The library of tests/sim/NAME.metal, bfloat16 storage."""
    needs_clang()
    folder = os.environ.get("LILY_SIM_CACHE")
    sources = [ROOT / "tests/sim" / f"{name}.metal" for name in names]
    return build(Path(folder) if folder else None, kernels=sources, root=ROOT / "metal", storages=("bfloat16",))


def simulator(*names: str, **settings) -> Simulator:
    return Simulator(library(*names), **settings)
