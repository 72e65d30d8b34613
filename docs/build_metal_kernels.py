"""Writes docs/metal-kernels.md: each kernel as its own source describes it, the dispatch graph, and what the simulator counted.

python docs/build_metal_kernels.py              # the descriptions; keeps the counted tables
python docs/build_metal_kernels.py --report     # counts anew (needs LILY_SIM, takes minutes)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/metal-kernels.md"
BEGIN, END = "<!-- counted: begin -->", "<!-- counted: end -->"
PARTS = (
    (
        "decode",
        "Decode",
        "One token at a time: limited by how fast weights are read. Every projection that reads the same x is one dispatch.",
    ),
    ("prefill", "Prefill", "The rows of a chunk together: limited by products, and past 32K tokens by attention."),
    ("tensor", "Tensor operations", "The same products through Metal 4's `matmul2d`, for GPUs with matrix units."),
    ("shared", "Shared", "Norms, look-ups and what passes rows on."),
)
INTRO = """# The Metal kernels

Hand-written kernels for the whole model, in a subset of the Metal shading language that three other compilers also accept. **None of them has run on an
Apple GPU yet.** What has run: every kernel, on a simulator that executes each Metal thread as a fibre on the CPU and reports divergence, races,
missing barriers and accesses out of range, against float64 references; and whole models through the engine, with the bars of the CPU
(`tests/test_sim.py`, `tests/kernels`). What only a Mac can tell: whether Apple's compiler takes the sources as they are, and every speed.

## One decode step

The dispatches of a DeltaNet layer and of an attention layer of the 35B configuration: columns are stages, a barrier stands between two of them.
The whole step has 306 dispatches in 266 stages; without fusions (`LILY_PLAN=unfused`) it has 797 in 576 (the
published engine: 795 in 555) and gives the same bits.

![one decode step](pictures/decode-layers.svg)

```bash
lily plan PATH --device metal --picture step.svg --layers 0,3
```

## How a kernel is chosen

`csrc/device/shader/` turns a recorded dispatch into a launch: function, function constants, grid, threads. `lily plan --device metal --json` lists the
function of each dispatch and the reason of its choice; `LILY_KERNEL=name=variant[,name=variant]` forces one, and an illegal choice is an error. The variants for comparison:

| switch | what it compares |
|---|---|
| `LILY_PLAN=unfused` | every fusion at once: each fused kernel has a twin that shares no body with it, and the bits are the same |
| `gemm=expand` | weights dequantised to a buffer first, instead of on the way into threadgroup memory |
| `gemm=tensor`, `moe_gemm_rows=tensor`, ... | `matmul2d` instead of `simdgroup_matrix` |
| `moe_scan=tile16`, `tile32` | tiles of routed rows; by default 16 or 32 by the mean rows of an expert |
| `LILY_INDIRECT=host` | the grids of the grouped products read back on the CPU, instead of indirect dispatch |
| `gdn_scan=blocks` | the recurrent state through memory every 32 tokens, instead of registers from the first row to the last |
| `gdn_scan=chunked` | the chunkwise (WY) form in blocks of 64 |
| `moe_gate_up=ninth` | the shared expert's gate and up with those of the chosen eight (266 dispatches), instead of beside the router |
| `attn_split=one_head` | one query head a threadgroup, instead of four that share each K and V row |
| `attn_split_long=general` | the splits of short contexts from 32,768 tokens on, instead of 64 that share the context evenly |
| `attn_rows=cut256` | prefill attention cut every 256 keys, instead of every 8,192 |
| `gemv=read`, `gemv_norm=read`, ... | matrix-vector products without their arithmetic, for the pure read rate |

## How they are checked

```bash
python -m tests.sim build            # clang (or the package ziglang) and an installed lily; the last line is the value for LILY_SIM
LILY_SIM=... python -m pytest tests/kernels tests/metal tests/test_sim.py
python -m tests.sim report           # the tables below
```

1. A lint of the subset and a strict type check with real address spaces (`tests/metal/test_strict.py`), with seeded mistakes that must each be caught.
2. The binding of every parameter compared with the contract in `metal/include/args.h` (`tests/metal/test_bindings.py`).
3. The simulator: seeded run-time mistakes (`tests/metal/test_sim_mistakes.py`), each kernel against its float64 reference over the shapes that matter
   and ragged edges, every access against the exact range and direction that the recorder declared, hazards of the concurrent encoder.
4. The engine on the simulator: the oracle checkpoints, the fused and the unfused plan, shuffled threads, removed barriers.

"""


def header(path: Path) -> str:
    """The comment at the top of a source, as one paragraph per line that starts a sentence of its own."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].strip())
    return "\n".join(lines)


def functions(path: Path) -> list[str]:
    return re.findall(r"LILY_INSTANTIATE\((\w+),", path.read_text())


def described() -> str:
    out = []
    for folder, title, sentence in PARTS:
        out.append(f"## {title}\n\n{sentence}\n")
        for path in sorted((ROOT / "metal" / folder).glob("*.metal")):
            names = functions(path)
            out.append(f"### `metal/{folder}/{path.name}`\n")
            out.append(f"```text\n{header(path)}\n```\n")
            kernels = {n for n in (re.sub(r"(_tensor)?(_m\d+|_d\d+|_r\d+|_\d+)+$", "", n) for n in names)}
            out.append(f"{len(names)} function{'s' if len(names) != 1 else ''} of {', '.join(f'`{k}`' for k in sorted(kernels))}.\n")
        if folder == "prefill":
            for name in ("gemm_kernels.h", "moe_gemm_kernels.h", "gemm.h", "gemm_simdgroup.h", "gemm_tensor.h"):
                out.append(f"### `metal/include/{name}`\n\n```text\n{header(ROOT / 'metal/include' / name)}\n```\n")
    return "\n".join(out)


def counted(anew: bool) -> str:
    if not anew:
        text = PAGE.read_text() if PAGE.exists() else ""
        return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() if BEGIN in text else "Not counted yet."
    sys.path.insert(0, str(ROOT))
    from tests.sim.report import report

    table, faults = report()
    if faults:
        raise SystemExit("\n".join(faults))
    return table


def page(anew: bool = False) -> str:
    explained = (
        "What the simulator counted for single dispatches at the widths of the 35B model: bytes as asked for by all threads, and how much of the\n"
        "128-byte lines that each access of a simdgroup touches was asked for (coalescing). Scales and biases are listed apart: a lane needs two of\n"
        "their bytes for 16 codes. A weight read once has 1.000 times its size; a grouped product reads an expert once per tile of rows.\n"
        "At least 95 % of the lines of codes, K and V are asked for, but for two kinds of codes: rows of 512 values of 3 and 5 bits, which are no whole\n"
        "number of lines, and the tiles of prefill with 3, 5 and 6 bits, which have no room for one (decisions/0007-whole-lines.md). Rows that are\n"
        "looked up value by value, of the embedding and of what `gemm=expand` makes, are asked for 32 codes at a time.\n"
    )
    return f"{INTRO}{described()}\n## Counted traffic\n\n{explained}\n{BEGIN}\n{counted(anew)}\n{END}\n"


if __name__ == "__main__":
    PAGE.write_text(page("--report" in sys.argv[1:]))
