"""Every form of checkpoint that people have: loaded as the same model, or refused with the tensor's name."""

from __future__ import annotations

import itertools
import json
import logging

import numpy as np
import pytest
from checkpoints import DENSE, FIXTURES, MIXED, MOE, ORIGINAL, model, prompt
from reference_model import Reference
from variants import read_config, read_tensors, stored, values, write, write_file

import lily
from lily import CheckpointError
from lily.affine import quantize
from lily.checkpoint import INDEX
from lily.quantization import BITS, GROUPS
from lily.testing import scripted
from lily.tokenizer import Tokenizer

IDS = prompt(MOE, 64)
QKV = "layers.0.linear_attn.in_proj_qkv"


def logits(directory, device="cpu", **options):
    with lily.Model.from_pretrained(directory, device=device, progress=False, **options) as loaded:
        return loaded.logits(IDS, last_only=False)


def same_as(name, directory):
    return np.array_equal(logits(directory), model(name).logits(IDS, last_only=False))


def refused(directory, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        lily.Model.from_pretrained(directory, progress=False)
    assert caught.value.tensor and caught.value.found is not None and caught.value.expected is not None
    return caught.value


# Names


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.", ""])
@pytest.mark.parametrize("vision", ["vision_tower.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"])
def test_every_prefix_is_the_same_model_also_beside_a_vision_tower(tmp_path, caplog, prefix, vision):
    tensors = {
        key.replace("language_model.model.", prefix).replace("language_model.lm_head", "lm_head"): value
        for key, value in read_tensors(MOE).items()
    } | {vision: ("BF16", [4, 4], bytes(32))}
    with caplog.at_level(logging.INFO, "lily"):
        assert same_as(MOE, write(tmp_path, MOE, tensors=tensors))
    assert [r.name for r in caplog.records].count("lily") == 1


@pytest.mark.parametrize("name", ["layers.0.foo.weight", "layers.0.self_attn.q_proj.bias", "layers.9.input_layernorm.weight", "something"])
def test_any_other_tensor_is_an_error(tmp_path, name):
    tensors = read_tensors(MOE) | {f"language_model.model.{name}": ("BF16", [4], bytes(8))}
    error = refused(write(tmp_path, MOE, tensors=tensors), "do not belong")
    assert name in error.tensor


# Norm convention


MTP = {
    "language_model.mtp.norm.weight": ("BF16", [256], bytes(512)),
    "language_model.mtp.layers.0.input_layernorm.weight": ("BF16", [256], bytes(512)),
    "mtp.fc.weight": ("BF16", [4, 8], bytes(64)),
}


def original_form(tensors):
    """conv1d [C, 1, 4] and norms around zero: in float32, where w - 1 is exact."""
    result = {}
    for key, value in tensors.items():
        if key.endswith("conv1d.weight"):
            value = value[0], [value[1][0], 1, 4], value[2]
        elif key.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")):
            value = stored(values(value) - 1, "F32")
        result[key] = value
    return result


@pytest.mark.parametrize("extra", [{}, MTP], ids=["plain", "with mtp"])
@pytest.mark.parametrize("form", [dict, original_form], ids=["converted", "original"])
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_the_convolution_alone_says_how_norms_are_meant(tmp_path, name, form, extra):
    assert same_as(name, write(tmp_path, name, tensors=form(read_tensors(name)) | extra))


# Configurations


def without_layer_types(config):
    del config["text_config"]["layer_types"]
    return config


def flat(config):
    text = config["text_config"]
    return text | {key: config[key] for key in ("quantization", "quantization_config")}


def old_rope(config):
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"] |= {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": None,
    }
    return config


def without_block(config):
    del config["quantization"], config["quantization_config"]
    return config


def duplicate_only(config):
    del config["quantization"]
    return config


