"""config.json: what it may say, and what a checkpoint is taken to hold where it says nothing."""

from __future__ import annotations

import json

import pytest
from checkpoint_files import MOE

from lily import CheckpointError
from lily.config import ModelConfig
from lily.layout import Linear, weights_of
from lily.names import canonical, skipped
from lily.weights import abstract_weights


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
