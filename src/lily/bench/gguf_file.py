"""The numbers of a synthetic checkpoint as a GGUF file, for llama.cpp: Q4_0 and Q4_K hold them exactly, or the file is refused.

Both take 4.5 bits a weight, like MLX's 4 bits in groups of 64. The 8-bit router and shared-expert gate become float32, which is what
llama.cpp's own conversion stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lily.config import FULL, ModelConfig
from lily.errors import CheckpointError

Array = np.ndarray[Any, Any]

TYPES = ("q4_0", "q4_k")
_BLOCK = {"q4_0": 32, "q4_k": 256}
_BLOCK_BYTES = {"q4_0": 18, "q4_k": 144}
# Names in llama.cpp's architecture qwen35moe, by our names within a layer.
_LINEARS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.out_proj": "ssm_out", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.switch_mlp.gate_proj": "ffn_gate_exps", "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
_VECTORS = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
}  # fmt: skip
_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
_PREFIX = "language_model."


def write(directory: Path, path: Path, kind: str = "q4_0") -> None:
    """Write the synthetic checkpoint in `directory` as the GGUF file `path`, of type `kind` ("q4_0" or "q4_k").

    Raises `CheckpointError` for a checkpoint whose numbers the type does not hold exactly, `ValueError` for another type.
    """
    if kind not in TYPES:
        raise ValueError(f"gguf type is {kind!r}, expected one of {', '.join(TYPES)}")
    from gguf import GGMLQuantizationType, GGUFWriter

    config = ModelConfig.from_file(directory)
    if not config.is_moe:
        raise CheckpointError("only mixture-of-experts checkpoints are written as GGUF", found=config.model_type, expected="qwen3_5_moe")
    source = _Source(directory, config, kind)
    part = path.with_name(path.name + ".part")  # a file with its name is whole
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(part, "qwen35moe")
    _describe(writer, config)
    tensors = list(source.tensors())
    for tensor in tensors:
        shape, dtype = tensor.shape, np.dtype(np.float32)
        raw = None
        if tensor.quantised:
            shape, dtype = (*shape[:-1], shape[-1] // _BLOCK[kind] * _BLOCK_BYTES[kind]), np.dtype(np.uint8)
            raw = getattr(GGMLQuantizationType, kind.upper())
        writer.add_tensor_info(tensor.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(source.data(tensor))
    writer.close()
    part.replace(path)


def _describe(writer: Any, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.experts_per_token)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_full_attention_interval(config.layer_types.index(FULL) + 1 if FULL in config.layer_types else config.num_layers + 1)
    writer.add_tokenizer_model("none")


@dataclass(frozen=True)
class _Tensor:
    name: str  # in the GGUF file
    source: str  # ours, without prefix and suffix
    shape: tuple[int, ...]
    quantised: bool


class _Source:
    """The tensors of a checkpoint in MLX's layout, converted one at a time."""

    def __init__(self, directory: Path, config: ModelConfig, kind: str) -> None:
        from lily.safetensors_header import read_header

        self.config, self.kind = config, kind
        self.file = directory / "model.safetensors"
        self.header = {tensor.name.removeprefix(_PREFIX): tensor for tensor in read_header(self.file).values()}

    def tensors(self) -> Iterator[_Tensor]:
        c = self.config
        yield from self._linear("model.embed_tokens", "token_embd")
        if not c.tied:
            yield from self._linear("lm_head", "output")
        yield self._vector("model.norm.weight", "output_norm.weight")
        for i in range(c.num_layers):
            for ours, theirs in _VECTORS.items():
                if f"model.layers.{i}.{ours}" in self.header:
                    yield self._vector(f"model.layers.{i}.{ours}", f"blk.{i}.{theirs}")
            for ours, theirs in _LINEARS.items():
                yield from self._linear(f"model.layers.{i}.{ours}", f"blk.{i}.{theirs}")

    def _linear(self, ours: str, theirs: str) -> Iterator[_Tensor]:
        if (tensor := self.header.get(f"{ours}.weight")) is None:
            return
        router = ours.endswith(_ROUTERS)
        shape = (*tensor.shape[:-1], tensor.shape[-1] * (4 if router else 8))
        yield _Tensor(f"{theirs}.weight", ours, shape[1:] if shape[0] == 1 else shape, not router)

    def _vector(self, ours: str, theirs: str) -> _Tensor:
        shape = tuple(n for n in self.header[ours].shape if n != 1)
        return _Tensor(theirs, ours, shape, False)

    def data(self, tensor: _Tensor) -> Array:
        if tensor.quantised:
            return self._codes(tensor)
        if tensor.source.endswith(_ROUTERS):
            codes = self._read(f"{tensor.source}.weight").view(np.uint8).astype(np.float32)
            scales, biases = (np.repeat(self._read(f"{tensor.source}.{part}"), 64, axis=-1) for part in ("scales", "biases"))
            return (codes.reshape(scales.shape) * scales + biases).reshape(tensor.shape)
        values = self._read(tensor.source).reshape(tensor.shape)
        if tensor.name.endswith("ssm_a"):
            values = -np.exp(values)
        if tensor.name.endswith(("ssm_a", "ssm_dt.bias")):
            values = values[self._heads(1)]
        if "ssm_conv1d" in tensor.name:
            values = values[self._channels()]
        return np.ascontiguousarray(values, np.float32)

    def _codes(self, tensor: _Tensor) -> Array:
        scale = self._scale(tensor.source)
        packed = self._read(f"{tensor.source}.weight").view(np.uint8)
        packed = packed.reshape(-1, *packed.shape[-2:])  # [experts, rows, bytes]
        out = np.empty((*packed.shape[:2], tensor.shape[-1] // _BLOCK[self.kind] * _BLOCK_BYTES[self.kind]), np.uint8)
        for expert, one in enumerate(packed):
            codes = np.stack([one & 15, one >> 4], axis=-1).reshape(len(one), -1)
            out[expert] = pack(self._ordered(tensor.source, codes), scale, self.kind)
        return out if len(tensor.shape) == 3 else out[0]

    def _scale(self, name: str) -> float:
        """The one scale of a matrix; its zero point must be 8."""
        scales, biases = self._read(f"{name}.scales"), self._read(f"{name}.biases")
        scale = float(scales.flat[0])
        if not ((scales == scale).all() and (biases == -8 * scale).all()):
            raise CheckpointError(
                f"{name}: only synthetic checkpoints, with one scale and the zero point 8, have the same numbers in GGUF",
                found="other scales or biases", expected="scales all equal, biases -8 times the scale", tensor=name,
            )  # fmt: skip
        return scale

    def _ordered(self, name: str, codes: Array) -> Array:
        if name.endswith("in_proj_qkv"):
            return codes[self._channels()]
        if name.endswith("in_proj_z"):
            return codes[self._heads(self.config.linear_value_head_dim)]
        if name.endswith(("in_proj_a", "in_proj_b")):
            return codes[self._heads(1)]
        if name.endswith("linear_attn.out_proj"):
            return codes[:, self._heads(self.config.linear_value_head_dim)]
        return codes

    def _heads(self, width: int) -> Array:
        """Value heads as llama.cpp orders them: the first of every key head, then the second of every key head, and so on."""
        keys = self.config.linear_num_key_heads
        order = np.arange(self.config.linear_num_value_heads).reshape(keys, -1).T.ravel()
        return (order[:, None] * width + np.arange(width)).ravel()

    def _channels(self) -> Array:
        first = 2 * self.config.linear_num_key_heads * self.config.linear_key_head_dim
        return np.concatenate([np.arange(first), first + self._heads(self.config.linear_value_head_dim)])

    def _read(self, name: str) -> Array:
        tensor = self.header[name]
        stored = {"U32": np.uint32, "BF16": np.uint16, "F32": np.float32}[tensor.dtype]
        data = np.fromfile(self.file, stored, int(np.prod(tensor.shape)), offset=tensor.offset).reshape(tensor.shape)
        return (data.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else data


def pack(codes: Array, scale: float, kind: str) -> Array:
    """Codes 0 to 15 `[rows, columns]` of the numbers `scale * (code - 8)` as uint8 blocks `[rows, bytes]`.

    Raises `CheckpointError` when the type cannot hold the scale exactly.
    """
    blocks = codes.reshape(len(codes), -1, _BLOCK[kind])
    if kind == "q4_0":
        head = _halves([scale])
        body = blocks[..., :16] | blocks[..., 16:] << 4
    else:
        # scale = d * 32 and 8 * scale = dmin * 32, with 32 in every 6-bit field
        head = np.concatenate([_halves([scale / 32, scale / 4]), np.array([160] * 8 + [0] * 4, np.uint8)])
        pairs = blocks.reshape(*blocks.shape[:2], 4, 2, 32)
        body = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*blocks.shape[:2], 128)
    out = np.empty((*blocks.shape[:2], _BLOCK_BYTES[kind]), np.uint8)
    out[..., : len(head)] = head
    out[..., len(head) :] = body
    return out.reshape(len(codes), -1)


def _halves(values: list[float]) -> Array:
    halves = np.array(values, np.float16)
    if [float(half) for half in halves] != values:
        raise CheckpointError("a scale has no exact half-precision form", found=values, expected="a value that float16 holds")
    return halves.view(np.uint8)


__all__ = ["TYPES", "pack", "write"]
