"""Synthetic checkpoints: the exact widths of a released model, any number of layers, random weights. For speed, never quality.

Codes are uniform and all scales of a matrix are equal, so the same numbers can be written exactly in other formats (`lily.bench.gguf_file`).
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GROUP = 64


def bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Size:
    """The widths of one released model; `experts` is 0 and `ffn` used when it is dense."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    value_heads: int  # of the linear layers; their 16 key heads, like the head dims, are the same in all models
    ffn: int = 0
    experts: int = 0
    per_token: int = 0
    expert_ffn: int = 0
    tied: bool = False


KEY_HEADS, LINEAR_DIM, HEAD_DIM = 16, 128, 256
SIZES = {
    "0.8b": Size(1024, 24, 8, 2, 16, ffn=3584, tied=True),
    "2b": Size(2048, 24, 8, 2, 16, ffn=6144, tied=True),
    "4b": Size(2560, 32, 16, 4, 32, ffn=9216, tied=True),
    "9b": Size(4096, 32, 16, 4, 32, ffn=12288),
    "27b": Size(5120, 64, 24, 4, 48, ffn=17408),
    "35b-a3b": Size(2048, 40, 16, 2, 32, experts=256, per_token=8, expert_ffn=512),
    "122b-a10b": Size(3072, 48, 32, 2, 64, experts=256, per_token=8, expert_ffn=1024),
    "397b-a17b": Size(4096, 60, 32, 2, 64, experts=512, per_token=10, expert_ffn=1024),
}
DEFAULT = "35b-a3b"


def config(layers: int, experts: int, vocab: int, size: Size = SIZES[DEFAULT]) -> dict:
    types = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    kind = "qwen3_5_moe" if size.experts else "qwen3_5"
    if size.experts:
        ffn = {
            "num_experts": experts,
            "num_experts_per_tok": size.per_token,
            "moe_intermediate_size": size.expert_ffn,
            "shared_expert_intermediate_size": size.expert_ffn,
        }
    else:
        ffn = {"intermediate_size": size.ffn}
    text = {
        "model_type": f"{kind}_text",
        "hidden_size": size.hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": HEAD_DIM,
        "layer_types": types,
        "full_attention_interval": 4,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": size.value_heads,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        **ffn,
        "tie_word_embeddings": size.tied,
        "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32",
    }
    quantization: dict = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    for i in range(layers if size.experts else 0):
        for name in ("gate", "shared_expert_gate"):
            quantization[f"language_model.model.layers.{i}.mlp.{name}"] = {"group_size": GROUP, "bits": 8}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if size.experts else "Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "quantization": quantization,
    }


