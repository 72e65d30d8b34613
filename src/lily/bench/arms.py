"""The arms of a benchmark: an engine, where it runs and in which mode, and the fresh process that measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily.bench import gguf_file
from lily.bench.measure import BenchError, Sample, Shape

ENGINES = ("lily", "mlx-lm", "llama.cpp")
_HELP = "expected lily[:DEVICE][@VARIANT], mlx-lm, or llama.cpp[:q4_0|q4_k][@repack|mapped]"


@dataclass(frozen=True)
class Arm:
    """One competitor. `device` and `variant` are lily's (LILY_KERNEL); `kind` and `mode` llama.cpp's, None while its best is open.

    >>> Arm.parse("lily:cpu@avx2")
    Arm(engine='lily', device='cpu', variant='avx2', kind=None, mode=None)
    """

    engine: str
    device: str = "auto"
    variant: str | None = None
    kind: str | None = None
    mode: str | None = None

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Raises `ValueError` for anything else than an arm."""
        rest, _, option = text.partition("@")
        engine, _, detail = rest.partition(":")
        if engine == "lily":
            return cls(engine, detail or "auto", option or None)
        if engine == "mlx-lm" and not detail and not option:
            return cls(engine)
        if engine == "llama.cpp" and detail in ("", *gguf_file.TYPES) and option in ("", "repack", "mapped"):
            return cls(engine, kind=detail or None, mode=option or None)
        raise ValueError(f"arm is {text!r}, {_HELP}")

    def modes(self) -> list[Arm]:
        """The arms that an open choice stands for; itself when nothing is open."""
        if self.engine != "llama.cpp":
            return [self]
        kinds = [self.kind] if self.kind else list(gguf_file.TYPES)
        modes = [self.mode] if self.mode else ["repack", "mapped"]
        return [Arm(self.engine, kind=kind, mode=mode) for kind in kinds for mode in modes]

    def __str__(self) -> str:
        detail = self.kind if self.engine == "llama.cpp" else None if self.device == "auto" else self.device
        option = self.mode if self.engine == "llama.cpp" else self.variant
        return self.engine + (f":{detail}" if detail else "") + (f"@{option}" if option else "")


@dataclass(frozen=True)
class Setting:
    """What all arms of a run share. `model` is a directory; its GGUF files lie in `model/gguf`."""

    model: Path
    threads: int
    llama_bench: Path | None = None
    gpu: bool = False

    def gguf(self, kind: str) -> Path:
        """Where the GGUF file of a type lies."""
        return self.model / "gguf" / f"{kind}.gguf"


@dataclass(frozen=True)
class Outcome:
    """The samples of one process and what it said about itself."""

    samples: list[Sample]
    about: dict[str, Any]


def run(arm: Arm, shapes: Sequence[Shape], setting: Setting) -> Outcome:
    """Measure an arm once at each shape, in a fresh process after a warm-up at that shape. Raises `BenchError`."""
    if arm.engine == "llama.cpp":
        from lily.bench.llama import run_llama

        return run_llama(arm, shapes, setting)
    request = {
        "engine": arm.engine,
        "model": str(setting.model),
        "device": arm.device,
        "shapes": [[shape.prompt, shape.steps] for shape in shapes],
    }
    environment = os.environ | {"LILY_THREADS": str(setting.threads), "OMP_NUM_THREADS": str(setting.threads)}
    if arm.variant:
        environment["LILY_KERNEL"] = arm.variant if "=" in arm.variant else f"*={arm.variant}"
    answer = call([sys.executable, "-m", "lily.bench.worker"], str(arm), environment, json.dumps(request))
    samples = [
        Sample(str(arm), Shape(row["prompt"], row["steps"]), row["prefill_seconds"], row["decode_seconds"], row["digest"])
        for row in answer["results"]
    ]
    return Outcome(samples, answer["about"])


def call(command: Sequence[str], name: str, environment: dict[str, str] | None = None, text: str | None = None) -> Any:
    """The JSON that a process prints. Raises `BenchError` with the end of its stderr when it fails or prints something else."""
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        try:
            return json.loads(done.stdout)
        except ValueError:
            pass
    how = f"printed {done.stdout[-200:]!r}" if done.returncode == 0 else f"ended with {done.returncode}"
    raise BenchError(f"{name}: its process {how}: {' '.join(done.stderr.split())[-600:] or 'it said nothing'}")
