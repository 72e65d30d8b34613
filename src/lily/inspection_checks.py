"""What `lily.inspect` looks for in the tensors: formats by kind, norms, values that cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lily.config import FULL, ModelConfig
from lily.errors import CheckpointError
from lily.layout import Vector, weights_of
from lily.names import skipped
from lily.quantization import Packing
from lily.safetensors_header import read_header
from lily.staging import check_scales
from lily.values import read_bytes, read_floats

_SAMPLE_BYTES = 512
_SAMPLED_FROM = 1 << 14
_LARGEST_NORM = 1000
# Kinds of matrices by how their names end, or else by what they contain; the first that fits.
_ENDINGS = (("mlp.gate", "router"), ("shared_expert_gate", "router"))
_PARTS = (
    ("embed_tokens", "embedding"), ("lm_head", "head"), ("self_attn.", "attention"), ("linear_attn.", "Gated DeltaNet"),
    ("switch_mlp.", "experts"), ("shared_expert.", "shared expert"), ("mlp.", "feed-forward"),
)  # fmt: skip
_ORDER = ("embedding", "Gated DeltaNet", "attention", "router", "experts", "shared expert", "feed-forward", "head", "norms and vectors")


def contents(weights: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tensors, parameters and bytes by kind and format."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for weight in weights:
        key = _kind(weight), _format(weight)
        row = rows.setdefault(key, {"kind": key[0], "format": key[1], "tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += len(weight["parts"])
        row["parameters"] += _elements(weight)
        row["bytes"] += _bytes(weight)
    return sorted(rows.values(), key=lambda row: (_ORDER.index(row["kind"]), -row["bytes"]))


def _kind(weight: Mapping[str, Any]) -> str:
    name = weight["name"]
    if weight["kind"] == "vector":
        return "norms and vectors"
    ending = next((kind for end, kind in _ENDINGS if name.endswith(end)), None)
    return ending or next(kind for part, kind in _PARTS if part in name)


def _format(weight: Mapping[str, Any]) -> str:
    if weight["kind"] == "vector":
        return weight["dtype"]
    if weight["format"] != "affine":
        return weight["format"]
    scales = weight["parts"]["scales"]["dtype"].lower()
    return f"{weight['bits']} bits, group {weight['group']}" + ("" if scales == "bf16" else f", {scales} scales")


def _elements(weight: Mapping[str, Any]) -> int:
    return prod(weight["shape"]) if weight["kind"] == "vector" else weight["experts"] * weight["rows"] * weight["cols"]


def _bytes(weight: Mapping[str, Any]) -> int:
    if weight["kind"] == "linear" and weight["format"] != "affine":  # fused experts: the range also spans the other half
        return _elements(weight) * (4 if weight["format"] == "f32" else 2)
    return sum(part["bytes"] for part in weight["parts"].values())


def skipped_tensors(files: Sequence[Path]) -> dict[str, dict[str, int]]:
    """Count and bytes of the vision and multi-token-prediction tensors."""
    result: dict[str, dict[str, int]] = {}
    for path in files:
        for name, tensor in read_header(path).items():
            if skipped(name):
                kind = "multi-token-prediction" if "mtp." in name else "vision"
                entry = result.setdefault(kind, {"tensors": 0, "bytes": 0})
                entry["tensors"] += 1
                entry["bytes"] += tensor.bytes
    return result


def check_values(weights: Sequence[Mapping[str, Any]], config: ModelConfig) -> tuple[dict[str, Any], list[str], list[str]]:
    """The norms' convention and mean; problems; remarks."""
    norms, problems = _norms(weights, config)
    empty = [weight["name"] for weight in weights if weight["kind"] == "linear" and _is_blank(weight["parts"]["weight"])]
    if empty:
        problems.append(f"{_some(empty)}: nothing but zeros wherever it was sampled; the file may never have been filled")
    problems += [text for weight in weights if (text := _scales(weight))]
    return norms, problems, _odd_formats(weights, config)


