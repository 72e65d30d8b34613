"""Which files hold a checkpoint's tensors, and whether they hold them all."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from lily import names
from lily.config import ModelConfig, read_json
from lily.errors import CheckpointError
from lily.layout import Linear, Vector, weights_of
from lily.safetensors_header import Tensor, missing_bytes, read_header

log = logging.getLogger("lily")

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.safetensors$")


def find_tensors(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Every text tensor of the checkpoint by canonical name, from validated headers.

    Vision and multi-token-prediction tensors are left out with one log line. A stale index is overruled when the files
    present hold everything. Raises `CheckpointError` for missing files, unknown, missing or doubled tensors.
    """
    weight_map = read_index(directory)
    present, absent = find_files(directory, weight_map)
    try:
        tensors = _canonical_table(present, weight_map, config)
    except CheckpointError as error:
        short = shortfalls(directory, present)
        if not short:
            raise
        listed = [f"{name} lacks {lacking} of {lacking + (directory / name).stat().st_size} bytes" for name, lacking in short.items()]
        raise CheckpointError(
            f"{directory}: {_some(listed)}. The download is incomplete: run it again, or pass refresh=True",
            found=short, expected="whole files", tensor=error.tensor,
        ) from error  # fmt: skip
    missing = missing_weights(tensors, config)
    if absent and missing:
        raise CheckpointError(
            f"{directory}: {len(absent)} weight files are missing: {_some(absent)}. The download is incomplete: run it "
            "again, or pass refresh=True",
            found=sorted(path.name for path in present), expected=absent, tensor=missing[0],
        )  # fmt: skip
    if absent:
        log.warning("%s: the index names absent files (%s), but the others hold every tensor", directory, _some(absent))
    check_names(tensors, config, directory)
    return tensors


def find_files(directory: Path, weight_map: Mapping[str, str] | None) -> tuple[list[Path], list[str]]:
    """The weight files to read and the names of those that should be there and are not."""
    if weight_map is None:
        files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
        if not files:
            others = sorted(p.name for p in directory.glob("*") if p.suffix in (".gguf", ".bin", ".pt", ".pth", ".npz"))
            also = f"; {_some(others)} cannot be read by Lily" if others else ""
            raise CheckpointError(
                f"{directory}: no weight files, expected model.safetensors or model-0000i-of-0000n.safetensors{also}",
                found=others, expected="*.safetensors",
            )  # fmt: skip
        return files, _absent_shards(files)
    listed = sorted(set(weight_map.values()))
    absent = [name for name in listed if not (directory / name).is_file()]
    if not absent:
        return [directory / name for name in listed], []
    present = {directory / name for name in listed if name not in absent} | set(directory.glob("model*.safetensors"))
    return sorted(present), absent


def shortfalls(directory: Path, files: Iterable[Path]) -> dict[str, int]:
    """The bytes that each of these files lacks by its own header; whole files are left out."""
    return {path.relative_to(directory).as_posix(): lacking for path in files if (lacking := missing_bytes(path))}


def read_index(directory: Path) -> dict[str, str] | None:
    """The tensor-to-file map of the index, every file name checked to stay in the directory; None without an index."""
    path = directory / INDEX
    if not path.is_file():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected an object weight_map with at least one tensor", tensor="weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise CheckpointError(
                f"{path}: tensor {tensor} is said to be in {name!r}, expected a .safetensors file of this directory",
                found=name, expected="a file name", tensor=tensor,
            )  # fmt: skip
    return weight_map


def missing_weights(tensors: Iterable[str], config: ModelConfig) -> list[str]:
    """Names of the model's weights that no tensor provides."""
    present = set(tensors)
    return [weight.name for weight in weights_of(config) if present.isdisjoint(_sources(weight))]


def check_names(tensors: Iterable[str], config: ModelConfig, where: object) -> None:
    """Raise `CheckpointError` unless the canonical names are exactly those of the architecture."""
    tensors = list(tensors)
    missing = missing_weights(tensors, config)
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}; config.json describes "
            f"{config.num_layers} layers of {config.model_type}",
            found="nothing of that name", expected=missing, tensor=missing[0],
        )  # fmt: skip
    known = {source for weight in weights_of(config) for source in _accepted(weight)}
    unknown = sorted(name for name in tensors if name not in known)
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} tensors do not belong to a {config.model_type} model: {_some(unknown)}",
            found=unknown, expected=f"only the tensors of {config.num_layers} layers of {config.model_type}", tensor=unknown[0],
        )  # fmt: skip


def fused_expert_name(name: str) -> str | None:
    """The tensor of an original checkpoint that holds this expert weight: gate and up share one."""
    if ".switch_mlp." not in name:
        return None
    kind = "down_proj" if name.endswith(".down_proj") else "gate_up_proj"
    return f"{name.split('.switch_mlp.')[0]}.experts.{kind}"


def _sources(weight: Linear | Vector) -> list[str]:
    """Tensors of which one must be there."""
    if isinstance(weight, Vector):
        return [weight.tensor]
    fused = fused_expert_name(weight.name)
    return [f"{weight.name}.weight", *([fused] if fused else [])]


def _accepted(weight: Linear | Vector) -> list[str]:
    companions = [f"{weight.name}.scales", f"{weight.name}.biases"] if isinstance(weight, Linear) else []
    return _sources(weight) + companions


def is_used(raw: str, config: ModelConfig) -> bool:
    """Whether text generation needs the tensor of this raw name (unknown names count as needed)."""
    return not names.skipped(raw) and not (config.tied and names.canonical(raw).startswith("lm_head."))


def _canonical_table(files: list[Path], weight_map: Mapping[str, str] | None, config: ModelConfig) -> dict[str, Tensor]:
    table: dict[str, Tensor] = {}
    skipped = 0
    for path in files:
        for raw, tensor in read_header(path).items():
            if not is_used(raw, config):
                skipped += 1
                continue
            name = names.canonical(raw)
            table[name] = _choose(table[name], tensor, weight_map or {}) if name in table else tensor
    if skipped:
        log.info("%s: skipped %d tensors that text generation does not use", files[0].parent, skipped)
    return table


def _choose(one: Tensor, other: Tensor, weight_map: Mapping[str, str]) -> Tensor:
    """Of two tensors with one name, the one that the index asks for."""
    listed = [t for t in (one, other) if PurePosixPath(weight_map.get(t.name, "")).name == t.path.name]
    if len(listed) != 1:
        raise CheckpointError(
            f"{other.path}: tensor {other.name} is also in {one.path.name} as {one.name}; remove one of the files",
            found=[str(one.path), str(other.path)], expected="each tensor once", tensor=other.name,
        )  # fmt: skip
    return listed[0]


def _absent_shards(files: list[Path]) -> list[str]:
    """Without an index, the -of-0000n in the names says what should be there."""
    names_present = {path.name for path in files}
    absent: set[str] = set()
    for path in files:
        match = _SHARD.match(path.name)
        if match and int(match[3]) <= 10_000:
            expected = {f"{match[1]}-{i:05d}-of-{match[3]}.safetensors" for i in range(1, int(match[3]) + 1)}
            absent |= expected - names_present
    return sorted(absent)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        name.endswith(".safetensors")
        and "\\" not in name and ":" not in name and "\0" not in name
        and not path.is_absolute() and ".." not in path.parts
    )  # fmt: skip


def _some(items: list[str], limit: int = 4) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
