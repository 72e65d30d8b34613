"""Hostile files: whatever a header, configuration, index or tokenizer says, the answer is a result or a typed error.

The same properties run longer in the soak profile (SOAK_MINUTES).
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import FIXTURES, MOE, ORIGINAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from variants import read_config, read_tensors, write

import lily
from lily import CheckpointError, LilyError
from lily._engine import native
from lily.checkpoint import INDEX, find_files, read_index
from lily.config import ModelConfig
from lily.safetensors_header import missing_bytes, read_header
from lily.template import ChatTemplate
from lily.testing import scripted
from lily.tokenizer import Tokenizer
from lily.weights import abstract_weights, load_weights

SOAK = int(1500 * float(os.environ.get("SOAK_MINUTES", "1")))
SECONDS = 10  # far above what any of these takes; a hang, or work that a number in the file asked for, takes longer


def prove(name, examples, prop, *strategies):
    """Two tests of one property: a short one for the suite and a long one for the soak profile."""

    def with_settings(count):
        checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

        @settings(max_examples=count, deadline=None, suppress_health_check=checks, database=None)
        @given(st.tuples(*strategies))
        def test(values):
            start = time.monotonic()
            prop(*values)
            assert time.monotonic() - start < SECONDS

        return test

    globals()[f"test_{name}"] = with_settings(examples)
    globals()[f"test_{name}_at_length"] = pytest.mark.soak(with_settings(SOAK))


numbers = st.one_of(
    st.integers(-2, 70), st.integers(), st.sampled_from([2**31, 2**32, 2**48, 2**63, 2**64, 10**30]), st.floats(), st.booleans(), st.none()
)
scalars = st.one_of(numbers, st.text(max_size=8), st.sampled_from(["BF16", "U32", "F32", "affine", "linear_attention", "full_attention"]))
trees = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)), max_leaves=8
)
dtypes = st.sampled_from(["BF16", "F16", "F32", "U32", "U8", "I64", "F8_E4M3", "F4", "BOOL", "X"])


def mutated(value, path, replacement):
    """`value` with the place that `path` leads to (indices modulo the size) replaced."""
    value = copy.deepcopy(value)
    at, parent, key = value, None, None
    for step in path:
        if isinstance(at, dict) and at:
            parent, key = at, sorted(at, key=str)[step % len(at)]
        elif isinstance(at, list) and at:
            parent, key = at, step % len(at)
        else:
            break
        at = parent[key]
    if parent is None:
        return replacement
    parent[key] = replacement
    return value


paths = st.lists(st.integers(0, 1000), min_size=1, max_size=6)
changes = st.lists(st.tuples(paths, trees), min_size=1, max_size=3)


def change(value, edits):
    for path, replacement in edits:
        value = mutated(value, path, replacement)
    return value


# Headers


def header_is_read_or_refused(raw):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(raw)
        assert missing_bytes(path) >= 0
        try:
            tensors = read_header(path)
        except CheckpointError:
            return
        for tensor in tensors.values():
            assert 0 <= tensor.offset <= tensor.offset + tensor.bytes <= len(raw) == tensor.file_bytes
            assert len(tensor.shape) <= 8


def with_length(text, data, length):
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


entries = st.fixed_dictionaries(
    {"dtype": st.one_of(dtypes, scalars), "shape": st.one_of(st.lists(st.one_of(st.integers(0, 4), numbers), max_size=10), scalars),
     "data_offsets": st.one_of(st.lists(st.one_of(st.integers(0, 40), numbers), max_size=3), scalars)}
)  # fmt: skip
headers = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda tree: json.dumps(tree).encode(), trees),
    st.builds(lambda h: json.dumps(h).encode(), st.dictionaries(st.text(max_size=6), entries, max_size=4)),
)
lengths = st.one_of(st.none(), st.integers(0, 100), st.sampled_from([2**31, 2**40, 2**63, 2**64 - 1]))
prove(
    "any_header",
    250,
    header_is_read_or_refused,
    st.one_of(st.binary(max_size=40), st.builds(with_length, headers, st.binary(max_size=40), lengths)),
)


# Whole checkpoints whose header was changed: what still loads also runs


CONFIG = ModelConfig.from_file(FIXTURES / MOE)
RAW = (FIXTURES / MOE / "model.safetensors").read_bytes()
HEADER_BYTES = int.from_bytes(RAW[:8], "little")
HEADER = json.loads(RAW[8 : 8 + HEADER_BYTES])
HEADER.pop("__metadata__", None)
DATA = RAW[8 + HEADER_BYTES :]
NAMES = sorted(HEADER)
PARTS = ("dtype", "shape", "data_offsets")


def field_value(name, part, kind, amount):
    """A field of a tensor's entry, changed in a way that may just pass."""
    value = copy.deepcopy(HEADER[name][part])
    if part == "dtype":
        return ["BF16", "F16", "F32", "U32", "U8", "I32"][amount % 6]
    index = amount % len(value)
    if kind == "shift":
        return [n + amount for n in value]
    if kind == "scale":
        value[index] *= amount % 5
    if kind == "swap":
        value.reverse()
    if kind == "merge" and len(value) > 1:
        value[:2] = [value[0] * value[1]]
    return value


