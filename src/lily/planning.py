"""`lily.plan`: what a decode step and a prefill chunk will do, and what they need, without loading a weight."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lily import hub
from lily._engine import native
from lily.config import ModelConfig
from lily.weights import abstract_weights, load_weights

CONTEXTS = (4096, 32768, 131072)
# Two decode steps are in flight: one state is read while two are written. Beside them lie the empty one and a spare.
_STATES_IN_DECODE = 5
# How the engine holds a session (csrc/engine: pools.cpp, session.cpp): K and V in blocks of tokens, their number grown by
# doubling, and a state every so many tokens, the older the fewer.
_KV_BLOCK_TOKENS, _FIRST_BLOCKS = 256, 4
_SNAPSHOT_TOKENS = 1024


@dataclass(frozen=True)
class Chip:
    """A memory system and where its figure comes from."""

    name: str
    gigabytes_per_second: float
    source: str


_APPLE = "Apple's figure (technical specifications)"
CHIPS = (
    Chip("Apple M5 Max, 40-core GPU", 614, _APPLE),
    Chip("Apple M4 Max, 40-core GPU", 546, _APPLE),
    Chip("Apple M3 Ultra", 819, _APPLE),
    Chip("Apple M3 Max, 40-core GPU", 400, _APPLE),
    Chip("Apple M5 Pro", 307, _APPLE),
    Chip("desktop CPU, 2 channels DDR5-5600", 89.6, "arithmetic: 2 x 8 bytes x 5.6 GT/s"),
    Chip("server CPU, 8 channels DDR5-4800", 307.2, "arithmetic: 8 x 8 bytes x 4.8 GT/s"),
    Chip("NVIDIA RTX 4090", 1008, "arithmetic: 384 bits x 21 Gbit/s GDDR6X"),
    Chip("NVIDIA H200", 4800, "NVIDIA's data sheet, 4.8 TB/s"),
)


@dataclass(frozen=True)
class Plan:
    """Counts of a recorded plan. `weights`, `states`, ... are bytes.

    `decode` and `prefill` hold `dispatches`, `stages` and the list of dispatches; `bytes_per_token` what a decode step
    moves at an empty context, `kv_bytes_per_token` what each token of context adds.

    >>> import lily
    >>> plan = lily.plan(lily.Model.demo().source)
    >>> plan.decode["stages"] <= plan.decode["dispatches"]
    True
    """

    source: str
    model_type: str
    decode: dict[str, Any] = field(repr=False)
    prefill: dict[str, Any] = field(repr=False)
    weights: int
    state_bytes: int
    kv_bytes_per_token: int
    workspace_bytes: int
    workspace_by_rows: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one decode step reads and writes, without the context's keys and values."""
        return self.decode["bytes"]

    def memory(self, tokens: int) -> dict[str, int]:
        """Bytes by kind for one session whose prompt and answer have `tokens` tokens together, at its largest."""
        parts = {
            "weights": self.weights,
            "kv": _kv_tokens(tokens) * self.kv_bytes_per_token,
            "states": _STATES_IN_DECODE * self.state_bytes,
            "snapshots": _snapshots(tokens) * self.state_bytes,
            "workspace": next((nbytes for rows, nbytes in self.workspace_by_rows if rows >= tokens), self.workspace_bytes),
        }
        return parts | {"total": sum(parts.values())}

    def tokens_per_second(self, chip: Chip, tokens: int) -> float:
        """The bandwidth limit of decoding at a context of `tokens` tokens: no engine can be faster on this chip."""
        return chip.gigabytes_per_second * 1e9 / (self.bytes_per_token + tokens * self.kv_bytes_per_token)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; contexts are keys written as decimal numbers."""
        return {
            "source": self.source,
            "model_type": self.model_type,
            "decode": self.decode,
            "prefill": self.prefill,
            "bytes_per_token": self.bytes_per_token,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "memory": {str(tokens): self.memory(tokens) for tokens in CONTEXTS},
            "limits": [
                {
                    "chip": chip.name,
                    "gigabytes_per_second": chip.gigabytes_per_second,
                    "source": chip.source,
                    "tokens_per_second": {str(n): round(self.tokens_per_second(chip, n), 1) for n in CONTEXTS},
                }
                for chip in CHIPS
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.source} ({self.model_type})",
            f"decode step: {self.decode['dispatches']} dispatches in {self.decode['stages']} stages, "
            f"{self.bytes_per_token / 1e9:.3f} GB + {self.kv_bytes_per_token:,} bytes for each token of context",
            f"prefill chunk of {self.prefill['rows']} rows: {self.prefill['dispatches']} dispatches in {self.prefill['stages']} stages",
            *self._variants(),
            "",
            _row("memory, GB", [f"{tokens // 1024}K" for tokens in CONTEXTS]),
        ]
        memories = [self.memory(tokens) for tokens in CONTEXTS]
        lines += [_row(f"  {kind}", [f"{memory[kind] / 1e9:.3f}" for memory in memories]) for kind in memories[0]]
        lines += ["", _row("bandwidth limit, tokens/s", [f"{tokens // 1024}K" for tokens in CONTEXTS])]
        for chip in CHIPS:
            rates = [f"{self.tokens_per_second(chip, tokens):.0f}" for tokens in CONTEXTS]
            lines.append(_row(f"  {chip.name}, {chip.gigabytes_per_second:g} GB/s", rates) + f"   {chip.source}")
        return "\n".join(lines)

    def _variants(self) -> list[str]:
        """Which instruction set runs the kernels on this machine's CPU, and why; or which Metal functions there are, and those that were forced."""
        listed = [*self.decode["forward"], *self.decode["sample"], *self.prefill["list"]]
        if "cpu" not in listed[0]:
            launched = sorted({(entry["metal"], entry["metal_reason"]) for entry in listed})
            functions = {function for function, _ in launched}
            return [
                f"Metal: {len(functions)} functions",
                *(f"  {name}, {reason}" for name, reason in launched if reason.startswith("forced")),
            ]
        kernels: dict[tuple[str, str], set[str]] = {}
        for entry in listed:
            kernels.setdefault((entry["cpu"], entry["cpu_reason"]), set()).add(entry["kernel"])
        ranked = sorted(kernels.items(), key=lambda item: -len(item[1]))
        return [f"on this CPU: {variant} for {len(names)} kernels, {reason}" for (variant, reason), names in ranked]


