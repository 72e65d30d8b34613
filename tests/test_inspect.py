"""`lily inspect`: a sound checkpoint passes, each fault is named, each oddity explained."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
from checkpoints import DENSE, FIXTURES, MIXED, MOE, NAMES, ORIGINAL
from variants import read_config, read_tensors, stored, values, write

import lily
from lily import cli
from lily.checkpoint import INDEX

BASE = "language_model.model"


def problem(directory):
    report = lily.inspect(directory)
    assert not report.ok and len(report.problems) == 1, report.problems
    return report.problems[0]


@pytest.fixture
def run(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as caught:
            cli.main(["inspect", *map(str, args)])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_checkpoint(name):
    report = lily.inspect(FIXTURES / name)
    assert report.ok and report.model["parameters"] > 1e6 and report.end_tokens == {0: "<|endoftext|>", 1: "<|im_end|>"}
    assert [file["name"] for file in report.files] == ["model.safetensors"] and report.files[0]["missing"] == 0
    assert report.template == ("tokenizer_config.json" if name == DENSE else "chat_template.jinja")
    assert report.memory[4096]["total"] < report.memory[32768]["total"] < report.memory[131072]["total"]
    assert report.norms["stored_as"] == ("w, used as 1 + w" if name == ORIGINAL else "multipliers")


def test_what_is_in_it_by_kind_and_format():
    rows = {(row["kind"], row["format"]): row for row in lily.inspect(FIXTURES / MOE).tensors}
    assert rows["router", "8 bits, group 64"]["tensors"] == 4 * 2 * 3
    assert rows["experts", "4 bits, group 64"]["parameters"] == 4 * 16 * 3 * 64 * 256
    assert {kind for kind, _ in rows} == {
        "embedding",
        "Gated DeltaNet",
        "attention",
        "router",
        "experts",
        "shared expert",
        "head",
        "norms and vectors",
    }
    total = sum(row["bytes"] for row in rows.values())
    assert total == sum(len(data) for _, _, data in read_tensors(MOE).values())
    fused = [row for row in lily.inspect(FIXTURES / ORIGINAL).tensors if row["kind"] == "experts"]
    assert fused[0]["bytes"] == 2 * fused[0]["parameters"] == 2 * 4 * 16 * 3 * 32 * 128


def test_vision_and_mtp_tensors_are_counted():
    assert lily.inspect(FIXTURES / ORIGINAL).skipped.keys() == {"vision", "multi-token-prediction"}


# Faults


def test_a_file_cut_short(tmp_path):
    write(tmp_path, MOE)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1234])
    assert problem(tmp_path) == "model.safetensors lacks 1,234 bytes: download it again"
    assert lily.inspect(tmp_path).files[0]["missing"] == 1234


def test_an_absent_shard(tmp_path):
    write(tmp_path, MOE)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    tensors = read_tensors(MOE)
    tensors.popitem()
    write(tmp_path, MOE, tensors=tensors)
    (tmp_path / "model.safetensors").replace(tmp_path / "model-00001-of-00002.safetensors")
    assert problem(tmp_path).startswith("model-00002-of-00002.safetensors: named")
    assert lily.inspect(tmp_path).files[-1] == {"name": "model-00002-of-00002.safetensors", "bytes": 0, "missing": None}


@pytest.mark.parametrize(("name", "shift", "message"), [(MOE, -1, "forgot to add 1"), (ORIGINAL, 1, "adding 1 would be wrong")])
def test_norms_of_the_other_convention(tmp_path, name, shift, message):
    tensors = {
        key: stored(values(value) + shift, value[0]) if key.endswith("layernorm.weight") else value
        for key, value in read_tensors(name).items()
    }
    assert message in problem(write(tmp_path, name, tensors=tensors))


def test_a_norm_that_is_not_finite(tmp_path):
    tensors = read_tensors(MOE)
    key = f"{BASE}.layers.1.input_layernorm.weight"
    broken = values(tensors[key]).copy()
    broken[3] = np.inf
    tensors[key] = stored(broken, "BF16")
    assert "layers.1.input_layernorm: holds a value that is not finite" in problem(write(tmp_path, MOE, tensors=tensors))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["layers.1.post_attention_layernorm", "layers.3.self_attn.k_norm", "layers.0.linear_attn.norm", "norm"])
@pytest.mark.parametrize(("value", "message"), [(0, "by zero"), (3e38, "by 3e+38 on average"), (-5000, "expected about 1")])
def test_a_single_norm_that_no_training_gives(tmp_path, name, value, message):
    tensors = read_tensors(MOE)
    key = f"{BASE}.{name}.weight"
    tensors[key] = stored(np.full_like(values(tensors[key]), value), "BF16")
    report = lily.inspect(write(tmp_path, MOE, tensors=tensors))
    assert not report.ok and report.problems[0].startswith(f"{name}: ") and message in report.problems[0]


def test_a_file_that_was_allocated_and_never_filled(tmp_path):
    tensors = read_tensors(MOE)
    key = f"{BASE}.layers.3.self_attn.q_proj.weight"
    tensors[key] = (*tensors[key][:2], bytes(len(tensors[key][2])))
    assert "layers.3.self_attn.q_proj: nothing but zeros" in problem(write(tmp_path, MOE, tensors=tensors))


def test_scales_that_the_kernels_cannot_read(tmp_path):
    tensors = read_tensors(MOE)
    for key in tensors:
        if "layers.0.linear_attn.out_proj" in key and key.endswith((".scales", ".biases")):
            tensors[key] = stored(values(tensors[key]) * np.float32(1.001), "F32")
    assert "bfloat16 only" in problem(write(tmp_path, MOE, tensors=tensors))


def test_a_tokenizer_of_another_model(tmp_path):
    write(tmp_path, MOE)
    (tmp_path / "tokenizer.json").write_bytes((lily.model.DEMO / "tokenizer.json").read_bytes())
    assert "not of one checkpoint" in problem(tmp_path)


def test_a_template_that_does_not_parse(tmp_path):
    write(tmp_path, MOE)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    assert "template does not parse" in problem(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", INDEX])
def test_a_file_that_is_no_json(tmp_path, file):
    write(tmp_path, MOE)
    (tmp_path / file).write_text("{")
    assert file in problem(tmp_path)


def test_a_wrong_tensor_is_named_and_the_rest_still_reported(tmp_path):
    tensors = read_tensors(MOE)
    del tensors[f"{BASE}.norm.weight"]
    directory = write(tmp_path, MOE, tensors=tensors)
    assert "norm" in problem(directory)
    report = lily.inspect(directory)
    assert report.end_tokens and report.template and report.model["layers"] == 4


# Oddities


def remark(directory, text):
    report = lily.inspect(directory)
    assert report.ok, report.problems
    return [line for line in report.remarks if text in line]


def test_a_stale_index(tmp_path):
    write(tmp_path, MOE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert remark(tmp_path, "the index is stale")


def test_end_tokens_that_generation_config_leaves_out(tmp_path):
    write(tmp_path, MOE)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0]}')
    assert remark(tmp_path, "leaves out '<|im_end|>'")


def test_widths_that_the_configuration_does_not_mention(tmp_path):
    config = read_config(MIXED)
    config["quantization"] = {"bits": 4, "group_size": 32}
    assert remark(write(tmp_path, MIXED, config=config), "the shapes decide")


def test_other_oddities(tmp_path):
    assert remark(FIXTURES / ORIGINAL, "unquantised") and remark(FIXTURES / ORIGINAL, "vision tensors")
    assert remark(FIXTURES / MIXED, "decays stored in bf16") and remark(FIXTURES / MOE, "expected.safetensors")
    write(tmp_path, MOE)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert remark(tmp_path, "no chat template")
    scales = {k: stored(values(v), "F32") if k.endswith((".scales", ".biases")) else v for k, v in read_tensors(MOE).items()}
    assert remark(write(tmp_path, MOE, tensors=scales), "converted at each load")


# The command


def test_the_command_exits_zero_or_one(run, tmp_path):
    code, out, err = run(FIXTURES / MOE)
    assert (code, err) == (0, "") and "whole and sane" in out and "128K" in out
    write(tmp_path, MOE)
    (tmp_path / "tokenizer.json").unlink()
    code, out, err = run(tmp_path)
    assert (code, err) == (1, "") and "problem: " in out
    code, out, err = run(tmp_path / "nothing")
    assert code == 1 and out == "" and err.startswith("Error: ")


def test_json(run):
    code, out, _ = run(FIXTURES / MIXED, "--json")
    report = json.loads(out)
    assert code == 0 and report["ok"] is True and report["problems"] == []
    assert set(report["memory"]) == {"4096", "32768", "131072"} and report["end_tokens"] == {"0": "<|endoftext|>", "1": "<|im_end|>"}


def test_an_id_is_looked_up_on_this_disk_only(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("a network call"))
    with pytest.raises(lily.CheckpointError, match="lily pull some/model"):
        lily.inspect("some/model")
