"""config.json of a Qwen3.5/3.6 checkpoint, read with every value checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lily.errors import CheckpointError
from lily.quantization import Quantization

LINEAR = "linear_attention"
FULL = "full_attention"

# Accepted model types, with or without the suffix of a text-only export.
MODEL_TYPES = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}

# Far above any released model; they keep a hostile file from asking for absurd allocations.
_MAX_WIDTH = 1 << 17
_MAX_HEADS = 1 << 12
_MAX_LAYERS = 1 << 10
_MAX_EXPERTS = 1 << 12
_MAX_VOCAB = 1 << 22
_MAX_CONTEXT = 1 << 24
_MAX_FILE_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; a `CheckpointError` when it is not one."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: larger than {_MAX_FILE_BYTES >> 20} MiB, which no such file needs")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})", expected=path.name) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); the download may be broken") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one checkpoint. Sizes are in elements, `max_context` in tokens.

    `layer_types` holds `"linear_attention"` or `"full_attention"` for each layer. `num_experts` is 0 for a dense model.
    `raw` is the whole config.json.

    >>> import lily
    >>> config = lily.Model.demo().config
    >>> config.hidden_size, config.num_layers, config.is_moe
    (256, 8, True)
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    intermediate_size: int
    tied: bool
    layer_types: tuple[str, ...]
    max_context: int
    quantization: Quantization | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_moe(self) -> bool:
        """Whether the feed-forward layers are mixtures of experts."""
        return self.num_experts > 0

    @property
    def conv_channels(self) -> int:
        """Channels of a Gated DeltaNet layer's convolution: queries, keys and values."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read config.json, or the config.json of a directory. Raises `CheckpointError`."""
        path = Path(path)
        return cls.from_dict(read_json(path / "config.json" if path.is_dir() else path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Check the parsed config.json and take what matters from it. Raises `CheckpointError` naming the field."""
        return _parse(raw)

    def spec(self) -> dict[str, Any]:
        """The architecture in the form that the engine takes."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("model_type", "quantization", "raw"):
            del values[name]
        return values | {"layer_types": [int(kind == FULL) for kind in self.layer_types]}


class _Fields:
    """Typed, bounded access to a section of config.json; null counts as missing."""

    def __init__(self, *sections: Mapping[str, Any]) -> None:
        self.sections = sections

    def get(self, name: str) -> Any:
        for section in self.sections:
            if section.get(name) is not None:
                return section[name]
        return None

    def integer(self, name: str, maximum: int, *, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(name)
        if value is None:
            value = default
        if type(value) is not int or not minimum <= value <= maximum:
            raise _bad(name, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, name: str, low: float, high: float, *, default: float) -> float:
        value = self.get(name)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value) or not low < value <= high:
            raise _bad(name, value, f"a number above {low:g}, at most {high:g}")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise _bad(name, value, "true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise _bad(name, value, "an object")
        return value


def _bad(name: str, found: object, expected: str) -> CheckpointError:
    shown = repr(found) if len(repr(found)) < 80 else f"{repr(found)[:77]}..."
    what = "is missing" if found is None else f"is {shown}"
    message = f"config.json: {name} {what}, expected {expected}"
    return CheckpointError(message, found=found, expected=expected, tensor=name)


def _require(name: str, found: object, accepted: tuple[object, ...], expected: str) -> None:
    if found not in accepted:
        raise _bad(name, found, expected)


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"config.json: expected an object, found {type(raw).__name__}")
    top = _Fields(raw)
    inner = top.mapping("text_config")
    text = _Fields(inner if inner else raw)
    model_type = _model_type(raw, inner)
    for name in ("attn_output_gate", "norm_topk_prob"):
        _require(name, text.boolean(name, default=True), (True,), "true")
    _require("attention_bias", text.boolean("attention_bias", default=False), (False,), "false")
    _require("output_gate_type", text.get("output_gate_type"), (None, "swish", "silu"), '"swish" or nothing')
    _require("hidden_act", text.get("hidden_act"), (None, "silu", "swish"), '"silu"')
    _require("mamba_ssm_dtype", text.get("mamba_ssm_dtype"), (None, "float32"), '"float32"')

    hidden_size = text.integer("hidden_size", _MAX_WIDTH)
    num_layers = text.integer("num_hidden_layers", _MAX_LAYERS)
    heads = text.integer("num_attention_heads", _MAX_HEADS)
    kv_heads = text.integer("num_key_value_heads", heads)
    head_dim = text.integer("head_dim", _MAX_HEADS, default=hidden_size // heads)
    key_heads = text.integer("linear_num_key_heads", _MAX_HEADS)
    value_heads = text.integer("linear_num_value_heads", _MAX_HEADS)
    _divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    _divides("linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads)
    rotary_dim, rope_theta = _rope(text, head_dim)
    moe = model_type == "qwen3_5_moe" or text.integer("num_experts", _MAX_EXPERTS, default=0, minimum=0) > 0
    experts = text.integer("num_experts", _MAX_EXPERTS) if moe else 0

    def moe_integer(name: str, maximum: int) -> int:
        return text.integer(name, maximum) if moe else 0

    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=text.integer("vocab_size", _MAX_VOCAB),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        rms_norm_eps=text.number("rms_norm_eps", 0.0, 0.1, default=1e-6),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=text.integer("linear_key_head_dim", _MAX_HEADS),
        linear_value_head_dim=text.integer("linear_value_head_dim", _MAX_HEADS),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4, default=4, minimum=4),
        num_experts=experts,
        experts_per_token=moe_integer("num_experts_per_tok", experts),
        moe_intermediate_size=moe_integer("moe_intermediate_size", _MAX_WIDTH),
        shared_intermediate_size=moe_integer("shared_expert_intermediate_size", _MAX_WIDTH),
        intermediate_size=0 if moe else text.integer("intermediate_size", _MAX_WIDTH),
        tied=_Fields(*text.sections, raw).boolean("tie_word_embeddings", default=False),
        layer_types=_layer_types(text, num_layers),
        max_context=text.integer("max_position_embeddings", _MAX_CONTEXT, default=262144),
        quantization=Quantization.from_config(raw),
        raw=raw,
    )


def _model_type(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    accepted = "qwen3_5 or qwen3_5_moe (Qwen3.5, 3.6, and the dense 3.8)"
    found = [section["model_type"] for section in (raw, inner) if section.get("model_type") is not None]
    if not found:
        raise _bad("model_type", None, accepted)
    for name in found:
        if not isinstance(name, str) or name not in MODEL_TYPES:
            raise _bad("model_type", name, accepted)
    kinds = {MODEL_TYPES[name] for name in found}
    if len(kinds) != 1:
        raise _bad("model_type", found, "the same kind in config.json and its text_config")
    return kinds.pop()


def _layer_types(text: _Fields, num_layers: int) -> tuple[str, ...]:
    listed = text.get("layer_types")
    if listed is None:
        interval = text.integer("full_attention_interval", _MAX_LAYERS, default=4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise _bad("layer_types", listed, f"a list of {num_layers} names (num_hidden_layers)")
    for name in listed:
        if name not in (LINEAR, FULL):
            raise _bad("layer_types", name, f'"{LINEAR}" or "{FULL}"')
    return tuple(listed)


def _rope(text: _Fields, head_dim: int) -> tuple[int, float]:
    """Rotary dims and base, from the new (`rope_parameters`) or the old fields."""
    scaling = text.mapping("rope_parameters") or text.mapping("rope_scaling")
    rope = _Fields(scaling, *text.sections)
    for section in ("rope_parameters", "rope_scaling"):
        for name in ("rope_type", "type"):
            # "mrope" is the multimodal form; for text its three positions are equal.
            kind = text.mapping(section).get(name)
            _require(f"{section}.{name}", kind, (None, "default", "mrope"), '"default" (no YaRN or other scaling)')
        _require(f"{section}.factor", text.mapping(section).get("factor"), (None, 1, 1.0), "none (no YaRN or other scaling)")
    partial = rope.number("partial_rotary_factor", 0.0, 1.0, default=0.25)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise _bad("partial_rotary_factor", partial, f"an even, positive number of the {head_dim} dims of a head")
    return rotary_dim, rope.number("rope_theta", 0.0, 1e12, default=1e7)


def _divides(name: str, value: int, other: str, total: int) -> None:
    if total % value:
        raise _bad(other, total, f"a multiple of {name} ({value})")
