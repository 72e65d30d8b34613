"""The quantization block of config.json: what each linear layer claims about its bits and group size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lily.errors import CheckpointError
from lily.names import canonical

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Packing:
    """Affine codes of `bits` bits with one scale and bias for each `group` columns."""

    bits: int
    group: int


@dataclass(frozen=True)
class Quantization:
    """The block's defaults and its entries by canonical module name; None marks a module left unquantised."""

    default: Packing
    overrides: Mapping[str, Packing | None]

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Quantization | None:
        """Read `quantization` (or its duplicate `quantization_config`); None when the checkpoint has neither."""
        block = raw.get("quantization")
        if block is None:
            block = raw.get("quantization_config")
        if block is None:
            return None
        if not isinstance(block, dict):
            raise _bad("quantization", block, "an object")
        if block.get("quant_method") not in (None, "mlx"):
            raise _bad("quantization_config.quant_method", block["quant_method"], "an MLX affine checkpoint")
        overrides: dict[str, Packing | None] = {}
        for key, value in block.items():
            name = canonical(key.removesuffix(".weight"))
            if value is False:
                overrides[name] = None
            elif isinstance(value, dict):
                overrides[name] = _packing(value, key)
        return cls(_packing(block, "quantization"), overrides)


def packing_for(name: str, cols: int, bits: int, group: int) -> Packing | None:
    """What mlx-lm makes of a matrix with this canonical name; None leaves it alone, as when the group does not divide it.

    Routers and shared-expert gates get 8 bits in groups of 64, whatever the others have.
    """
    gate = name.endswith((".mlp.gate", ".mlp.shared_expert_gate"))
    packing = Packing(8, 64) if gate else Packing(bits, group)
    return None if cols % group or cols % packing.group else packing


def _packing(entry: Mapping[str, Any], where: str) -> Packing:
    """Missing values are those of affine mode, as MLX has it, not the block's."""
    mode = entry.get("mode", "affine")
    if mode != "affine":
        raise _bad(f"{where}.mode", mode, '"affine" with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128')
    bits, group = entry.get("bits", 4), entry.get("group_size", 64)
    if type(bits) is not int or bits not in BITS:
        raise _bad(f"{where}.bits", bits, f"one of {BITS}")
    if type(group) is not int or group not in GROUPS:
        raise _bad(f"{where}.group_size", group, f"one of {GROUPS}")
    return Packing(bits, group)


def _bad(name: str, found: object, expected: str) -> CheckpointError:
    return CheckpointError(f"config.json: {name} is {str(found)[:80]!r}, expected {expected}", found=found, expected=expected, tensor=name)