def checkpoint_is_run_or_refused(edits, rename):
    header = copy.deepcopy(HEADER)
    for name_index, part, kind, amount in edits:
        name = NAMES[name_index % len(NAMES)]
        header[name][part] = field_value(name, part, kind, amount)
    if rename is not None:
        one = NAMES[rename[0] % len(NAMES)]
        alike = [name for name in NAMES if HEADER[name]["shape"] == HEADER[one]["shape"]] if rename[2] else NAMES
        other = alike[rename[1] % len(alike)]
        header[one], header[other] = header[other], header[one]
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + DATA)
        try:
            weights = load_weights(Path(folder), CONFIG)
        except CheckpointError as error:
            assert str(error)
            return
        with_engine(weights)


def with_engine(weights):
    """The engine takes what Python lets through; a token is read, whatever its numbers are."""
    from lily.staging import staged

    try:
        with staged(weights) as ready:
            engine = native().Model(CONFIG.spec(), ready, "cpu", 64, None, None)
    except LilyError:
        return
    session = engine.session()
    session.append(np.array([1, 2], np.int32), None)
    session.close()
    engine.close()


edits = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from(PARTS), st.sampled_from(["shift", "scale", "swap", "merge"]), st.integers(-3000, 3000)),
    max_size=3,
)
swaps = st.one_of(st.none(), st.tuples(st.integers(0, 500), st.integers(0, 500), st.booleans()))
prove("any_change_to_a_whole_header", 60, checkpoint_is_run_or_refused, edits, swaps)


def any_values_are_computed_with(spans, temperature):
    """NaN, infinity and noise in the tensors: what comes out is a token of the vocabulary or a typed error."""
    data = bytearray(RAW)
    for start, length, fill in spans:
        start = 8 + HEADER_BYTES + start % len(DATA)
        length = min(length, len(RAW) - start)
        data[start : start + length] = (fill * length)[:length] if fill else random.Random(length).randbytes(length)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "tokenizer.json"):
            shutil.copyfile(FIXTURES / MOE / name, Path(folder) / name)
        (Path(folder) / "model.safetensors").write_bytes(data)
        with lily.Model.from_pretrained(folder, progress=False) as model:
            try:
                answer = model.generate([1, 2, 3], max_tokens=2, temperature=temperature, seed=1, ignore_eos=True, logprobs=3)
                assert all(0 <= token < CONFIG.vocab_size for token in answer.tokens)
                model.score([1, 2, 3])
            except LilyError:
                pass
        lily.inspect(folder)


spans = st.lists(
    st.tuples(st.integers(0, 1 << 24), st.integers(1, 1 << 19), st.sampled_from([b"\xff", b"\x80\x7f", b"\x80\xff", b"\0", b"\x7f", b""])),
    min_size=1,
    max_size=4,
)
prove("any_values", 40, any_values_are_computed_with, spans, st.sampled_from([0.0, 1.0]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, len(RAW) - 1))
def test_any_cut_of_a_file_is_refused_with_the_bytes_it_lacks(kept):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(RAW[:kept])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_weights(Path(folder), CONFIG)
        assert missing_bytes(path) > 0


# Configurations


def config_is_planned_or_refused(name, edits):
    raw = change(CONFIGS[name], edits)
    try:
        config = ModelConfig.from_dict(raw)
        weights = abstract_weights(config)
        native().plan(config.spec(), weights)
    except LilyError as error:
        assert len(str(error)) < 1000


CONFIGS = {name: read_config(name) for name in (MOE, ORIGINAL)}
sizes = st.sampled_from([0, 1, 2, 3, 63, 64, 96, 255, 256, 1000, 4096, 16384, 131072, 2**20])
config_edits = st.lists(st.tuples(paths, st.one_of(sizes, trees)), min_size=1, max_size=3)
prove("any_change_to_a_configuration", 100, config_is_planned_or_refused, st.sampled_from([MOE, ORIGINAL]), config_edits)

FIELDS = sorted(CONFIGS[MOE]["text_config"])


def sizes_are_planned_or_refused(values):
    raw = copy.deepcopy(CONFIGS[MOE])
    for index, value in values:
        raw["text_config"][FIELDS[index % len(FIELDS)]] = value
    raw["text_config"].pop("layer_types", None)
    config_is_planned_or_refused_raw(raw)


