"""Checkpoints: which forms load, and which tensors are refused before any weight is read."""

from __future__ import annotations

import json
import logging

import pytest
from checkpoint_files import DENSE, MOE, ROUTER, copy, load, read, without_place, write

from lily import CheckpointError
from lily.config import ModelConfig
from lily.layout import weights_of
from lily.safetensors_header import read_header
from lily.weights import abstract_weights


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