@pytest.mark.parametrize("change", [without_layer_types, flat, old_rope, without_block, duplicate_only])
@pytest.mark.parametrize("name", [MOE, DENSE, MIXED])
def test_a_configuration_in_another_form_is_the_same_model(tmp_path, name, change):
    if change in (flat, without_layer_types) and name == MIXED:
        assert read_config(name)["text_config"]["full_attention_interval"] == 2
    assert same_as(name, write(tmp_path, name, config=change(read_config(name))))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda c: c.update(model_type="qwen3_next"), "qwen3_next"),
        (lambda c: c["text_config"].update(model_type="qwen4_exp_text"), "qwen4_exp_text"),
        (lambda c: c["text_config"].update(output_gate_type="sigmoid"), "sigmoid"),
        (lambda c: c["text_config"]["rope_parameters"].update(rope_type="yarn", factor=4.0), "yarn"),
        (lambda c: c["text_config"]["rope_parameters"].update(factor=4.0), "4.0"),
        (lambda c: c["text_config"].update(rope_scaling={"type": "yarn", "factor": 4.0}), "yarn"),
        (lambda c: c["text_config"].update(attention_bias=True), "True"),
        *((lambda c, m=mode: c["quantization"].update(mode=m, bits=4, group_size=32), mode) for mode in ("mxfp4", "mxfp8", "nvfp4")),
        (lambda c: c["quantization"].update({"language_model.lm_head": {"mode": "mxfp8", "bits": 8, "group_size": 32}}), "mxfp8"),
        (lambda c: (c.pop("quantization"), c.update(quantization_config={"quant_method": "fp8"})), "fp8"),
        (lambda c: (c.pop("quantization"), c.update(quantization_config={"quant_method": "awq", "bits": 4})), "awq"),
    ],
)
def test_other_kinds_are_refused_by_what_was_found(tmp_path, change, found):
    config = read_config(MOE)
    change(config)
    assert found in str(refused(write(tmp_path, MOE, config=config), r"config\.json: .* expected"))


@pytest.mark.parametrize("biases", [True, False])
def test_float_modes_are_refused_by_their_scales_too(tmp_path, biases):
    tensors = read_tensors(MOE)
    name = f"language_model.model.{QKV}"
    tensors[f"{name}.scales"] = ("U8", [1024, 8], bytes(8192))
    if not biases:
        del tensors[f"{name}.biases"]
    error = refused(write(tmp_path, MOE, tensors=tensors), "mxfp4, mxfp8 and nvfp4 are not supported")
    assert (error.tensor, error.found) == (f"{name}.scales", "U8")


# Codes


def requantized(tensors, name, bits, group):
    """The matrix `name` of an original or MLX checkpoint in another packing."""
    prefix = "language_model.model."
    dtype, shape, _ = tensors[f"{prefix}{name}.weight"]
    assert dtype == "BF16"
    codes, scales, biases = quantize(values(tensors[f"{prefix}{name}.weight"]).reshape(-1, shape[-1]), bits, group)
    lead = shape[:-1]
    return {
        f"{prefix}{name}.weight": ("U32", [*lead, codes.shape[-1]], codes.tobytes()),
        f"{prefix}{name}.scales": ("BF16", [*lead, scales.shape[-1]], scales.tobytes()),
        f"{prefix}{name}.biases": ("BF16", [*lead, biases.shape[-1]], biases.tobytes()),
    }


def original_under_mlx_names():
    """Fixture e's matrices as bfloat16 under MLX's names, experts stacked; norms in the original convention."""
    result = {}
    for key, (dtype, shape, data) in read_tensors(ORIGINAL).items():
        if "visual" in key or "mtp" in key:
            continue
        name = key.replace("model.language_model.", "language_model.model.").replace("lm_head", "language_model.lm_head")
        if name.endswith("experts.gate_up_proj"):
            both = values((dtype, shape, data))
            half = shape[1] // 2
            base = name.replace("experts.gate_up_proj", "switch_mlp")
            result |= {f"{base}.gate_proj.weight": stored(both[:, :half], dtype), f"{base}.up_proj.weight": stored(both[:, half:], dtype)}
        elif name.endswith("experts.down_proj"):
            result[name.replace("experts", "switch_mlp") + ".weight"] = dtype, shape, data
        else:
            result[name] = dtype, shape, data
    return result


def matrices(tensors):
    return [
        key.removesuffix(".weight").removeprefix("language_model.model.")
        for key, (_, shape, _) in tensors.items()
        if key.endswith("_proj.weight")
        or ".in_proj" in key
        or key.endswith(("embed_tokens.weight", "mlp.gate.weight", "expert_gate.weight"))
    ]


