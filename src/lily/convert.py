"""`lily convert`: an unquantised checkpoint becomes one in MLX's format, matrix by matrix and shard by shard."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lily import hub
from lily.affine import to_bf16
from lily.checkpoint import INDEX
from lily.config import ModelConfig
from lily.errors import CheckpointError, LilyError
from lily.loading import check_positive
from lily.progress import Progress, reporting
from lily.quantization import BITS, GROUPS, Packing, packing_for
from lily.values import read_bytes, read_floats, write_at, write_matrix
from lily.weights import load_weights

SHARD_BYTES = 5_000_000_000
_STAMP = ".lily-convert.json"
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "LICENSE",
)  # fmt: skip
_ITEM_BYTES = {"U32": 4, "F32": 4, "BF16": 2, "F16": 2}


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    bits: int = 4,
    group: int = 64,
    revision: str | None = None,
    progress: Progress = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `source` (an unquantised directory or Hub id) to `destination` as mlx-lm would convert it; returns its path.

    `bits` is 2, 3, 4, 5, 6 or 8, `group` 32, 64 or 128; routers and shared-expert gates have 8 bits in groups of 64.
    Vision and multi-token-prediction tensors are left out. Memory stays at a few blocks of rows. Until everything is
    written it lies in `destination` + ".partial": after an interruption the same call keeps the finished shards.
    Raises `CheckpointError`, `FileExistsError`, `ValueError`.

    >>> import lily, tempfile
    >>> from lily.convert import convert
    >>> try:
    ...     convert(lily.Model.demo().source, tempfile.mkdtemp() + "/4bit", progress=False)
    ... except lily.CheckpointError as error:
    ...     print(error.expected)
    an unquantised checkpoint
    """
    for name, value, accepted in (("bits", bits, BITS), ("group", group, GROUPS)):
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}, expected one of {accepted}")
        if value not in accepted:
            raise ValueError(f"{name} is {value}, expected one of {accepted}")
    check_positive("shard_bytes", shard_bytes)
    hub.check_source(source, revision)
    target = Path(destination).expanduser().absolute()
    if target.exists():
        raise FileExistsError(f"{target} exists; give a new directory")
    directory = hub.resolve(source, revision=revision, progress=progress)
    config = ModelConfig.from_file(directory)
    items = [_Item.make(weight, bits, group) for weight in load_weights(directory, config)]
    shards = _shards(items, shard_bytes)
    partial = target.with_name(f"{target.name}.partial")
    with _claimed(partial, _stamp(items, shards, bits, group)), reporting(progress) as report:
        done, total = 0, sum(item.elements for item in items)
        _check_room(partial, shards)

        def advance(elements: int) -> None:
            nonlocal done
            done += elements
            if report is not None:
                report("convert", done, total)

        for shard in shards:
            if shard.is_written(partial):
                advance(sum(item.elements for item in shard.items))
            else:
                shard.write(partial, advance)
        _write_rest(directory, partial, config, items, shards, Packing(bits, group))
        load_weights(partial, ModelConfig.from_file(partial))  # what was written must be what a reader accepts
        os.rename(partial, target)
    (target / _STAMP).unlink()
    return target


