"""A fixture's files, copied with changes: headers, configurations, tensors."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from lily.checkpoint import INDEX
from lily.config import ModelConfig
from lily.weights import load_weights

FIXTURES = Path(__file__).parent / "data" / "fixtures"
MOE = FIXTURES / "a_moe_q4g64"
DENSE = FIXTURES / "c_dense_q4g64_tied"
ROUTER = "language_model.model.layers.0.mlp.gate"


def read(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def copy(tmp_path, *, source=MOE, tensors=None, config=None, extra=None, index=False):
    """A copy of a fixture; `tensors` edits the header, `config` config.json, `extra` adds small tensors."""
    header, data = read(source / "model.safetensors")
    for name, (dtype, shape, size) in (extra or {}).items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += bytes(size)
    if tensors is not None:
        header = tensors(header) or header
    write(tmp_path / "model.safetensors", header, data)
    parsed = json.loads((source / "config.json").read_text())
    if config is not None:
        config(parsed)
    (tmp_path / "config.json").write_text(json.dumps(parsed))
    for name in ("tokenizer.json", "tokenizer_config.json", *([INDEX] if index else [])):
        shutil.copy(source / name, tmp_path / name)
    return tmp_path


def load(directory):
    return load_weights(directory, ModelConfig.from_file(directory))


def without_place(weights):
    return [{key: value for key, value in weight.items() if key != "parts"} for weight in weights]


def sizes(weights):
    return [(w["name"], {k: (p["offset"], p["bytes"]) for k, p in w["parts"].items()}, w.get("add_one")) for w in weights]
