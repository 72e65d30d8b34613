"""Which weights an architecture has, by canonical name, with their shapes. One table serves files and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lily.config import FULL, ModelConfig


@dataclass(frozen=True)
class Linear:
    """A matrix `[rows, cols]` (output, input), or `experts` of them, then `stacked` even if there is one."""

    name: str
    rows: int
    cols: int
    experts: int = 1
    stacked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored when unquantised."""
        return (self.experts, self.rows, self.cols) if self.stacked else (self.rows, self.cols)


@dataclass(frozen=True)
class Vector:
    """A small tensor used as it is. `tensor` is its full canonical name; `centred` marks norms that original
    checkpoints store as `w` and use as `1 + w`."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    centred: bool = False


def weights_of(config: ModelConfig) -> list[Linear | Vector]:
    """Every weight of the model, in the order of the forward pass."""
    hidden, vocab = config.hidden_size, config.vocab_size
    table: list[Linear | Vector] = [Linear("embed_tokens", vocab, hidden)]
    for i, kind in enumerate(config.layer_types):
        layer = f"layers.{i}"
        table.append(_norm(f"{layer}.input_layernorm", hidden))
        table += _attention(config, f"{layer}.self_attn") if kind == FULL else _delta(config, f"{layer}.linear_attn")
        table.append(_norm(f"{layer}.post_attention_layernorm", hidden))
        ffn = f"{layer}.mlp"
        table += _experts(config, ffn) if config.is_moe else _mlp(ffn, hidden, config.intermediate_size)
    table.append(_norm("norm", hidden))
    if not config.tied:
        table.append(Linear("lm_head", vocab, hidden))
    return table


def _norm(name: str, size: int) -> Vector:
    return Vector(name, f"{name}.weight", (size,), centred=True)


def _attention(config: ModelConfig, name: str) -> Iterator[Linear | Vector]:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_kv_heads * dim
    yield Linear(f"{name}.q_proj", 2 * queries, hidden)  # each head: its query, then its gate
    yield Linear(f"{name}.k_proj", keys, hidden)
    yield Linear(f"{name}.v_proj", keys, hidden)
    yield Linear(f"{name}.o_proj", hidden, queries)
    yield _norm(f"{name}.q_norm", dim)
    yield _norm(f"{name}.k_norm", dim)


def _delta(config: ModelConfig, name: str) -> Iterator[Linear | Vector]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    yield Linear(f"{name}.in_proj_qkv", config.conv_channels, hidden)
    yield Linear(f"{name}.in_proj_z", values, hidden)
    yield Linear(f"{name}.in_proj_a", heads, hidden)
    yield Linear(f"{name}.in_proj_b", heads, hidden)
    yield Vector(f"{name}.conv1d", f"{name}.conv1d.weight", (config.conv_channels, config.conv_kernel, 1))
    yield Vector(f"{name}.A_log", f"{name}.A_log", (heads,))
    yield Vector(f"{name}.dt_bias", f"{name}.dt_bias", (heads,))
    yield Vector(f"{name}.norm", f"{name}.norm.weight", (config.linear_value_head_dim,))  # never zero-centred
    yield Linear(f"{name}.out_proj", hidden, values)


def _mlp(name: str, hidden: int, width: int) -> Iterator[Linear]:
    yield Linear(f"{name}.gate_proj", width, hidden)
    yield Linear(f"{name}.up_proj", width, hidden)
    yield Linear(f"{name}.down_proj", hidden, width)


def _experts(config: ModelConfig, name: str) -> Iterator[Linear]:
    hidden, experts, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    yield Linear(f"{name}.gate", experts, hidden)
    yield Linear(f"{name}.shared_expert_gate", 1, hidden)
    yield Linear(f"{name}.switch_mlp.gate_proj", width, hidden, experts, stacked=True)
    yield Linear(f"{name}.switch_mlp.up_proj", width, hidden, experts, stacked=True)
    yield Linear(f"{name}.switch_mlp.down_proj", hidden, width, experts, stacked=True)
    yield from _mlp(f"{name}.shared_expert", hidden, config.shared_intermediate_size)