def _kv_tokens(tokens: int) -> int:
    """The tokens that there is room for when the last of `tokens` is written."""
    blocks = max(_FIRST_BLOCKS, -(-tokens // _KV_BLOCK_TOKENS))
    return (1 << (blocks - 1).bit_length()) * _KV_BLOCK_TOKENS


def _snapshots(tokens: int) -> int:
    """States kept of a prompt: its end, and those on the grid that are near enough for how coarse their place is."""
    last = tokens // _SNAPSHOT_TOKENS
    near = sum(last - step <= 4 * (step & -step) for step in range(1, last + 1))
    return near + (tokens % _SNAPSHOT_TOKENS > 0)


def plan(source: str | os.PathLike[str], *, revision: str | None = None, device: str = "auto") -> Plan:
    """Plan for a config.json, a directory (a config.json in it will do) or a Hub id (of which only that is downloaded).

    Weights that are there are counted as they are; otherwise the quantisation block says what they would be, 4 bits in
    groups of 64 when there is none. `device` names whose programs are recorded (cpu, metal, sim, cuda; it need not be
    here). Raises `CheckpointError`, `DeviceError` for an unknown device.

    >>> import lily
    >>> lily.plan(lily.Model.demo().source).to_dict()["decode"]["dispatches"] > 0
    True
    """
    path = hub.find_config(source, revision=revision)
    config = ModelConfig.from_file(path)
    result = native().plan(config.spec(), _weights(path, config), device)
    memory = result["memory"]
    return Plan(
        source=str(source),
        model_type=config.model_type,
        decode=result["decode"],
        prefill=result["prefill"],
        weights=memory["weights"],
        state_bytes=memory["state_bytes"],
        kv_bytes_per_token=memory["kv_bytes_per_token"],
        workspace_bytes=memory["workspace_bytes"],
        workspace_by_rows=tuple((rows, nbytes) for rows, nbytes in memory.get("workspace_by_rows", ())),
    )


def _weights(path: Path, config: ModelConfig) -> list[dict[str, Any]]:
    if path.name != "config.json" or not hub.is_complete(path.parent):
        return abstract_weights(config)
    weights = load_weights(path.parent, config)
    for weight in weights:
        del weight["parts"]
    return weights


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<46}" + "".join(f"{cell:>10}" for cell in cells)
