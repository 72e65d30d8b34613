"""Checkpoints made from the fixtures: tensors as `{name: (dtype, shape, bytes)}`, changed and written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from checkpoints import FIXTURES

from lily.affine import from_bf16, to_bf16

Tensors = dict[str, tuple[str, list[int], bytes]]
_SMALL = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def read_tensors(name: str) -> Tensors:
    raw = (FIXTURES / name / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    return {key: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for key, e in header.items()}


def read_config(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


def write_file(path: Path, tensors: Tensors) -> None:
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def write(directory: Path, name: str, *, tensors: Tensors | None = None, config: dict | None = None) -> Path:
    """A copy of a fixture with these tensors and this config.json."""
    directory.mkdir(exist_ok=True)
    for file in _SMALL:
        if (FIXTURES / name / file).is_file():
            shutil.copyfile(FIXTURES / name / file, directory / file)
    (directory / "config.json").write_text(json.dumps(read_config(name) if config is None else config))
    write_file(directory / "model.safetensors", read_tensors(name) if tensors is None else tensors)
    return directory


def values(tensor: tuple[str, list[int], bytes]) -> np.ndarray:
    """float32 values of a float tensor."""
    dtype, shape, data = tensor
    raw = np.frombuffer(data, {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]).reshape(shape)
    return from_bf16(raw) if dtype == "BF16" else raw.astype(np.float32)


def stored(array: np.ndarray, dtype: str) -> tuple[str, list[int], bytes]:
    """float32 values as a tensor of this dtype."""
    data = to_bf16(array) if dtype == "BF16" else array.astype({"F16": np.float16, "F32": np.float32}[dtype])
    return dtype, list(array.shape), data.tobytes()
