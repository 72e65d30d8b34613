"""From tensors to the list of weights that the engine takes: bits and group of each, and where its bytes lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lily.checkpoint import find_tensors, fused_expert_name
from lily.config import ModelConfig
from lily.errors import CheckpointError
from lily.layout import Linear, Vector, weights_of
from lily.quantization import BITS, GROUPS, Packing, packing_for
from lily.safetensors_header import Tensor

_FLOATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_CONV = "linear_attn.conv1d"


def load_weights(directory: Path, config: ModelConfig) -> list[dict[str, Any]]:
    """The weights of a checkpoint directory, checked against `config`, in the engine's form.

    Bits and group size follow from the shapes; the quantisation block of config.json is only compared with them.
    Raises `CheckpointError` naming the tensor. Reads headers, no weights.
    """
    tensors = find_tensors(directory, config)
    original = _is_original(tensors)
    result: list[dict[str, Any]] = []
    packings: dict[str, Packing | None] = {}
    for weight in weights_of(config):
        if isinstance(weight, Vector):
            result.append(_vector(weight, tensors[weight.tensor], add_one=original and weight.centred))
        else:
            entry, packings[weight.name] = _linear(weight, tensors)
            result.append(entry)
    _cross_check(packings, config)
    return result


def abstract_weights(config: ModelConfig) -> list[dict[str, Any]]:
    """The weights that `config` implies, without files: what `lily.plan` counts when there is only a config.json.

    Without a quantisation block: 4 bits in groups of 64, router and shared-expert gate 8 bits.
    """
    result: list[dict[str, Any]] = []
    for weight in weights_of(config):
        if isinstance(weight, Vector):
            dtype = "f32" if weight.name.endswith(".A_log") else "bf16"
            result.append({"name": weight.name, "kind": "vector", "dtype": dtype, "shape": list(weight.shape), "add_one": False})
            continue
        packing = _implied(weight, config)
        layout = {"format": "affine", "bits": packing.bits, "group": packing.group} if packing else {"format": "bf16"}
        result.append(_entry(weight, layout))
    return result


def _implied(weight: Linear, config: ModelConfig) -> Packing | None:
    block = config.quantization
    if block is None:
        return packing_for(weight.name, weight.cols, 4, 64)
    packing = block.overrides.get(weight.name, block.default)
    # MLX leaves a matrix alone when the group does not divide its columns.
    return None if packing is None or weight.cols % packing.group else packing


def _entry(weight: Linear, layout: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": weight.name, "kind": "linear", "rows": weight.rows, "cols": weight.cols, "experts": weight.experts,
        "expert_stride_rows": weight.rows, "bits": 0, "group": 0, **layout, **more,
    }  # fmt: skip


def _part(tensor: Tensor, *, skip: int = 0, size: int | None = None) -> dict[str, Any]:
    return {
        "file": str(tensor.path), "offset": tensor.offset + skip, "bytes": tensor.bytes if size is None else size,
        "file_bytes": tensor.file_bytes, "dtype": tensor.dtype,
    }  # fmt: skip


def _is_original(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the checkpoint has the original, unconverted form: only the convolution's shape says so."""
    shapes = {name: t.shape for name, t in tensors.items() if name.endswith(f"{_CONV}.weight")}
    kinds = {len(shape) == 3 and shape[-1] != 1 for shape in shapes.values()}
    if len(kinds) > 1:
        name = next(iter(shapes))
        raise CheckpointError(
            f"tensor {name}: some convolutions are converted ([C, 4, 1]) and some are original ([C, 1, 4])",
            found=shapes[name], expected="one layout for all", tensor=name,
        )  # fmt: skip
    return kinds == {True}


def _vector(weight: Vector, tensor: Tensor, *, add_one: bool) -> dict[str, Any]:
    accepted = [weight.shape]
    if weight.name.endswith(_CONV):
        channels, taps, _ = weight.shape
        accepted.append((channels, 1, taps))
    if tensor.shape not in accepted:
        raise _bad(tensor, "shape", list(tensor.shape), " or ".join(str(list(shape)) for shape in accepted))
    return {
        "name": weight.name, "kind": "vector", "dtype": _float(tensor), "shape": list(tensor.shape),
        "add_one": add_one, "parts": {"weight": _part(tensor)},
    }  # fmt: skip


