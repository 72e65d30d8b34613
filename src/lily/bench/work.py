"""What one decode step moves and one prompt computes: the same account for every engine that runs the checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lily
from lily.config import FULL, ModelConfig
from lily.weights import load_weights

# Decay, both products with the old state and the rank-one update: operations for each element of the state.
_STATE_OPERATIONS = 8
_ROUTED = ".switch_mlp."


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one checkpoint in one format.

    `step_bytes` are read and written by a decode step with an empty context, `context_bytes` more for each token of it.
    `dense_bytes` and `expert_bytes` are what prefill reads once, the latter if every expert is chosen by some token.
    """

    step_bytes: int
    context_bytes: int
    dense_bytes: int
    expert_bytes: int
    token_operations: int
    pair_operations: int  # attention: for each token and each token before it
    head_operations: int
    expert_share: float  # of the experts, chosen by one token
    weight_bytes: int

    def decode_bytes(self, shape: Any) -> float:
        """Bytes of one step, the mean over the steps of a shape."""
        return self.step_bytes + self.context_bytes * (shape.prompt + (shape.steps + 1) / 2)

    def prefill_operations(self, tokens: int) -> float:
        """Floating-point operations for a prompt, one head at its end."""
        return self.token_operations * tokens + self.pair_operations * tokens * (tokens + 1) / 2 + self.head_operations

    def prefill_bytes(self, tokens: int) -> float:
        """Weights that a prompt needs, each read once; experts as if chosen at random."""
        return self.dense_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)

    def prefill_limit(self, tokens: int, read: float, matrix: float) -> float:
        """Tokens a second that no engine can pass, with `read` bytes and `matrix` operations a second."""
        return tokens / max(self.prefill_bytes(tokens) / read, self.prefill_operations(tokens) / matrix)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return asdict(self)


def work_of(directory: str | Path, *, gguf: bool = False) -> Work:
    """The work of a checkpoint directory; with `gguf`, of the same numbers in `lily.bench.gguf_file`'s form."""
    config = ModelConfig.from_file(Path(directory))
    plan = lily.plan(directory)
    share = config.experts_per_token / config.num_experts if config.is_moe else 1.0
    dense = experts = operations = head = 0
    ours_step = their_step = 0.0
    for weight in load_weights(Path(directory), config):
        if weight["kind"] != "linear" or weight["name"] == "embed_tokens" and not config.tied:
            continue
        routed = _ROUTED in weight["name"]
        used = share if routed else 1.0
        size, theirs = _stored(weight), _stored(weight, gguf)
        ours_step, their_step = ours_step + used * size, their_step + used * theirs
        count = 2 * weight["rows"] * weight["cols"] * weight["experts"]
        if weight["name"] in ("lm_head", "embed_tokens"):
            head = count
            dense += theirs
        elif routed:
            experts += theirs
            operations += round(count * share)
        else:
            dense += theirs
            operations += count
    attention = sum(kind == FULL for kind in config.layer_types)
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    operations += _STATE_OPERATIONS * state * (config.num_layers - attention)
    return Work(
        step_bytes=round(plan.bytes_per_token - ours_step + their_step),
        context_bytes=plan.kv_bytes_per_token,
        dense_bytes=dense,
        expert_bytes=experts,
        token_operations=operations,
        pair_operations=4 * attention * config.num_attention_heads * config.head_dim,
        head_operations=head,
        expert_share=share,
        weight_bytes=dense + experts,
    )


def _stored(weight: dict[str, Any], gguf: bool = False) -> int:
    """Bytes of a matrix."""
    count = weight["rows"] * weight["cols"] * weight["experts"]
    if weight["format"] != "affine":
        return count * {"bf16": 2, "f16": 2, "f32": 4}[weight["format"]]
    if gguf and weight["bits"] == 8:
        return count * 4  # routers are float32 there
    return round(count * (weight["bits"] + 32 / weight["group"]) / 8)