@dataclass(frozen=True)
class _Item:
    """One weight of the source and the tensors that it becomes: `(name, dtype, shape)` by part."""

    weight: Mapping[str, Any]
    packing: Packing | None
    tensors: Mapping[str, tuple[str, str, list[int]]]

    @classmethod
    def make(cls, weight: dict[str, Any], bits: int, group: int) -> _Item:
        name = _mlx_name(weight["name"])
        if weight["kind"] == "vector":
            channels_last = weight["name"].endswith(".conv1d")
            shape = [weight["shape"][0], 4, 1] if channels_last else list(weight["shape"])
            if weight["name"].endswith(".A_log"):  # stays as it is: MLX computes the decay in float32
                return cls(weight, None, {"weight": (name, weight["parts"]["weight"]["dtype"], shape)})
            suffix = "" if name.endswith(".dt_bias") else ".weight"
            return cls(weight, None, {"weight": (name + suffix, "BF16", shape)})
        if weight["format"] == "affine":
            raise CheckpointError(
                f"tensor {weight['name']}: already has {weight['bits']} bits in groups of {weight['group']}; convert the "
                "original checkpoint, a second rounding would only lose more",
                found=f"{weight['bits']} bits", expected="an unquantised checkpoint", tensor=weight["name"],
            )  # fmt: skip
        rows, cols = weight["rows"], weight["cols"]
        lead = [weight["experts"], rows] if ".switch_mlp." in name else [rows]
        packing = packing_for(weight["name"], cols, bits, group)
        if packing is None:
            return cls(weight, None, {"weight": (f"{name}.weight", "BF16", [*lead, cols])})
        groups = [*lead, cols // packing.group]
        codes = (f"{name}.weight", "U32", [*lead, cols * packing.bits // 32])
        return cls(
            weight, packing, {"weight": codes, "scales": (f"{name}.scales", "BF16", groups), "biases": (f"{name}.biases", "BF16", groups)}
        )

    @property
    def elements(self) -> int:
        if self.weight["kind"] == "vector":
            return prod(self.weight["shape"])
        return self.weight["experts"] * self.weight["rows"] * self.weight["cols"]

    @property
    def bytes(self) -> int:
        return sum(_bytes(dtype, shape) for _, dtype, shape in self.tensors.values())

    def write(self, target: int, places: Mapping[str, int], advance: Callable[[int], None]) -> None:
        """Write the item's tensors to a file descriptor at `places`, by tensor name."""
        by_part = {part: places[name] for part, (name, _, _) in self.tensors.items()}
        if self.weight["kind"] == "linear":
            write_matrix(self.weight, self.packing, target, by_part, advance)
            return
        part = self.weight["parts"]["weight"]
        values = read_floats(self.weight, part["offset"], tuple(self.weight["shape"]))
        if self.weight["name"].endswith(".A_log"):
            os.pwrite(target, read_bytes(part["file"], part["offset"], part["bytes"]), by_part["weight"])
        else:
            write_at(target, to_bf16(values + 1 if self.weight["add_one"] else values), by_part["weight"])
        advance(self.elements)


@dataclass(frozen=True)
class _Shard:
    name: str
    items: list[_Item]

    def header(self) -> tuple[bytes, dict[str, int]]:
        """The file's first bytes and where each tensor begins. Larger elements come first, so that all are aligned."""
        tensors = sorted((t for item in self.items for t in item.tensors.values()), key=lambda t: (-_ITEM_BYTES[t[1]], t[0]))
        entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        at = 0
        for name, dtype, shape in tensors:
            end = at + _bytes(dtype, shape)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        places = {name: start + entries[name]["data_offsets"][0] for name, _, _ in tensors}
        return len(text).to_bytes(8, "little") + text, places

    @property
    def bytes(self) -> int:
        return len(self.header()[0]) + sum(item.bytes for item in self.items)

    def is_written(self, directory: Path) -> bool:
        """A shard gets its name when all of it is on the disk."""
        path = directory / self.name
        return path.is_file() and path.stat().st_size == self.bytes

    def write(self, directory: Path, advance: Callable[[int], None]) -> None:
        head, places = self.header()
        unfinished = directory / f"{self.name}.unfinished"
        with unfinished.open("wb", buffering=0) as file:
            file.write(head)
            file.truncate(self.bytes)
            for item in self.items:
                item.write(file.fileno(), places, advance)
            os.fsync(file.fileno())
        os.replace(unfinished, directory / self.name)


def _shards(items: list[_Item], limit: int) -> list[_Shard]:
    groups: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.bytes
    if len(groups) == 1:
        return [_Shard("model.safetensors", items)]
    return [_Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def _stamp(items: list[_Item], shards: list[_Shard], bits: int, group: int) -> dict[str, Any]:
    """What a partial output was made from; finished shards are kept only when it is the same."""
    files = sorted({part["file"] for item in items for part in item.weight["parts"].values()})
    stats = {file: os.stat(file) for file in files}
    return {
        "bits": bits,
        "group": group,
        "files": [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()],
        "shards": [[shard.name, shard.bytes] for shard in shards],
    }


@contextmanager
def _claimed(partial: Path, stamp: dict[str, Any]) -> Iterator[None]:
    """The partial output's directory, for this process alone, emptied when it was made from something else."""
    if partial.exists() and not (partial / _STAMP).is_file() and any(partial.iterdir()):
        raise FileExistsError(f"{partial} exists and is not an unfinished conversion; move it away")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / _STAMP).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LilyError(f"{partial}: another process is writing this conversion") from error
        file.seek(0)
        if file.read() != json.dumps(stamp):
            for path in partial.glob("*.safetensors*"):
                path.unlink()
            file.truncate(0)
            file.write(json.dumps(stamp))
            file.flush()
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise LilyError(f"{partial}: the disk is full; make room and run it again, finished shards are kept") from error


def _check_room(partial: Path, shards: list[_Shard]) -> None:
    needed = sum(shard.bytes for shard in shards if not shard.is_written(partial))
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise LilyError(f"{partial}: {needed} bytes are to be written, {free} are free on that disk")


def _write_rest(source: Path, partial: Path, config: ModelConfig, items: list[_Item], shards: list[_Shard], default: Packing) -> None:
    """Configuration, index, tokenizer and template."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    weight_map = {name: shard.name for shard in shards for item in shard.items for name, _, _ in item.tensors.values()}
    metadata = {"total_size": sum(item.bytes for item in items), "total_parameters": sum(item.elements for item in items)}
    _write_json(partial / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(partial / "config.json", _config(config, items, default))


def _config(config: ModelConfig, items: list[_Item], default: Packing) -> dict[str, Any]:
    """The source's config.json as mlx-lm writes it: nested, without a vision tower, with the quantisation block twice."""
    raw = {key: value for key, value in config.raw.items() if key not in ("_name_or_path", "vision_config")}
    if not isinstance(raw.get("text_config"), dict) or not raw["text_config"]:
        raw = {"architectures": raw.get("architectures"), "text_config": raw}
    raw["text_config"] = dict(raw["text_config"])
    for section in (raw, raw["text_config"]):
        section["tie_word_embeddings"] = config.tied
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = "bfloat16"
    block: dict[str, Any] = {"group_size": default.group, "bits": default.bits, "mode": "affine"}
    for item in items:
        if item.packing not in (None, default) or (item.packing and item.weight["name"].endswith(("mlp.gate", "shared_expert_gate"))):
            block[_mlx_name(item.weight["name"])] = {"group_size": item.packing.group, "bits": item.packing.bits}
    return dict(sorted((raw | {"model_type": config.model_type, "quantization": block, "quantization_config": block}).items()))


def _mlx_name(name: str) -> str:
    return f"language_model.{name}" if name == "lm_head" else f"language_model.model.{name}"


def _bytes(dtype: str, shape: list[int]) -> int:
    return prod(shape) * _ITEM_BYTES[dtype]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