def _linear(weight: Linear, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], Packing | None]:
    codes = tensors.get(f"{weight.name}.weight")
    scales, biases = tensors.get(f"{weight.name}.scales"), tensors.get(f"{weight.name}.biases")
    if codes is None:
        fused = tensors[fused_expert_name(weight.name) or weight.name]
        return _fused(weight, fused), None
    if scales is None:
        if codes.dtype not in _FLOATS:
            raise _bad(codes, "dtype", codes.dtype, "a float type, or U32 codes with scales and biases")
        if biases is not None:
            raise _bad(biases, "companion", "no scales", f"{weight.name}.scales")
        _expect_shape(codes, weight.shape)
        return _entry(weight, {"format": _float(codes)}, parts={"weight": _part(codes)}), None
    if scales.dtype not in _FLOATS:
        raise _bad(scales, "dtype", scales.dtype, "BF16 (affine mode; mxfp4, mxfp8 and nvfp4 are not supported)")
    if biases is None:
        raise _bad(scales, "companion", "no biases", f"{weight.name}.biases (affine mode)")
    packing = _infer(weight, codes, scales, biases)
    parts = {"weight": _part(codes), "scales": _part(scales), "biases": _part(biases)}
    return _entry(weight, {"format": "affine", "bits": packing.bits, "group": packing.group}, parts=parts), packing


def _infer(weight: Linear, codes: Tensor, scales: Tensor, biases: Tensor) -> Packing:
    """Bits from the packed width, group from the number of scales in a row."""
    if codes.dtype != "U32":
        raise _bad(codes, "dtype", codes.dtype, "U32 codes")
    if biases.dtype != scales.dtype:
        raise _bad(biases, "dtype", biases.dtype, f"{scales.dtype}, as the scales have")
    lead = weight.shape[:-1]
    if len(codes.shape) != len(lead) + 1 or codes.shape[:-1] != lead:
        raise _bad(codes, "shape", list(codes.shape), f"{list(lead)} rows of packed codes")
    words, groups = codes.shape[-1], scales.shape[-1] if scales.shape else 0
    bits, odd = divmod(words * 32, weight.cols)
    if odd or bits not in BITS:
        widths = [weight.cols * b // 32 for b in BITS]
        raise _bad(codes, "packed width", words, f"one of {widths} words for {weight.cols} columns of {BITS} bits")
    if groups == 0 or weight.cols % groups or weight.cols // groups not in GROUPS:
        raise _bad(scales, "scales in a row", groups, f"{weight.cols} columns over a group of {GROUPS}")
    _expect_shape(scales, (*lead, groups))
    _expect_shape(biases, (*lead, groups))
    return Packing(bits, weight.cols // groups)


def _fused(weight: Linear, tensor: Tensor) -> dict[str, Any]:
    """An expert weight inside an original checkpoint's fused tensor: rows 0..I-1 gate, I..2I-1 up."""
    halves = 1 if weight.name.endswith(".down_proj") else 2
    _expect_shape(tensor, (weight.experts, halves * weight.rows, weight.cols))
    form = _float(tensor)
    row_bytes = weight.cols * (4 if form == "f32" else 2)
    skip = weight.rows * row_bytes if weight.name.endswith(".up_proj") else 0
    size = ((weight.experts - 1) * halves + 1) * weight.rows * row_bytes
    part = _part(tensor, skip=skip, size=size)
    return _entry(weight, {"format": form, "expert_stride_rows": halves * weight.rows}, parts={"weight": part})


def _cross_check(packings: Mapping[str, Packing | None], config: ModelConfig) -> None:
    """Each explicit entry of the quantisation block must agree; the defaults must fit at least one weight.

    A weight with no entry of its own may differ from the defaults: its shapes are unambiguous, and MLX reads it so.
    """
    block = config.quantization
    if block is None:
        return
    implicit: list[tuple[str, Packing]] = []
    for name, found in packings.items():
        if name in block.overrides:
            expected = block.overrides[name]
            if found != expected:
                raise _disagree(name, found, expected)
        elif found is not None:
            implicit.append((name, found))
    if implicit and all(found != block.default for _, found in implicit):
        raise _disagree(*implicit[0], block.default)


def _disagree(name: str, found: Packing | None, expected: Packing | None) -> CheckpointError:
    def text(packing: Packing | None) -> str:
        return f"{packing.bits} bits in groups of {packing.group}" if packing else "unquantised"

    return CheckpointError(
        f"tensor {name}: the file has it {text(found)}, config.json says {text(expected)}; they do not belong together",
        found=text(found), expected=text(expected), tensor=name,
    )  # fmt: skip


def _expect_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise _bad(tensor, "shape", list(tensor.shape), list(shape))


def _float(tensor: Tensor) -> str:
    if tensor.dtype not in _FLOATS:
        raise _bad(tensor, "dtype", tensor.dtype, "BF16, F16 or F32")
    return _FLOATS[tensor.dtype]


def _bad(tensor: Tensor, what: str, found: object, expected: object) -> CheckpointError:
    return CheckpointError(
        f"{tensor.path}: tensor {tensor.name}: {what} is {found}, expected {expected}",
        found=found, expected=expected, tensor=tensor.name,
    )  # fmt: skip
