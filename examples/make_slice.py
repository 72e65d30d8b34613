"""Writes a checkpoint with the exact widths of Qwen3.6-35B-A3B, few layers and random weights: for measuring speed, never quality.

python examples/make_slice.py /tmp/slice            # 4 layers, vocabulary 32768, about 2 GB
python examples/make_slice.py /tmp/tiny --layers 4 --experts 16 --vocab 2048
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np

GROUP = 64


def bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def config(layers: int, experts: int, vocab: int) -> dict:
    types = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": types,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32",
    }
    quantization: dict = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    for i in range(layers):
        for name in ("gate", "shared_expert_gate"):
            quantization[f"language_model.model.layers.{i}.mlp.{name}"] = {"group_size": GROUP, "bits": 8}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "quantization": quantization,
    }


def tensors(layers: int, experts: int, vocab: int):
    """(name, dtype, shape, kind) of every tensor; kind says how it is filled."""

    def linear(name: str, rows: int, cols: int, bits: int = 4, stack: tuple = ()):
        yield f"{name}.weight", "U32", [*stack, rows, cols * bits // 32], ("codes", bits)
        yield f"{name}.scales", "BF16", [*stack, rows, cols // GROUP], ("scales", bits, cols)
        yield f"{name}.biases", "BF16", [*stack, rows, cols // GROUP], ("biases", bits, cols)

    p = "language_model."
    yield from linear(f"{p}model.embed_tokens", vocab, 2048)
    yield from linear(f"{p}lm_head", vocab, 2048)
    yield f"{p}model.norm.weight", "BF16", [2048], ("norm",)
    for i in range(layers):
        m = f"{p}model.layers.{i}."
        yield f"{m}input_layernorm.weight", "BF16", [2048], ("norm",)
        yield f"{m}post_attention_layernorm.weight", "BF16", [2048], ("norm",)
        if (i + 1) % 4 == 0:
            a = f"{m}self_attn."
            yield from linear(f"{a}q_proj", 8192, 2048)
            yield from linear(f"{a}k_proj", 512, 2048)
            yield from linear(f"{a}v_proj", 512, 2048)
            yield from linear(f"{a}o_proj", 2048, 4096)
            yield f"{a}q_norm.weight", "BF16", [256], ("norm",)
            yield f"{a}k_norm.weight", "BF16", [256], ("norm",)
        else:
            a = f"{m}linear_attn."
            yield from linear(f"{a}in_proj_qkv", 8192, 2048)
            yield from linear(f"{a}in_proj_z", 4096, 2048)
            yield from linear(f"{a}in_proj_a", 32, 2048)
            yield from linear(f"{a}in_proj_b", 32, 2048)
            yield from linear(f"{a}out_proj", 2048, 4096)
            yield f"{a}conv1d.weight", "BF16", [8192, 4, 1], ("taps",)
            yield f"{a}A_log", "F32", [32], ("decay",)
            yield f"{a}dt_bias", "BF16", [32], ("small",)
            yield f"{a}norm.weight", "F32", [128], ("norm",)
        f = f"{m}mlp."
        yield from linear(f"{f}gate", experts, 2048, bits=8)
        yield from linear(f"{f}shared_expert_gate", 1, 2048, bits=8)
        yield from linear(f"{f}switch_mlp.gate_proj", 512, 2048, stack=(experts,))
        yield from linear(f"{f}switch_mlp.up_proj", 512, 2048, stack=(experts,))
        yield from linear(f"{f}switch_mlp.down_proj", 2048, 512, stack=(experts,))
        yield from linear(f"{f}shared_expert.gate_proj", 512, 2048)
        yield from linear(f"{f}shared_expert.up_proj", 512, 2048)
        yield from linear(f"{f}shared_expert.down_proj", 2048, 512)


def fill(rng: np.random.Generator, shape: list[int], kind: tuple) -> np.ndarray:
    """The values of one tensor, in the dtype in which they are stored."""
    n = int(np.prod(shape))
    if kind[0] == "codes":
        return np.frombuffer(rng.bytes(n * 4), np.uint32)
    if kind[0] in ("scales", "biases"):
        # codes are uniform, so that scale * q + bias has mean 0 and standard deviation 1/sqrt(columns)
        bits, cols = kind[1], kind[2]
        top = 2**bits - 1
        scale = cols**-0.5 / np.sqrt((top * top + 2 * top) / 12)
        return np.full(n, bf16(np.float32([scale if kind[0] == "scales" else -scale * top / 2]))[0], np.uint16)
    values = {
        "norm": lambda: 1 + 0.05 * rng.standard_normal(n),
        "taps": lambda: 0.4 * rng.standard_normal(n),
        "decay": lambda: np.log(rng.uniform(0.05, 4, n)),
        "small": lambda: 0.1 * rng.standard_normal(n),
    }[kind[0]]().astype(np.float32)
    return values


def write(path: Path, layers: int, experts: int, vocab: int, seed: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(layers, experts, vocab), indent=1))
    rng = np.random.default_rng(seed)
    size = {"U32": 4, "BF16": 2, "F32": 4}
    header, offset, plan = {"__metadata__": {"format": "mlx"}}, 0, list(tensors(layers, experts, vocab))
    for name, dtype, shape, _ in plan:
        end = offset + int(np.prod(shape)) * size[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for _, dtype, shape, kind in plan:
            values = fill(rng, shape, kind)
            f.write((bf16(values) if dtype == "BF16" and values.dtype == np.float32 else values).tobytes())
    # the shipped model's tokenizer, so that prompts can be text; most ids of the larger vocabulary have no text
    import lily

    demo = Path(lily.__file__).parent / "data" / "demo"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo / name, path / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32768)
    options = parser.parse_args()
    write(options.path, options.layers, options.experts, options.vocab)
    size = (options.path / "model.safetensors").stat().st_size
    print(f"{options.path}: {size / 1e9:.2f} GB, {options.layers} layers, {options.experts} experts, vocabulary {options.vocab}")


if __name__ == "__main__":
    main()