def test_stacked_and_fused_experts_are_the_same_model(tmp_path):
    assert same_as(ORIGINAL, write(tmp_path, ORIGINAL, tensors=original_under_mlx_names()))


def test_all_widths_and_groups_mix_in_one_file(tmp_path):
    tensors = original_under_mlx_names()
    combinations = itertools.cycle(itertools.product(BITS, GROUPS))
    used = set()
    for name in matrices(tensors):
        columns = tensors[f"language_model.model.{name}.weight"][1][-1]
        bits, group = next(pair for pair in combinations if columns % pair[1] == 0)
        used.add((bits, group))
        tensors |= requantized(tensors, name, bits, group)
    assert len(used) == 18
    directory = write(tmp_path, ORIGINAL, tensors=tensors)
    assert abs(logits(directory, "cpu:float32") - Reference(directory).logits(IDS)).max() <= 1e-3
    exact = Reference(directory, rounded=True).logits(IDS)
    assert np.sqrt(np.square(logits(directory) - exact).mean() / np.square(exact).mean()) <= 0.1


@pytest.mark.parametrize("entry", ["model.language_model.", "language_model.model.", "model.", ""])
@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_an_override_may_use_the_raw_name(tmp_path, entry, suffix):
    tensors = original_under_mlx_names()
    for name in matrices(tensors):
        if tensors[f"language_model.model.{name}.weight"][1][-1] % 64 == 0:
            tensors |= requantized(tensors, name, 6 if name == QKV else 4, 64)
    config = read_config(ORIGINAL) | {"quantization": {"bits": 4, "group_size": 64, f"{entry}{QKV}{suffix}": {"bits": 6, "group_size": 64}}}
    directory = write(tmp_path, ORIGINAL, tensors=tensors, config=config)
    assert abs(logits(directory, "cpu:float32") - Reference(directory).logits(IDS)).max() <= 1e-3
    config["quantization"][f"{entry}{QKV}{suffix}"]["bits"] = 5
    assert refused(write(tmp_path, ORIGINAL, tensors=tensors, config=config), "6 bits in groups of 64").tensor == QKV


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_plain_matrices_and_vectors_in_other_float_types(tmp_path, dtype):
    tensors = {key: stored(values(value), dtype) for key, value in read_tensors(ORIGINAL).items()}
    directory = write(tmp_path, ORIGINAL, tensors=tensors)
    assert abs(logits(directory, "cpu:float32") - Reference(directory).logits(IDS)).max() <= 1e-3
    if dtype == "F32":  # holds the same values as bfloat16
        assert same_as(ORIGINAL, directory)


def in_dtype(tensors, dtype, only=""):
    """Scales and biases in another float type; values too small for float16 become zero in both."""
    changed = {k for k in tensors if k.endswith((".scales", ".biases")) and only in k}
    return tensors | {k: stored(values(tensors[k]), dtype) for k in changed}


@pytest.mark.parametrize(("dtype", "only"), [("F32", ""), ("F32", QKV), ("F16", QKV)])
def test_scales_that_bfloat16_holds_exactly_are_converted(tmp_path, dtype, only):
    tensors = in_dtype(read_tensors(MOE), dtype, only)
    assert same_as(MOE, write(tmp_path, MOE, tensors=tensors))


@pytest.mark.parametrize("kind", ["scales", "biases"])
@pytest.mark.parametrize(("dtype", "value"), [("F32", 0.1), ("F16", 0.1), ("F32", np.inf), ("F32", np.nan)])
def test_scales_that_bfloat16_does_not_hold_are_refused(tmp_path, dtype, value, kind):
    tensors = in_dtype(read_tensors(MOE), dtype, QKV)
    name = f"language_model.model.{QKV}.{kind}"
    array = values(tensors[name]).copy()
    array[17, 2] = value
    tensors[name] = stored(array, dtype)
    error = refused(write(tmp_path, MOE, tensors=tensors), "bfloat16 only")
    assert (error.tensor, error.found) == (f"{QKV}.{kind}", dtype)


