"""llama.cpp, measured by its own llama-bench.

llama-bench warms up with the same shape, runs random ids and shows none, samples nothing, and waits for each step before it starts the
next. Its clock is kept as it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily.bench.measure import BenchError, Sample, Shape

if TYPE_CHECKING:
    from lily.bench.arms import Arm, Outcome, Setting

VARIABLE = "LILY_LLAMA_BENCH"


def find(given: str | os.PathLike[str] | None = None) -> Path | None:
    """llama-bench: `given`, else $LILY_LLAMA_BENCH, else the one on PATH; None when there is none.

    Raises `BenchError` when the one that was named is no program.
    """
    named = given or os.environ.get(VARIABLE)
    if not named:
        found = shutil.which("llama-bench")
        return Path(found) if found else None
    path = shutil.which(str(named))
    if path is None:
        raise BenchError(f"{named} is no program; {VARIABLE} or --llama-bench names llama.cpp's llama-bench")
    return Path(path)


def run_llama(arm: Arm, shapes: Sequence[Shape], setting: Setting) -> Outcome:
    """Prompts in one process, decode steps after each of them in a second one."""
    from lily.bench.arms import Outcome, call

    if setting.llama_bench is None:
        raise BenchError(f"{arm}: no llama-bench found; name it by --llama-bench or {VARIABLE}")
    assert arm.kind is not None
    path = setting.gguf(arm.kind)
    if not path.is_file():
        raise BenchError(f"{arm}: {path} is missing; `lily bench synthetic` writes it")
    common: list[str] = [str(setting.llama_bench), "-m", str(path), "-t", str(setting.threads), "-r", "1", "-o", "json"]
    common += ["--repack", "1" if arm.mode == "repack" else "0"] + ([] if setting.gpu else ["-ngl", "0"])
    prompts = ",".join(str(shape.prompt) for shape in shapes)
    rows = call([*common, "-p", prompts, "-n", "0"], str(arm))
    for steps in sorted({shape.steps for shape in shapes}):
        depths = ",".join(str(shape.prompt) for shape in shapes if shape.steps == steps)
        rows += call([*common, "-p", "0", "-n", str(steps), "-d", depths], str(arm))
    return Outcome(samples(str(arm), shapes, rows), about(rows[0], setting.llama_bench))


def samples(arm: str, shapes: Sequence[Shape], rows: Sequence[dict[str, Any]]) -> list[Sample]:
    """llama-bench's rows as samples. Raises `BenchError` when one is missing."""
    seconds = {(row["n_prompt"], row["n_gen"], row["n_depth"]): row["avg_ns"] / 1e9 for row in rows}
    result = []
    for shape in shapes:
        prefill, decode = (shape.prompt, 0, 0), (0, shape.steps, shape.prompt)
        if prefill not in seconds or decode not in seconds:
            raise BenchError(f"{arm}: llama-bench gave no row for {shape.prompt} tokens or the steps after them")
        result.append(Sample(arm, shape, seconds[prefill], seconds[decode], None))
    return result


def about(row: dict[str, Any], program: Path) -> dict[str, Any]:
    """The build and the settings that count. Built outside of its repository the program knows no number, so its digest is there too."""
    file = hashlib.sha256(program.read_bytes()).hexdigest()[:12]
    build = f"build {row.get('build_number', '?')} ({row.get('build_commit', '?')}), sha256 {file}"
    names = ("backends", "cpu_info", "n_threads", "n_ubatch", "flash_attn", "type_k", "model_size")
    return {"version": build, "program": program.name} | {name: row.get(name) for name in names}