def tensors(layers: int, experts: int, vocab: int, size: Size = SIZES[DEFAULT]):
    """(name, dtype, shape, kind) of every tensor; kind says how it is filled."""
    hidden, keys, values = size.hidden, size.kv_heads * HEAD_DIM, size.value_heads * LINEAR_DIM
    channels = 2 * KEY_HEADS * LINEAR_DIM + values

    def linear(name: str, rows: int, cols: int, bits: int = 4, stack: tuple = ()):
        yield f"{name}.weight", "U32", [*stack, rows, cols * bits // 32], ("codes", bits)
        yield f"{name}.scales", "BF16", [*stack, rows, cols // GROUP], ("scales", bits, cols)
        yield f"{name}.biases", "BF16", [*stack, rows, cols // GROUP], ("biases", bits, cols)

    def mlp(name: str, width: int, stack: tuple = ()):
        yield from linear(f"{name}.gate_proj", width, hidden, stack=stack)
        yield from linear(f"{name}.up_proj", width, hidden, stack=stack)
        yield from linear(f"{name}.down_proj", hidden, width, stack=stack)

    p = "language_model."
    yield from linear(f"{p}model.embed_tokens", vocab, hidden)
    if not size.tied:
        yield from linear(f"{p}lm_head", vocab, hidden)
    yield f"{p}model.norm.weight", "BF16", [hidden], ("norm",)
    for i in range(layers):
        m = f"{p}model.layers.{i}."
        yield f"{m}input_layernorm.weight", "BF16", [hidden], ("norm",)
        yield f"{m}post_attention_layernorm.weight", "BF16", [hidden], ("norm",)
        if (i + 1) % 4 == 0:
            a = f"{m}self_attn."
            yield from linear(f"{a}q_proj", 2 * size.heads * HEAD_DIM, hidden)
            yield from linear(f"{a}k_proj", keys, hidden)
            yield from linear(f"{a}v_proj", keys, hidden)
            yield from linear(f"{a}o_proj", hidden, size.heads * HEAD_DIM)
            yield f"{a}q_norm.weight", "BF16", [HEAD_DIM], ("norm",)
            yield f"{a}k_norm.weight", "BF16", [HEAD_DIM], ("norm",)
        else:
            a = f"{m}linear_attn."
            yield from linear(f"{a}in_proj_qkv", channels, hidden)
            yield from linear(f"{a}in_proj_z", values, hidden)
            yield from linear(f"{a}in_proj_a", size.value_heads, hidden)
            yield from linear(f"{a}in_proj_b", size.value_heads, hidden)
            yield from linear(f"{a}out_proj", hidden, values)
            yield f"{a}conv1d.weight", "BF16", [channels, 4, 1], ("taps",)
            yield f"{a}A_log", "F32", [size.value_heads], ("decay",)
            yield f"{a}dt_bias", "BF16", [size.value_heads], ("small",)
            yield f"{a}norm.weight", "F32", [LINEAR_DIM], ("norm",)
        f = f"{m}mlp"
        if not size.experts:
            yield from mlp(f, size.ffn)
            continue
        yield from linear(f"{f}.gate", experts, hidden, bits=8)
        yield from linear(f"{f}.shared_expert_gate", 1, hidden, bits=8)
        yield from mlp(f"{f}.switch_mlp", size.expert_ffn, (experts,))
        yield from mlp(f"{f}.shared_expert", size.expert_ffn)


def fill(rng: np.random.Generator, shape: list[int], kind: tuple) -> np.ndarray:
    """The values of one tensor, in the dtype in which they are stored."""
    n = int(np.prod(shape))
    if kind[0] == "codes":
        return np.frombuffer(rng.bytes(n * 4), np.uint32)
    if kind[0] in ("scales", "biases"):
        # codes are uniform: scale * (q - zero) has standard deviation 1/sqrt(columns) and a mean of half a step below 0
        bits, cols = kind[1], kind[2]
        top = 2**bits - 1
        scale = bf16(np.float32([cols**-0.5 / np.sqrt((top * top + 2 * top) / 12)]))
        if kind[0] == "biases":  # a power of two times the scale: exact
            scale = bf16(-(2.0 ** (bits - 1)) * (scale.astype(np.uint32) << 16).view(np.float32))
        return np.full(n, scale[0], np.uint16)
    values = {
        "norm": lambda: 1 + 0.05 * rng.standard_normal(n),
        "taps": lambda: 0.4 * rng.standard_normal(n),
        "decay": lambda: np.log(rng.uniform(0.05, 4, n)),
        "small": lambda: 0.1 * rng.standard_normal(n),
    }[kind[0]]().astype(np.float32)
    return values


def write(path: Path, layers: int, experts: int, vocab: int, seed: int = 0, size: str = DEFAULT) -> None:
    """Write the checkpoint in MLX's layout: config.json, model.safetensors (4 bits, groups of 64) and the shipped tokenizer.

    The same arguments give the same bytes. Raises `OSError`.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(layers, experts, vocab, SIZES[size]), indent=1))
    rng = np.random.default_rng(seed)
    item = {"U32": 4, "BF16": 2, "F32": 4}
    header, offset, plan = {"__metadata__": {"format": "mlx"}}, 0, list(tensors(layers, experts, vocab, SIZES[size]))
    for name, dtype, shape, _ in plan:
        end = offset + int(np.prod(shape)) * item[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for _, dtype, shape, kind in plan:
            values = fill(rng, shape, kind)
            f.write((bf16(values) if dtype == "BF16" and values.dtype == np.float32 else values).tobytes())
    # the shipped model's tokenizer, so that prompts can be text; most ids of the larger vocabulary have no text
    demo = Path(__file__).parents[1] / "data" / "demo"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo / name, path / name)