def test_unquantised_matrices_among_quantised_ones(tmp_path):
    exact = Reference(FIXTURES / MOE)
    tensors = read_tensors(MOE)
    for name in (QKV, "layers.3.self_attn.q_proj", "layers.1.mlp.switch_mlp.up_proj", "embed_tokens"):
        for part in ("scales", "biases"):
            del tensors[f"language_model.model.{name}.{part}"]
        tensors[f"language_model.model.{name}.weight"] = stored(exact.exact(name).astype(np.float32), "F32")
    config = read_config(MOE)
    config["quantization"][f"language_model.model.{QKV}"] = False
    directory = write(tmp_path, MOE, tensors=tensors, config=config)
    assert abs(logits(directory, "cpu:float32") - exact.logits(IDS)).max() <= 1e-3


# Files


def test_complete_files_overrule_a_stale_index(tmp_path, caplog):
    write(tmp_path, MOE)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))
    with caplog.at_level(logging.WARNING, "lily"):
        assert same_as(MOE, tmp_path)
    assert all(name in caplog.text for name in names)


def test_oddly_named_shards_without_an_index(tmp_path):
    tensors = read_tensors(MOE)
    write(tmp_path, MOE, tensors={})
    (tmp_path / "model.safetensors").unlink()
    for i, file in enumerate(("weights_a.safetensors", "zz.safetensors")):
        write_file(tmp_path / file, {key: tensors[key] for key in sorted(tensors)[i::2]})
    assert same_as(MOE, tmp_path)


# End tokens and tokenizers


@pytest.mark.parametrize("listed", [[6135], 6135, None, []])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_every_end_token_ends_an_answer_whichever_are_listed(listed, end):
    ids = lily.Model.demo(progress=False).tokenizer.encode("It was red.")
    token = lily.Model.demo(progress=False).tokenizer.token_to_id(end)
    config = {} if listed is None else {"eos_token_id": listed}
    if end == "<|endoftext|>" and listed in (None, []):
        config = {"eos_token_id": [token]}
    answer = scripted([*ids, token, *ids], generation_config=config).generate("What colour?")
    assert (answer.text, answer.finish_reason, answer.tokens) == ("It was red.", "stop", [*ids, token])


@pytest.mark.parametrize("place", ["generation_config.json", "config.json", "text_config", "tokenizer_config.json"])
def test_end_tokens_are_the_union_of_all_places(tmp_path, place):
    config = read_config(MOE)
    config.pop("eos_token_id", None)
    config["text_config"].pop("eos_token_id", None)
    tokenizer_config = {}
    generation = {"eos_token_id": [0]}
    if place == "generation_config.json":
        generation = {"eos_token_id": [0, 7]}
    elif place == "tokenizer_config.json":
        tokenizer_config = {"eos_token": "<|endoftext|>"}
        generation = {"eos_token_id": [7]}
    else:
        (config if place == "config.json" else config["text_config"])["eos_token_id"] = 7
    write(tmp_path, MOE, config=config)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    with lily.Model.from_pretrained(tmp_path, progress=False) as loaded:
        assert loaded.end_tokens == {0, 1, 7}  # 1 is <|im_end|>, which ends a turn wherever it exists


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_end|>"]},
        {"tokenizer_class": "Qwen9TokenizerSlow", "extra_special_tokens": {"end": "<|im_end|>"}},
        {"additional_special_tokens": ["<|im_end|>"], "added_tokens_decoder": {"1": {"content": "<|im_end|>", "special": True}}},
        {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "auto_map": {"AutoTokenizer": ["evil.py", None]}},
        {"eos_token": None, "pad_token": ["x"], "model_max_length": 1e30},
        None,
    ],
)
def test_the_tokenizer_is_read_from_its_own_file(tmp_path, config):
    write(tmp_path, MOE)
    path = tmp_path / "tokenizer_config.json"
    path.unlink()
    if config is not None:
        path.write_text(json.dumps(config))
    text = "Hello <|im_start|>user\nZürich 🙂<|im_end|>"
    expected = Tokenizer.from_directory(FIXTURES / MOE)
    with lily.Model.from_pretrained(tmp_path, progress=False) as loaded:
        assert loaded.encode(text) == expected.encode(text)
        assert 1 in loaded.end_tokens and loaded.apply_chat_template([{"role": "user", "content": "Hi"}])
