"""Type-checks a kernel source with clang and real address spaces: `problems(path, storage)` lists what it says."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simulator import clang

from lily import msl

SHIM = Path(__file__).parent / "strict"
_MESSAGE = re.compile(r"^(.*?):(\d+):\d+: (error|fatal error|note): (.*)$", re.M)
_FLAGS = (
    "-fsyntax-only",
    "-nostdinc",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wvla",
    "-Wno-c++17-extensions",
    "-Wno-unused-function",
    "-Wno-sign-compare",
)
_FLAGS += (
    "-Wno-unused-command-line-argument",
    "-Wno-undefined-inline",
    "-Wno-undefined-internal",
    "-Wno-unknown-pragmas",
    "-ferror-limit=0",
    "-fno-caret-diagnostics",
)


@dataclass(frozen=True)
class Problem:
    file: str
    line: int
    text: str


def problems(path: Path, storage: str = "bfloat16") -> list[Problem]:
    """What clang has against the source; empty when it is clean. Raises `msl.KernelSourceError` when the lint has something already."""
    source = msl.rewrite(path, "strict", storage=storage)
    tensors = "<metal_tensor>" in source
    command = [*clang(), "-x", "c++", f"-std={'c++20' if tensors else 'c++14'}", *_FLAGS, "-isystem", str(SHIM)]
    with tempfile.TemporaryDirectory() as folder:  # zig reads no source from its input
        path = Path(folder) / "kernel.cpp"
        path.write_text(source)
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    noise = "failed to rename 'tmp/"  # zig looks for the object that a check of the syntax does not make
    found = [problem for problem in dict.fromkeys(_located(done.stderr)) if not problem.text.startswith(noise)]
    if done.returncode and not found and noise not in done.stderr:
        raise RuntimeError(f"clang failed without naming a line:\n{done.stderr}")
    return found


def _located(messages: str) -> Iterator[Problem]:
    """The errors. One inside of the shim, such as a failed static_assert, stands where a kernel's line brought it about, which a note names."""
    inside = ""
    for file, line, kind, text in _MESSAGE.findall(messages):
        in_shim = file.startswith(str(SHIM))
        if kind != "note":
            inside = text if in_shim else ""
            if not in_shim:
                yield Problem(file, int(line), text)
        elif inside and not in_shim:
            yield Problem(file, int(line), inside)
            inside = ""
