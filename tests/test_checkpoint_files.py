"""The files of a checkpoint: headers, shards and the index."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

import pytest
from checkpoint_files import MOE, copy, load, read, write

from lily import CheckpointError
from lily.checkpoint import INDEX, read_index
from lily.safetensors_header import read_header

# Headers


def header_of(**entries):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}} | entries


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b"[" * 100_000, "JSON"),
        (b'{"x":1,"x":2}', "twice"),
        (header_of(y=3), "entry"),
        (header_of(y={"dtype": "F99", "shape": [1], "data_offsets": [8, 12]}), "dtype"),
        (header_of(y={"dtype": "F32", "shape": [-1], "data_offsets": [8, 12]}), "shape"),
        (header_of(y={"dtype": "F32", "shape": [True], "data_offsets": [8, 12]}), "shape"),
        (header_of(y={"dtype": "F32", "shape": [1 << 60], "data_offsets": [8, 12]}), "shape"),
        (header_of(y={"dtype": "F32", "shape": [1] * 99, "data_offsets": [8, 12]}), "shape"),
        (header_of(y={"dtype": "F32", "shape": [1], "data_offsets": [8]}), "data_offsets"),
        (header_of(y={"dtype": "F32", "shape": [1], "data_offsets": [12, 8]}), "range within"),
        (header_of(y={"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}), "data_offsets"),
        (header_of(y={"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}), "range within"),
        (header_of(y={"dtype": "F32", "shape": [2], "data_offsets": [8, 12]}), "size"),
        (header_of(y={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}), "overlap"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(tmp_path, header, message):
    path = tmp_path / "x.safetensors"
    write(path, header, bytes(12))
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 200) + b"{}"])
def test_a_file_too_short_for_its_header_is_refused(tmp_path, raw):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="header"):
        read_header(path)


def test_unaligned_offsets_empty_tensors_and_metadata_are_fine(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {"__metadata__": {"format": "mlx"}, "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
              "b": {"dtype": "F32", "shape": [1], "data_offsets": [3, 7]},
              "c": {"dtype": "F32", "shape": [0, 4], "data_offsets": [7, 7]}}  # fmt: skip
    write(path, header, bytes(7))
    assert read_header(path)["b"].offset == path.stat().st_size - 4


@pytest.mark.parametrize("kept", [7, 100, -1000])
def test_a_file_cut_short_is_named_with_the_bytes_it_lacks(tmp_path, kept):
    copy(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors lacks \d+ of \d+ bytes.*download") as caught:
        load(tmp_path)
    # The header says how long the file should be; without all of it, only that more is missing.
    lacks = caught.value.found["model.safetensors"]
    assert lacks == 1000 and caught.value.tensor if kept < 0 else 0 < lacks <= len(whole) - kept


# Files and index


def split(tmp_path):
    """The fixture in two shards with an index."""
    copy(tmp_path)
    header, data = read(tmp_path / "model.safetensors")
    header.pop("__metadata__")
    (tmp_path / "model.safetensors").unlink()
    names, weight_map = sorted(header), {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        shard, at, blob = f"model-0000{i}-of-00002.safetensors", 0, b""
        entries = {}
        for name in part:
            begin, end = header[name]["data_offsets"]
            entries[name] = header[name] | {"data_offsets": [at, at + end - begin]}
            blob, at = blob + data[begin:end], at + end - begin
            weight_map[name] = shard
        write(tmp_path / shard, entries, blob)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def test_shards_load_with_and_without_an_index(tmp_path):
    weights = load(split(tmp_path))
    assert {Path(p["file"]).name for w in weights for p in w["parts"].values()} == {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    (tmp_path / INDEX).unlink()
    assert load(tmp_path) == weights


@pytest.mark.parametrize("index", [True, False])
def test_an_absent_shard_is_named(tmp_path, index):
    split(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    if not index:
        (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*download") as caught:
        load(tmp_path)
    assert caught.value.expected == ["model-00002-of-00002.safetensors"]


def test_a_stale_index_is_overruled_by_complete_files(tmp_path, caplog):
    copy(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors",
                                                             "b": "model-00002-of-00002.safetensors"}}))  # fmt: skip
    with caplog.at_level(logging.WARNING, "lily"):
        assert len(load(tmp_path)) == len(load(MOE))
    assert "index names absent files" in caplog.text


def test_oddly_named_files_load_when_there_is_nothing_else(tmp_path):
    copy(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert len(load(tmp_path)) == len(load(MOE))


def test_files_beside_the_model_are_left_alone(tmp_path):
    copy(tmp_path)
    (tmp_path / "optiq.safetensors").write_bytes(b"not a checkpoint")
    assert len(load(tmp_path)) == len(load(MOE))


def test_no_weights_at_all(tmp_path):
    copy(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"model\.gguf cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "C:x.safetensors", "x.bin", 3])
def test_an_index_cannot_lead_out_of_the_directory(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="expected a .safetensors file of this directory"):
        read_index(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError):
        read_index(tmp_path)