def config_is_planned_or_refused_raw(raw):
    try:
        config = ModelConfig.from_dict(raw)
        native().plan(config.spec(), abstract_weights(config))
    except LilyError:
        pass


prove("any_sizes", 100, sizes_are_planned_or_refused, st.lists(st.tuples(st.integers(0, 100), sizes), min_size=1, max_size=4))


# Index files


def index_stays_in_the_directory(tree, name):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "inside"
        directory.mkdir()
        (Path(folder) / "outside.safetensors").write_bytes(RAW)
        value = {"weight_map": {"a": name}} if name is not None else tree
        (directory / INDEX).write_text(json.dumps(value))
        try:
            files, absent = find_files(directory, read_index(directory))
        except CheckpointError:
            return
        assert all(path.resolve().is_relative_to(directory.resolve()) for path in files)
        assert all((directory / name).resolve().is_relative_to(directory.resolve()) for name in absent)


escapes = st.lists(st.sampled_from(["..", "/", "outside", "inside", ".", "\\", "C:", "model", "~", "\0"]), max_size=6)
hostile_names = st.builds(lambda parts, tail: "".join(parts) + tail, escapes, st.sampled_from([".safetensors", "", ".bin"]))
prove("any_index", 200, index_stays_in_the_directory, trees, st.one_of(st.none(), hostile_names, st.text(max_size=12), scalars))


# Tokenizers, templates, generation settings


TOKENIZER = json.loads((FIXTURES / MOE / "tokenizer.json").read_text())


def tokenizer_is_read_or_refused(edits, config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(change(TOKENIZER, edits)))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        try:
            tokenizer = Tokenizer.from_directory(Path(folder))
            tokenizer.end_tokens()
            ChatTemplate.from_directory(Path(folder))
        except LilyError:
            return
        assert isinstance(tokenizer.decode([0, 1, 2**31 - 1]), str)


token_configs = st.one_of(
    trees,
    st.dictionaries(st.sampled_from(["eos_token", "pad_token", "chat_template", "added_tokens_decoder", "extra_special_tokens"]), trees),
)
prove("any_tokenizer", 60, tokenizer_is_read_or_refused, changes, token_configs)


def generation_config_is_used_or_refused(config):
    try:
        model = scripted("x", generation_config=config)
        model.generate("a", max_tokens=2)
    except (LilyError, ValueError):
        return


generation = st.dictionaries(
    st.sampled_from(["eos_token_id", "temperature", "top_k", "top_p", "min_p", "do_sample", "repetition_penalty", "x"]),
    st.one_of(trees, st.lists(st.integers(-5, 7000), max_size=3)),
)
prove("any_generation_config", 40, generation_config_is_used_or_refused, generation)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX, "model.safetensors"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"[" * 200_000, b'{"a":' * 50_000, b"\xff\xfe", b"null", b"1e999", b'{"weight_map":{"a":1}}'],
    ids=["empty", "zeros", "lists", "objects", "no utf-8", "null", "infinity", "a map"],
)
def test_a_file_of_something_else_is_refused_or_left_alone(tmp_path, name, content):
    write(tmp_path, MOE)
    (tmp_path / name).write_bytes(content)
    try:
        lily.Model.from_pretrained(tmp_path, progress=False).close()
    except LilyError as error:
        assert len(str(error)) < 1000
    report = lily.inspect(tmp_path)
    assert report.ok or all(report.problems)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", INDEX])
def test_a_directory_or_a_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    write(tmp_path, MOE)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    if name != INDEX:  # a directory is no index
        with pytest.raises(LilyError):
            lily.Model.from_pretrained(tmp_path, progress=False)


def test_a_file_that_grows_or_shrinks_under_the_loader_is_refused(tmp_path):
    write(tmp_path, MOE)
    weights = load_weights(tmp_path, CONFIG)
    for size in (len(RAW) - 5000, len(RAW) + 5000):
        os.truncate(tmp_path / "model.safetensors", size)
        with pytest.raises(CheckpointError):
            native().Model(CONFIG.spec(), weights, "cpu", 64, None, None)


def test_a_config_that_asks_for_a_huge_model_allocates_nothing():
    raw = copy.deepcopy(CONFIGS[MOE])
    raw["text_config"] |= {
        "hidden_size": 131072,
        "vocab_size": 1 << 22,
        "num_experts": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 131072,
    }
    start = time.monotonic()
    config_is_planned_or_refused_raw(raw)
    assert time.monotonic() - start < 2


def test_skipped_tensors_are_checked_as_well(tmp_path):
    tensors = read_tensors(MOE) | {"vision_tower.x": ("BF16", [1 << 40], bytes(4))}
    with pytest.raises(CheckpointError, match=r"vision_tower\.x"):
        load_weights(write(tmp_path, MOE, tensors=tensors), CONFIG)
    shutil.rmtree(tmp_path)
