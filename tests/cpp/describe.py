"""Writes fixtures as plain text and raw little-endian arrays for the C++ test program, which has no JSON parser.

    python tests/cpp/describe.py OUTPUT_DIR FIXTURE_DIR...

OUTPUT_DIR/<fixture>/model.txt has one fact a line: the spec's fields, each weight followed by its parts, and for each
prompt how many ids, how many rows of reference logits (the last positions) and how many greedy tokens there are.
"""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from lily.config import ModelConfig
from lily.weights import load_weights

PROMPTS = (1, 7, 64, 300)


def spec_lines(spec: dict[str, Any]) -> list[str]:
    lines = [f"layers {' '.join(map(str, spec['layer_types']))}"]
    for name, value in spec.items():
        if name != "layer_types":
            lines.append(f"spec {name} {value!r}" if isinstance(value, float) else f"spec {name} {int(value)}")
    return lines


def weight_lines(weight: dict[str, Any]) -> list[str]:
    w = weight
    if w["kind"] == "linear":
        lines = [
            f"linear {w['name']} {w['rows']} {w['cols']} {w['experts']} {w['expert_stride_rows']} {w['format']} {w['bits']} {w['group']}"
        ]
    else:
        lines = [f"vector {w['name']} {w['dtype']} {prod(w['shape'])} {int(w['add_one'])}"]
    for name, part in w["parts"].items():
        lines.append(f"part {name} {part['offset']} {part['bytes']} {part['file_bytes']} {part['file']}")
    return lines


def describe(fixture: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_file(fixture)
    lines = spec_lines(config.spec())
    for weight in load_weights(fixture, config):
        lines += weight_lines(weight)
    expected = load_file(fixture / "expected.safetensors")
    for n in PROMPTS:
        arrays = {"prompt": expected[f"prompt_{n}"], "logits": expected[f"logits_ref_{n}"], "greedy": expected[f"greedy_ref_{n}"]}
        for name, array in arrays.items():
            form = "<f4" if name == "logits" else "<i4"
            (output / f"{name}_{n}.bin").write_bytes(array.astype(form).tobytes())
        lines.append(f"prompt {n} {len(arrays['logits'])} {len(arrays['greedy'])}")
    (output / "model.txt").write_text("\n".join(lines) + "\n")


def main(output: Path, fixtures: list[Path]) -> None:
    for fixture in fixtures:
        describe(fixture.resolve(), output / fixture.name)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
