"""Makes the data under tests/data from the full oracle fixtures and the shipped model's extras. Run by hand:

    python tests/data/make_fixtures.py FIXTURES DEMO_EXTRA

FIXTURES holds one directory per checkpoint and README.md says what each array is; DEMO_EXTRA holds heldout.jsonl and
ref_q4_float32.npz. Arrays that no test reads are left out, so that everything together stays below 20 MB. Fixture b is
not stored: the tests make it from a.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
FIXTURES = ("a_moe_q4g64", "c_dense_q4g64_tied", "d_moe_mixed_g32", "e_moe_bf16_hf")
STATES_FROM = ("a_moe_q4g64", "c_dense_q4g64_tied")
LIMIT = 20_000_000
# The reference of the shipped model keeps all ids and the logits of every fourth position: 1.5 MB instead of 5.7.
REF_STRIDE = 4

KEPT = {
    "expected.safetensors": (
        r"prompt_\d+", r"logits_ref_\d+", r"logits_mlx_(64|300)", r"greedy_ref_\d+", r"hidden_ref_7\.\d+",
        r"router_ref_64\.\d+\.(indices|weights)",
    ),
    "states.safetensors": (r"ref\..*",),
    # Left out: what equals another tensor (a module's output and that of its last projection).
    "trace_ref_7.safetensors": (r"trace\.layers\.\d+\.(?!(linear_attn|self_attn|mlp\.shared_expert)\.out$).*",),
}  # fmt: skip


def strip(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    arrays = load_file(source)
    kept = {name: value for name, value in arrays.items() if any(re.fullmatch(p, name) for p in patterns)}
    save_file(kept, target)
    print(f"{target.relative_to(HERE)}: {len(kept)} of {len(arrays)} arrays")


def fixture(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.name == "states.safetensors" and target.name not in STATES_FROM:
            continue
        if path.name in KEPT:
            strip(path, target / path.name, KEPT[path.name])
        else:
            shutil.copyfile(path, target / path.name)


def demo(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "heldout.jsonl", target / "heldout.jsonl")
    reference = np.load(source / "ref_q4_float32.npz")
    ids, logits = reference["ids"], reference["logits"]
    positions = np.arange(len(ids) - 1, -1, -REF_STRIDE)[::-1]
    np.savez(target / "ref_q4_float32.npz", ids=ids.astype(np.int32), positions=positions.astype(np.int32), logits=logits[positions])


def main(fixtures: Path, demo_extra: Path) -> None:
    for name in FIXTURES:
        fixture(fixtures / name, HERE / "fixtures" / name)
    shutil.copyfile(fixtures / "tokenizer_cases.json", HERE / "fixtures" / "tokenizer_cases.json")
    demo(demo_extra, HERE / "demo")
    total = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"{total / 1e6:.1f} MB in all")
    if total > LIMIT:
        raise SystemExit(f"more than {LIMIT / 1e6:.0f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
