"""The simulator's switch between fibres, on each machine that can be run here, and its portable form."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from simulator import ROOT, clang, needs_clang

SOURCES = [ROOT / "tests/sim/fiber.cpp", ROOT / "tests/sim/fiber_check.cpp"]


def passes(compiler: list[str], flags: list[str], tmp_path, runner: tuple[str, ...] = ()) -> bool:
    program = tmp_path / "fibres"
    subprocess.run([*compiler, "-std=c++20", "-O2", *flags, *map(str, SOURCES), "-o", str(program)], check=True)
    return subprocess.run([*runner, str(program)], capture_output=True, text=True).stdout == "ok\n"


@pytest.mark.parametrize("flags", [[], ["-DLILY_SIM_UCONTEXT"]], ids=["assembly", "ucontext"])
def test_fibres_keep_their_registers(flags, tmp_path):
    needs_clang()
    assert passes(clang(), flags, tmp_path)


def test_fibres_keep_their_registers_on_arm(tmp_path):
    compiler, runner = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not compiler or not runner:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64")
    assert passes([compiler], ["-static"], tmp_path, (runner,))