def _norms(weights: Sequence[Mapping[str, Any]], config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """Layer norms average near 1 when stored as multipliers, near 0 when stored as w for 1 + w."""
    problems = []
    centred = {weight.name for weight in weights_of(config) if isinstance(weight, Vector) and weight.centred}
    means = []
    for weight in weights:
        if weight["kind"] != "vector":
            continue
        try:
            values = read_floats(weight, weight["parts"]["weight"]["offset"], tuple(weight["shape"]))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if weight["name"].endswith("norm") and (fault := _norm_fault(values + 1 if weight["add_one"] else values)):
            problems.append(f"{weight['name']}: {fault}; the file is damaged, download it again")
        if weight["name"] in centred and weight["name"].endswith("layernorm"):
            means.append(float(values.mean(dtype=np.float64)))
    original = any(weight.get("add_one") for weight in weights)
    mean = float(np.mean(means)) if means else 0.0
    if means and original and mean > 0.5:
        problems.append(
            f"the layer norms average {mean:.2f} although conv1d has the original shape, where they are near 0: adding 1 would be wrong"
        )
    if means and not original and mean < 0.5:
        problems.append(
            f"the layer norms average {mean:.2f} although conv1d has MLX's shape, where they are near 1: the conversion forgot to add 1"
        )
    return {"stored_as": "w, used as 1 + w" if original else "multipliers", "mean": mean, "layers": len(means)}, problems


def _norm_fault(multipliers: Any) -> str | None:
    """Trained norms are about 1; some are several times that, none a thousand times."""
    largest = float(np.abs(multipliers).mean(dtype=np.float64))
    if largest == 0:
        return "multiplies everything by zero"
    return f"multiplies by {largest:.3g} on average, expected about 1" if largest > _LARGEST_NORM else None


def _is_blank(part: Mapping[str, Any]) -> bool:
    if part["bytes"] < _SAMPLED_FROM:
        return False
    places = (0, part["bytes"] // 2, part["bytes"] - _SAMPLE_BYTES)
    return not any(any(read_bytes(part["file"], part["offset"] + place, _SAMPLE_BYTES)) for place in places)


def _scales(weight: Mapping[str, Any]) -> str | None:
    if weight["kind"] != "linear" or weight["format"] != "affine":
        return None
    try:
        check_scales(weight)
    except CheckpointError as error:
        return str(error)
    return None


def _odd_formats(weights: Sequence[Mapping[str, Any]], config: ModelConfig) -> list[str]:
    remarks = []
    linears = [weight for weight in weights if weight["kind"] == "linear"]
    if all(weight["format"] != "affine" for weight in linears):
        remarks.append("unquantised: quantize=4 at load, or `lily convert`, makes it smaller")
    coarse = [w["name"] for w in linears if _kind(w) == "router" and w["format"] == "affine" and w["bits"] < 8]
    if coarse:
        remarks.append(f"{_some(coarse)}: a router of fewer than 8 bits may choose other experts than the original")
    foreign = [w["name"] for w in linears if w["format"] == "affine" and w["parts"]["scales"]["dtype"] != "BF16"]
    if foreign:
        remarks.append(f"{_some(foreign)}: scales that are not bfloat16 are converted at each load, if they can be exactly")
    block = config.quantization
    if block is not None:
        packed = [w for w in linears if w["format"] == "affine" and w["name"] not in block.overrides]
        other = [w["name"] for w in packed if Packing(w["bits"], w["group"]) != block.default]
        if other:
            remarks.append(f"{_some(other)}: config.json says nothing of their width, the shapes decide; older engines take the default")
    rounded = {w["name"]: w["dtype"] for w in weights if w["name"].endswith(".A_log") and w["dtype"] != "f32"}
    if rounded:
        kinds = " and ".join(sorted(set(rounded.values())))
        remarks.append(f"{_some(list(rounded))}: decays stored in {kinds}, the original has float32: long memory is less exact")
    interval = config.layer_types.index(FULL) + 1 if FULL in config.layer_types else 0
    if not interval or any((kind == FULL) != ((i + 1) % interval == 0) for i, kind in enumerate(config.layer_types)):
        remarks.append("layer_types has no regular interval; engines that go by full_attention_interval compute something else")
    return remarks


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
