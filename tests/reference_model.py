"""The model in plain numpy float64, one token after another, straight from the files: no code of the package.

`Reference(directory)` computes exactly; `rounded=True` adds the roundings of the prefill path as shipped: bf16 weights and
inputs of matrix products, bf16 convolution rows, queries, keys, values and probabilities; all else stays exact.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U32": np.uint32}
PREFIX = re.compile(r"^(language_model\.model\.|model\.language_model\.|language_model\.)")
CENTRED = ("layernorm.weight", "q_norm.weight", "k_norm.weight")


def rb(x):
    """Round to bf16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every text tensor by canonical name; bf16 as float64, codes as uint32."""
    found = {}
    for path in sorted(directory.glob("model*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__" or re.search(r"vision|visual|mtp\.", name):
                continue
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            value = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
            if entry["dtype"] == "BF16":
                value = (value.astype(np.uint32) << 16).view(np.float32)
            found[PREFIX.sub("", name)] = value if entry["dtype"] == "U32" else value.astype(np.float64)
    return found


def unpack(codes: np.ndarray, columns: int) -> np.ndarray:
    """MLX packs codes into a little-endian stream of bits."""
    width = codes.shape[-1] * 32 // columns
    stream = np.unpackbits(np.ascontiguousarray(codes).view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(*codes.shape[:-1], columns, width) @ (1 << np.arange(width))


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Reference:
    def __init__(self, directory: Path, *, rounded: bool = False) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.config = config.get("text_config", config)
        self.eps = self.config.get("rms_norm_eps", 1e-6)
        self.tensors = read_tensors(directory)
        self.round = rb if rounded else np.asarray
        if any(name.endswith("conv1d.weight") and value.shape[-1] == 4 for name, value in self.tensors.items()):
            self._convert()
        self.rounded_weights: dict[str, np.ndarray] = {}

    def _convert(self) -> None:
        """An original checkpoint: norms hold w - 1 (1 + w is rounded to bf16, as converters do), experts are fused."""
        for name in list(self.tensors):
            if name.endswith(CENTRED) or name == "norm.weight":
                self.tensors[name] = rb(1 + self.tensors[name])
            if name.endswith("experts.gate_up_proj"):
                base = name.replace("experts.gate_up_proj", "switch_mlp")
                gate, up = np.split(self.tensors.pop(name), 2, axis=1)
                self.tensors |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
            if name.endswith("experts.down_proj"):
                self.tensors[name.replace("experts", "switch_mlp") + ".weight"] = self.tensors.pop(name)

    def exact(self, name: str) -> np.ndarray:
        """A weight as float64, scale * code + bias where it is quantised."""
        weight, scales = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.scales")
        if scales is None:
            return weight
        columns = self._columns(name)
        group = columns // scales.shape[-1]
        return np.repeat(scales, group, -1) * unpack(weight, columns) + np.repeat(self.tensors[f"{name}.biases"], group, -1)

    def _columns(self, name: str) -> int:
        c = self.config
        kind = name.rsplit(".", 1)[-1]
        if kind == "o_proj":
            return c["num_attention_heads"] * c["head_dim"]
        if kind == "out_proj":
            return c["linear_num_value_heads"] * c["linear_value_head_dim"]
        if kind == "down_proj":
            shared = "shared_expert" in name
            if "switch_mlp" in name:
                return c["moe_intermediate_size"]
            return c["shared_expert_intermediate_size"] if shared else c["intermediate_size"]
        return c["hidden_size"]

    def weight(self, name: str) -> np.ndarray:
        if name not in self.rounded_weights:
            self.rounded_weights[name] = self.round(self.exact(name))
        return self.rounded_weights[name]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weight(name).T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.tensors[f"{name}.weight"]

    def logits(self, ids) -> np.ndarray:
        """[n, vocab]."""
        c = self.config
        h = self.exact("embed_tokens")[np.asarray(ids)]
        for i in range(c["num_hidden_layers"]):
            layer = f"layers.{i}"
            x = self.round(self.norm(f"{layer}.input_layernorm", h))
            full = f"{layer}.self_attn.q_norm.weight" in self.tensors
            h = h + (self.attention(f"{layer}.self_attn", x) if full else self.delta(f"{layer}.linear_attn", x))
            x = self.round(self.norm(f"{layer}.post_attention_layernorm", h))
            h = h + (self.experts(f"{layer}.mlp", x) if f"{layer}.mlp.gate.weight" in self.tensors else self.mlp(f"{layer}.mlp", x))
        head = "lm_head" if "lm_head.weight" in self.tensors else "embed_tokens"
        return self.linear(head, self.round(self.norm("norm", h)))

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        act = silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", self.round(act))

    def experts(self, name: str, x: np.ndarray) -> np.ndarray:
        router = self.linear(f"{name}.gate", x)
        p = np.exp(router - router.max(-1, keepdims=True))
        chosen = np.argsort(-p, axis=-1, kind="stable")[:, : self.config["num_experts_per_tok"]]
        weights = np.take_along_axis(p, chosen, -1)
        weights /= weights.sum(-1, keepdims=True)
        y = sigmoid(self.linear(f"{name}.shared_expert_gate", x)) * self.mlp(f"{name}.shared_expert", x)
        gate, up, down = (self.weight(f"{name}.switch_mlp.{part}_proj") for part in ("gate", "up", "down"))
        for token, slot in np.ndindex(chosen.shape):
            e = chosen[token, slot]
            act = silu(gate[e] @ x[token]) * (up[e] @ x[token])
            y[token] += weights[token, slot] * (down[e] @ self.round(act))
        return y

    def attention(self, name: str, x: np.ndarray) -> np.ndarray:
        c, T = self.config, len(x)
        heads, groups, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        query, gate = np.split(self.linear(f"{name}.q_proj", x).reshape(T, heads, 2 * dim), 2, axis=-1)
        keys = self.linear(f"{name}.k_proj", x).reshape(T, groups, dim)
        values = self.round(self.linear(f"{name}.v_proj", x).reshape(T, groups, dim))
        query = self.round(self.rope(self.norm(f"{name}.q_norm", query)))
        keys = self.round(self.rope(self.norm(f"{name}.k_norm", keys)))
        keys, values = (np.repeat(a, heads // groups, axis=1) for a in (keys, values))
        scores = np.einsum("thd,shd->hts", query, keys) / np.sqrt(dim)
        scores[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shd->thd", self.round(p), values) / p.sum(-1).T[:, :, None]
        return self.linear(f"{name}.o_proj", self.round((out * sigmoid(gate)).reshape(T, heads * dim)))

    def rope(self, x: np.ndarray) -> np.ndarray:
        c = self.config
        rope = c.get("rope_parameters") or c
        dims = int(c["head_dim"] * rope.get("partial_rotary_factor", 0.25))
        angles = np.arange(len(x))[:, None] * rope.get("rope_theta", 1e7) ** (-2.0 * np.arange(dims // 2) / dims)
        cos, sin = (f(angles)[:, None, :] for f in (np.cos, np.sin))
        a, b, rest = np.split(x, (dims // 2, dims), axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def delta(self, name: str, x: np.ndarray) -> np.ndarray:
        c, T = self.config, len(x)
        nk, nv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        qkv = self.round(self.linear(f"{name}.in_proj_qkv", x))
        taps = self.tensors[f"{name}.conv1d.weight"].reshape(-1, 4)
        padded = np.concatenate([np.zeros((3, qkv.shape[1])), qkv])
        mixed = silu(sum(padded[j : j + T] * taps[:, j] for j in range(4)))
        q, k, v = np.split(mixed, (nk * dk, 2 * nk * dk), axis=-1)
        q, k, v = q.reshape(T, nk, dk), k.reshape(T, nk, dk), v.reshape(T, nv, dv)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(dk)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        q, k = (np.repeat(a, nv // nk, axis=1) for a in (q, k))
        beta = sigmoid(self.linear(f"{name}.in_proj_b", x))
        dt = np.logaddexp(0, self.linear(f"{name}.in_proj_a", x) + self.tensors[f"{name}.dt_bias"])
        decay = np.exp(-np.exp(self.tensors[f"{name}.A_log"]) * dt)
        state, out = np.zeros((nv, dv, dk)), np.zeros((T, nv, dv))
        for t in range(T):
            state *= decay[t][:, None, None]
            error = v[t] - np.einsum("nvk,nk->nv", state, k[t])
            state += (beta[t][:, None] * error)[:, :, None] * k[t][:, None, :]
            out[t] = np.einsum("nvk,nk->nv", state, q[t])
        gated = self.norm(f"{name}.norm", out) * silu(self.linear(f"{name}.in_proj_z", x).reshape(T, nv, dv))
        return self.linear(f"{name}.out_proj", self.round(gated.reshape(T, nv * dv)))
