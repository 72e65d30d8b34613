"""The buffers of every kernel as the comments of metal/include/args.h state them: {kernel: {index: Buffer}}."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from lily import msl

_ENTRY = re.compile(r"(?:^|, )(?=\d+(?:-\d+|\+3s:|\.\. ?\d+\+8:?)? )")
_START = re.compile(r"(\d+)(?:-(\d+)|(\+3s:)|(\.\. ?\d+\+8:?))? (\w+)(?: (down))?")
# Two kernels take more on a GPU than on the CPU; args.h says so in a sentence.
_ON_GPUS = {
    "attn_rows": {7: ("o", True), 8: ("ml", True)},
    "moe_gemm_rows": {7: ("tiles", False), 8: ("grid", False)},
    "moe_gate_up_rows": {10: ("tiles", False), 11: ("grid", False)},
}


@dataclass(frozen=True)
class Buffer:
    name: str
    written: bool
    optional: bool = False


@lru_cache
def contract() -> dict[str, dict[int, Buffer]]:
    text = (msl.kernel_root() / "include/args.h").read_text()
    text = re.sub(r",\n//\s+", ", ", text)
    out = {}
    for name, entries in re.findall(r"^//(?:.*;)?\s+(?:twins: )?(\w+):\s+(0 .*)$", text, re.M):
        out[name] = _buffers(entries)
    for name, extra in _ON_GPUS.items():
        out[name].update({i: Buffer(*b, optional=True) for i, b in extra.items()})
    return out


def _buffers(entries: str) -> dict[int, Buffer]:
    out: dict[int, Buffer] = {}
    for entry in filter(None, _ENTRY.split(entries)):
        start = _START.match(entry)
        first, last, segments, snapshots, name, second_word = start.groups()
        i, written = int(first), "(w" in entry or "(rw" in entry
        if segments:
            for s in range(4):
                for j, part in enumerate(("codes", "scales", "biases")):
                    out[i + 3 * s + j] = Buffer(f"{part}{s}", written, optional=True)
        elif last:
            prefix = "" if name == "W" else f"{name}_{second_word}_" if second_word else f"{name}_"
            for j, part in enumerate(("codes", "scales", "biases")):
                out[i + j] = Buffer(prefix + part, written)
        elif snapshots:
            for s in range(8):
                out[i + s] = Buffer(f"snapshot{s}", True, optional=True)
        else:
            out[i] = Buffer(name, written)
    return out


def kernel_of(host_name: str) -> str | None:
    """The name in args.h that a host name stands for: itself, or the longest name before a suffix."""
    names = [n for n in contract() if host_name == n or host_name.startswith(n + "_")]
    return max(names, key=len, default=None)


def differences(host_name: str, parameters: list[dict]) -> list[str]:
    """How the buffers of one published kernel differ from the contract, in sentences; empty when they agree."""
    kernel = kernel_of(host_name)
    if kernel is None:
        return [f"{host_name} stands for no kernel of args.h"]
    expected = contract()[kernel]
    found = {p["index"]: p for p in parameters if p["attribute"] == "buffer" and p["index"] < 20}
    out = []
    for i, p in sorted(found.items()):
        if i not in expected:
            out.append(f"{host_name}: buffer {i} ({p['name']}) is not in the contract of {kernel}")
        elif p["writable"] and not expected[i].written:
            out.append(f"{host_name}: {p['name']} at {i} may be written, but {kernel} only reads {expected[i].name}")
        elif not p["writable"] and expected[i].written:
            out.append(f"{host_name}: {p['name']} at {i} is const, but {kernel} writes {expected[i].name}")
        elif not _words(expected[i].name) <= _words(p["name"]):
            out.append(f"{host_name}: buffer {i} is called {p['name']}, in the contract of {kernel} {expected[i].name}")
    missing = [b.name for i, b in expected.items() if b.written and not b.optional and i not in found]
    return out + [f"{host_name}: {name}, which {kernel} writes, is no parameter" for name in missing]


def _words(name: str) -> set[str]:
    words = {w for w in re.split(r"_", name.lower()) if w}
    return {
        {"keys": "k", "values": "v", "map": "tiles"}.get(w, w) for w in words if w != "down"
    }  # the shared expert's weights say "shared"
