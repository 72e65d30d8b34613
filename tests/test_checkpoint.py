"""Checkpoints: what loads, in which forms, and what is refused before any weight is read."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lily
from lily import CheckpointError, hub
from lily.checkpoint import INDEX, read_index
from lily.config import ModelConfig
from lily.convert import convert
from lily.layout import Linear, weights_of
from lily.names import canonical, skipped
from lily.safetensors_header import read_header
from lily.weights import abstract_weights, load_weights

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


# What loads


@pytest.mark.parametrize("fixture", [MOE, DENSE])
def test_the_weights_are_those_that_the_configuration_implies(fixture):
    weights = load(fixture)
    assert without_place(weights) == without_place(abstract_weights(ModelConfig.from_file(fixture)))
    header = read_header(fixture / "model.safetensors")
    assert sum(len(weight["parts"]) for weight in weights) == len(header)
    assert ("lm_head" in [w["name"] for w in weights]) == (fixture is MOE)


def test_bits_group_and_place_of_a_tensor():
    router = next(w for w in load(MOE) if w["name"] == "layers.0.mlp.gate")
    assert (router["bits"], router["group"], router["rows"], router["cols"]) == (8, 64, 16, 256)
    header, data = read(MOE / "model.safetensors")
    begin, end = header[f"{ROUTER}.weight"]["data_offsets"]
    part = router["parts"]["weight"]
    assert part["bytes"] == end - begin and part["dtype"] == "U32"
    assert part["file_bytes"] == (MOE / "model.safetensors").stat().st_size
    assert part["offset"] == part["file_bytes"] - len(data) + begin


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "language_model.model."])
def test_every_wrapper_prefix_loads(tmp_path, prefix):
    def rename(header):
        return {name.replace("language_model.model.", prefix).replace("language_model.lm_head", "lm_head"): entry
                for name, entry in header.items()}  # fmt: skip

    assert without_place(load(copy(tmp_path, tensors=rename))) == without_place(load(MOE))


def test_vision_and_mtp_tensors_are_skipped_with_one_line_and_shift_no_norm(tmp_path, caplog):
    extra = {
        "vision_tower.blocks.0.attn.qkv.weight": ("BF16", [4, 4], 32),
        "model.visual.blocks.0.norm1.weight": ("F8_E4M3", [4], 4),
        "language_model.mtp.norm.weight": ("BF16", [256], 512),
        "mtp.layers.0.input_layernorm.weight": ("BF16", [256], 512),
    }
    with caplog.at_level(logging.INFO, "lily"):
        weights = load(copy(tmp_path, extra=extra))
    assert [r.name for r in caplog.records].count("lily") == 1 and "skipped 4" in caplog.text
    assert not any(weight.get("add_one") for weight in weights)
    assert without_place(weights) == without_place(load(MOE))


def test_the_convolution_layout_alone_decides_the_norms(tmp_path):
    def original(header):
        for name, entry in header.items():
            if name.endswith("conv1d.weight"):
                entry["shape"] = [entry["shape"][0], 1, 4]

    weights = load(copy(tmp_path, tensors=original))
    shifted = {w["name"].split(".")[-1] for w in weights if w.get("add_one")}
    assert shifted == {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"}
    assert not any(w["add_one"] for w in weights if w["name"].endswith("linear_attn.norm"))


def test_mixed_convolution_layouts_are_refused(tmp_path):
    def one(header):
        header["language_model.model.layers.0.linear_attn.conv1d.weight"]["shape"] = [1024, 1, 4]

    with pytest.raises(CheckpointError, match="some are original"):
        load(copy(tmp_path, tensors=one))


def original_checkpoint(path):
    """The original layout: fused experts without a suffix, plain bf16, norms around zero."""
    config = json.loads((MOE / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for weight in weights_of(ModelConfig.from_dict(config)):
        shape, name = list(weight.shape), f"model.language_model.{getattr(weight, 'tensor', weight.name + '.weight')}"
        if ".switch_mlp.up_proj" in name:
            continue
        if ".switch_mlp." in name:
            fused = "down_proj" if "down_proj" in name else "gate_up_proj"
            shape[1] *= 1 if fused == "down_proj" else 2
            name = f"{name.split('.switch_mlp.')[0]}.experts.{fused}"
        if name.endswith("conv1d.weight"):
            shape = [shape[0], 1, 4]
        size = 2
        for n in shape:
            size *= n
        name = "lm_head.weight" if "lm_head" in name else name
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    write(path / "model.safetensors", header, bytes(at))
    return path


def test_the_original_layout_is_read_as_views_of_the_fused_experts(tmp_path):
    weights = {w["name"]: w for w in load(original_checkpoint(tmp_path))}
    gate, up = (weights[f"layers.0.mlp.switch_mlp.{kind}_proj"] for kind in ("gate", "up"))
    down = weights["layers.0.mlp.switch_mlp.down_proj"]
    assert (gate["format"], gate["rows"], gate["expert_stride_rows"], gate["experts"]) == ("bf16", 64, 128, 16)
    assert down["expert_stride_rows"] == down["rows"] == 256
    row = 256 * 2
    g, u = gate["parts"]["weight"], up["parts"]["weight"]
    assert u["offset"] - g["offset"] == 64 * row
    assert g["bytes"] == u["bytes"] == (15 * 128 + 64) * row
    fused = read_header(tmp_path / "model.safetensors")["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert u["offset"] + u["bytes"] == fused.offset + fused.bytes
    assert weights["norm"]["add_one"] and weights["layers.0.linear_attn.conv1d"]["shape"] == [1024, 1, 4]


def test_an_unquantised_matrix_among_quantised_ones_loads(tmp_path):
    base = "language_model.model.layers.0.linear_attn.in_proj_a"

    def plain(header):
        for part in ("weight", "scales", "biases"):
            del header[f"{base}.{part}"]
        header[f"{base}.weight"] = header.pop("spare")

    weights = load(copy(tmp_path, tensors=plain, extra={"spare": ("F32", [4, 256], 4096)}))
    assert next(w for w in weights if w["name"] == "layers.0.linear_attn.in_proj_a")["format"] == "f32"


def test_a_leftover_head_of_a_tied_model_is_skipped(tmp_path):
    extra = {"language_model.lm_head.weight": ("BF16", [512, 256], 512 * 512)}
    assert len(load(copy(tmp_path, source=DENSE, extra=extra))) == len(load(DENSE))


# Quantisation block against shapes


def test_an_entry_under_another_name_form_is_understood(tmp_path):
    def move(config):
        for block in ("quantization", "quantization_config"):
            config[block] = {k.replace("language_model.model.", "model.language_model."): v for k, v in config[block].items()}

    assert len(load(copy(tmp_path, config=move))) == len(load(MOE))


def test_shapes_decide_where_the_block_says_nothing(tmp_path):
    def forget(config):
        del config["quantization"][ROUTER]

    router = next(w for w in load(copy(tmp_path, config=forget)) if w["name"] == "layers.0.mlp.gate")
    assert router["bits"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.update({ROUTER: {"bits": 6, "group_size": 64}}), "8 bits in groups of 64"),
        (lambda q: q.update({ROUTER: False}), "unquantised"),
        (lambda q: q.update(bits=8), "config.json says 8 bits"),
        (lambda q: q.update(mode="mxfp4"), '"affine"'),
        (lambda q: q.update({ROUTER: {"mode": "nvfp4"}}), '"affine"'),
        (lambda q: q.update(bits=7), "bits"),
        (lambda q: q.update(group_size=0), "group_size"),
        (lambda q: q.update(bits=True), "bits"),
        (lambda q: q.update(quant_method="gptq"), "gptq"),
    ],
)
def test_a_block_that_disagrees_is_refused(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(copy(tmp_path, config=lambda config: change(config["quantization"])))


# Tensors that are wrong


def edit(name, **changes):
    def apply(header):
        header[f"language_model.model.{name}"].update(changes)

    return apply


def test_an_unknown_tensor_is_an_error(tmp_path):
    extra = {"language_model.model.layers.0.foo.weight": ("BF16", [4], 8)}
    with pytest.raises(CheckpointError, match="do not belong") as caught:
        load(copy(tmp_path, extra=extra))
    assert caught.value.tensor == "layers.0.foo.weight"


@pytest.mark.parametrize("name", ["norm.weight", "layers.3.self_attn.q_proj.weight", "layers.0.linear_attn.A_log"])
def test_a_missing_tensor_is_an_error(tmp_path, name):
    with pytest.raises(CheckpointError, match="missing") as caught:
        load(copy(tmp_path, tensors=lambda header: header.pop(f"language_model.model.{name}") and None))
    assert name.startswith(caught.value.tensor)


def test_a_tensor_under_two_names_is_an_error(tmp_path):
    extra = {"model.norm.weight": ("BF16", [256], 512)}
    with pytest.raises(CheckpointError, match="is also in"):
        load(copy(tmp_path, extra=extra))


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_codes_without_scales_or_biases_are_refused(tmp_path, part):
    name = f"language_model.model.layers.3.self_attn.q_proj.{part}"
    with pytest.raises(CheckpointError, match="q_proj"):
        load(copy(tmp_path, tensors=lambda header: header.pop(name) and None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("norm.weight", shape=[2, 128]), "shape"),
        (edit("norm.weight", dtype="I16"), "dtype"),
        (edit("layers.3.self_attn.k_proj.weight", shape=[128, 64]), "packed codes"),
        (edit("layers.3.self_attn.k_proj.weight", dtype="I32"), "U32"),
        (edit("layers.3.self_attn.k_proj.scales", dtype="U16"), "affine mode"),
        (edit("layers.3.self_attn.k_proj.biases", dtype="F16"), "as the scales have"),
        (edit("layers.3.self_attn.k_proj.scales", shape=[512, 2]), "shape"),
        (edit("layers.0.linear_attn.conv1d.weight", shape=[4, 1024, 1]), "shape"),
    ],
)
def test_wrong_shapes_and_types_name_the_tensor(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load(copy(tmp_path, tensors=change))
    assert caught.value.tensor and caught.value.found is not None and caught.value.expected is not None


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


# config.json


def changed(**fields):
    config = json.loads((MOE / "config.json").read_text())
    for name, value in fields.items():
        place = config if name in ("model_type", "text_config") else config["text_config"]
        place[name] = value
    return config


HUGE = 1 << 62


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3_next"}, {"model_type": "qwen4_exp"}, {"model_type": None, "text_config": None},
        {"model_type": ["qwen3_5"]}, {"model_type": "qwen3_5"}, {"text_config": []},
        {"attn_output_gate": False}, {"attn_output_gate": 1}, {"output_gate_type": "sigmoid"},
        {"attention_bias": True}, {"norm_topk_prob": False}, {"hidden_act": "gelu"}, {"mamba_ssm_dtype": "bfloat16"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, {"rope_scaling": {"type": "linear"}},
        {"rope_parameters": []}, {"rope_parameters": {"rope_theta": 0}}, {"rope_parameters": {"rope_theta": "1e7"}},
        {"rope_parameters": {"rope_theta": float("nan")}}, {"rope_parameters": {"partial_rotary_factor": 0.001}},
        {"rope_parameters": {"partial_rotary_factor": 1.5}},
        {"hidden_size": 0}, {"hidden_size": -1}, {"hidden_size": HUGE}, {"hidden_size": 256.0}, {"hidden_size": "256"},
        {"hidden_size": True}, {"hidden_size": None}, {"num_hidden_layers": HUGE}, {"num_hidden_layers": 5},
        {"vocab_size": HUGE}, {"vocab_size": 0}, {"num_attention_heads": 0}, {"num_key_value_heads": 3},
        {"num_key_value_heads": 16}, {"head_dim": HUGE}, {"linear_num_value_heads": 3}, {"linear_num_key_heads": 0},
        {"linear_key_head_dim": -128}, {"linear_conv_kernel_dim": 3}, {"linear_conv_kernel_dim": 5},
        {"num_experts": 0}, {"num_experts": HUGE}, {"num_experts_per_tok": 17}, {"num_experts_per_tok": 0},
        {"moe_intermediate_size": HUGE}, {"shared_expert_intermediate_size": None},
        {"rms_norm_eps": 0}, {"rms_norm_eps": float("inf")}, {"rms_norm_eps": "1e-6"},
        {"layer_types": ["linear_attention"]}, {"layer_types": ["other"] * 4}, {"layer_types": "linear"},
        {"layer_types": None, "full_attention_interval": 0}, {"max_position_embeddings": HUGE},
        {"tie_word_embeddings": "no"},
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_is_refused(fields):
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        ModelConfig.from_dict(changed(**fields))
    assert caught.value.expected is not None and len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        ModelConfig.from_file(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_file(tmp_path)


def test_defaults_and_old_forms():
    config = changed(
        rope_parameters=None, rope_theta=10_000_000, partial_rotary_factor=0.25, rope_scaling={"type": "mrope"},
        layer_types=None, head_dim=None, rms_norm_eps=None, linear_conv_kernel_dim=None, max_position_embeddings=None,
        output_gate_type="swish",
    )  # fmt: skip
    parsed = ModelConfig.from_dict(config)
    assert parsed.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (parsed.head_dim, parsed.rotary_dim, parsed.rope_theta) == (32, 8, 1e7)
    assert (parsed.rms_norm_eps, parsed.conv_kernel, parsed.max_context) == (1e-6, 4, 262144)


def test_a_flat_text_only_config_is_the_same_model():
    nested = json.loads((MOE / "config.json").read_text())
    flat = nested["text_config"] | {"quantization": nested["quantization"]}
    assert ModelConfig.from_dict(flat) == ModelConfig.from_dict(nested)
    assert ModelConfig.from_dict(nested).spec()["layer_types"] == [0, 0, 0, 1]


# Names and abstract weights


def test_canonical_names():
    for raw in ("language_model.model.layers.1.x", "model.language_model.layers.1.x", "model.layers.1.x", "layers.1.x"):
        assert canonical(raw) == "layers.1.x"
    assert canonical("language_model.lm_head.weight") == canonical("lm_head.weight") == "lm_head.weight"
    assert canonical("model.other.x") == "model.other.x"
    assert skipped("model.visual.x") and skipped("language_model.mtp.x") and skipped("vision_tower.x")
    assert not skipped("model.layers.0.mlp.gate.weight")


def test_without_a_block_a_plan_assumes_four_bits_and_an_eight_bit_router():
    config = changed()
    del config["quantization"], config["quantization_config"]
    weights = {w["name"]: w for w in abstract_weights(ModelConfig.from_dict(config))}
    assert (weights["lm_head"]["bits"], weights["lm_head"]["group"]) == (4, 64)
    assert weights["layers.0.mlp.gate"]["bits"] == weights["layers.3.mlp.shared_expert_gate"]["bits"] == 8


def test_a_group_that_does_not_divide_leaves_the_matrix_plain():
    weights = {w["name"]: w for w in abstract_weights(ModelConfig.from_dict(changed(moe_intermediate_size=96)))}
    assert weights["layers.0.mlp.switch_mlp.down_proj"]["format"] == "bf16"
    assert isinstance(weights_of(ModelConfig.from_dict(changed()))[0], Linear)


# Model.from_pretrained: what it checks and what it hands to the engine


@pytest.fixture
def engine(monkeypatch):
    """Stands in for the extension and notes the arguments of the model it is asked to make."""
    import lily.loading
    import lily.model
    from lily.testing import ScriptedEngine

    asked = SimpleNamespace(calls=[])

    def make(spec, weights, device, max_context, memory_limit, progress):
        asked.calls.append((spec, weights, device, max_context, memory_limit))
        if progress is not None:
            progress("load", 1, 2)
            progress("load", 2, 2)
        return ScriptedEngine(lambda tokens: None, spec["vocab_size"], max_context)

    extension = SimpleNamespace(Model=make, devices=lambda: [{"name": "cpu"}, {"name": "cpu:float32"}])
    monkeypatch.setattr(lily.loading, "native", lambda: extension)
    return asked


def test_a_directory_becomes_a_model(engine):
    seen = []
    with lily.Model.from_pretrained(MOE, max_context=128, memory_limit=1 << 30, progress=lambda *event: seen.append(event)) as model:
        assert model.max_context == 128 and model.end_tokens == {0, 1} and model.defaults.top_k == 20
        assert model.template is not None and model.source == str(MOE) and "16 experts" in repr(model)
    spec, weights, device, max_context, memory_limit = engine.calls[0]
    assert spec == model.config.spec() and weights == load(MOE)
    assert (device, max_context, memory_limit) == ("auto", 128, 1 << 30)
    assert seen == [("load", 1, 2), ("load", 2, 2)]


def test_the_shipped_model_is_found_and_is_whole(engine):
    model = lily.Model.demo(progress=False)
    assert model.config.num_layers == 8 and engine.calls[0][3] == model.config.max_context == 32768
    assert model.end_tokens == {6135, 6137}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_context": 0}, ValueError, "max_context"),
        ({"max_context": 4097}, ValueError, "4096"),
        ({"max_context": True}, TypeError, "max_context"),
        ({"memory_limit": -1}, ValueError, "memory_limit"),
        ({"memory_limit": "8GB"}, TypeError, "memory_limit"),
        ({"max_context": 1 << 70}, ValueError, "4096"),
        ({"max_context": 128.0}, TypeError, "max_context is 128.0, expected"),
        ({"memory_limit": 1 << 70}, ValueError, f"memory_limit is {1 << 70}, expected at most {(1 << 63) - 1} bytes"),
        ({"memory_limit": 1e9}, TypeError, "memory_limit"),
        ({"progress": "yes"}, TypeError, "progress"),
        ({"device": 5}, TypeError, "device is 5, expected a name such as 'auto' or 'cpu'"),
        ({"device": None}, TypeError, "device is None"),
        ({"device": "tpu"}, lily.DeviceError, "device 'tpu' is not available here, expected one of: auto, cpu, cpu:float32"),
        ({"device": ""}, lily.DeviceError, "device ''"),
        ({"refresh": "no"}, TypeError, "refresh is 'no', expected True or False"),
        ({"revision": 5}, TypeError, "revision is 5, expected the name of a branch"),
        ({"revision": ""}, ValueError, "revision ''"),
        ({"quantize": "4"}, TypeError, "quantize is '4', expected 4, 8 or None"),
    ],
)
def test_bad_loading_options_are_refused_before_anything_is_read(engine, monkeypatch, options, error, message):
    monkeypatch.setattr(lily.model, "load_weights", lambda *args: pytest.fail("weights were looked at"))
    with pytest.raises(error, match=message):
        lily.Model.from_pretrained(MOE, **options)
    assert engine.calls == []


@pytest.mark.parametrize("call", [lily.Model.from_pretrained, lily.inspect, lily.plan, hub.resolve, lambda source: convert(source, "x")])
@pytest.mark.parametrize(("source", "error"), [(5, TypeError), (None, TypeError), (b"owner/name", TypeError), ("a\0b", ValueError)])
def test_what_cannot_name_a_checkpoint_is_refused_by_every_call(call, source, error):
    with pytest.raises(error, match="expected a directory or a Hub id|no such name"):
        call(source)


def test_a_tokenizer_of_another_model_is_refused(engine, tmp_path):
    copy(tmp_path)
    shutil.copy(lily.model.DEMO / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has ids up to 6143"):
        lily.Model.from_pretrained(tmp_path)


def test_a_bar_is_shown_on_a_terminal_only(engine, monkeypatch, capsys):
    lily.Model.from_pretrained(MOE)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lily.Model.from_pretrained(MOE)
    out, err = capsys.readouterr()
    assert out == "" and "load" in err


# The Hub


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("the network is blocked in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hub cache that holds the fixture as demo-org/tiny-hybrid."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--demo-org--tiny-hybrid"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    copy(snapshot, index=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_a_complete_snapshot_makes_no_network_call(cache, no_network):
    assert hub.resolve("demo-org/tiny-hybrid") == cache
    assert hub.find_config("demo-org/tiny-hybrid") == cache / "config.json"


@pytest.mark.parametrize("gone", ["tokenizer.json", "model.safetensors", "config.json"])
def test_an_incomplete_snapshot_asks_the_hub_and_says_why_it_fails(cache, no_network, gone):
    (cache / gone).unlink()
    with pytest.raises(CheckpointError, match="could not be reached"):
        hub.resolve("demo-org/tiny-hybrid")


def test_refresh_without_a_network_is_a_clear_error(cache, no_network):
    with pytest.raises(CheckpointError, match="demo-org/tiny-hybrid: the Hub could not be reached"):
        hub.resolve("demo-org/tiny-hybrid", refresh=True)


def test_a_directory_comes_first(tmp_path, monkeypatch):
    (tmp_path / "demo-org").mkdir()
    copy(tmp_path / "demo-org")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("demo-org") == Path("demo-org")


@pytest.mark.parametrize("source", ["no-such-directory", "./a/b/c", "/nowhere/at/all", "a/../b", ""])
def test_neither_directory_nor_id(source, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if source == "":  # the current directory, which holds no checkpoint
        assert not hub.is_complete(hub.resolve(source))
        return
    with pytest.raises(CheckpointError, match="no such directory"):
        hub.resolve(source)


def test_a_file_is_not_a_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="expected the directory"):
        hub.resolve(tmp_path / "model.safetensors")


class FakeHub:
    """Serves a directory in place of the Hub and notes what was asked for."""

    def __init__(self, source, target):
        self.source, self.target, self.asked = source, target, []

    def model_info(self, repo, **kwargs):
        files = [SimpleNamespace(rfilename=p.name, size=p.stat().st_size) for p in sorted(self.source.iterdir())]
        return SimpleNamespace(siblings=files, sha="x")

    def hf_hub_download(self, repo, name, **kwargs):
        self.asked.append(name)
        return shutil.copy(self.source / name, self.target / name)

    def snapshot_download(self, repo, *, local_files_only=False, allow_patterns, **kwargs):
        if local_files_only:
            raise FileNotFoundError
        for name in allow_patterns:
            self.hf_hub_download(repo, name)
        return str(self.target)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "remote").mkdir()
    (tmp_path / "local").mkdir()
    copy(tmp_path / "remote", index=True)
    (tmp_path / "remote" / "other.safetensors").write_bytes(b"large and not needed")
    server = FakeHub(tmp_path / "remote", tmp_path / "local")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: server)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", server.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", server.snapshot_download)
    return server


def test_a_download_takes_the_config_first_and_only_what_is_needed(fake):
    seen = []
    path = hub.resolve("demo-org/tiny-hybrid", progress=lambda *event: seen.append(event))
    assert hub.is_complete(path) and fake.asked[0] == "config.json"
    assert "other.safetensors" not in fake.asked and fake.asked[-1] == "model.safetensors"
    size = (MOE / "model.safetensors").stat().st_size
    assert seen[-1][0] == "download" and abs(seen[-1][1] - size) < 4096 and seen[-1][1] == seen[-1][2]


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(fake):
    path = fake.source / "config.json"
    path.write_text(path.read_text().replace('"qwen3_5_moe"', '"qwen3_next"'))
    with pytest.raises(CheckpointError, match="qwen3_next"):
        hub.resolve("demo-org/tiny-hybrid")
    assert fake.asked == ["config.json"]


def test_an_index_of_another_layout_is_refused_before_the_weights_are_downloaded(fake):
    path = fake.source / INDEX
    path.write_text(path.read_text().replace("layers.0.mlp.gate.weight", "layers.0.mlp.gates.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate"):
        hub.resolve("demo-org/tiny-hybrid")
    assert "model.safetensors" not in fake.asked


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_repository_that_lacks_a_file_is_refused(fake, gone):
    (fake.source / gone).unlink()
    with pytest.raises(CheckpointError, match=gone):
        hub.resolve("demo-org/tiny-hybrid")
