"""Synthetic checkpoints: exact widths, the same bytes for the same seed, the same numbers in GGUF."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from click.testing import CliRunner

from lily.bench import gguf_file, synthetic
from lily.bench.cli import bench as bench_command
from lily.bench.work import work_of
from lily.config import ModelConfig
from lily.errors import CheckpointError
from lily.model import DEMO
from lily.safetensors_header import read_header

EXPERTS, VOCABULARY = 8, 6144


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "slice"
    options = ["synthetic", str(path), "--experts", str(EXPERTS), "--vocab", str(VOCABULARY), "--gguf", "q4_0", "--gguf", "q4_k"]
    done = CliRunner().invoke(bench_command, options, catch_exceptions=False)
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 3
    return path


def dequantised(path, name):
    """A matrix of the safetensors file by MLX's formula, in float32."""
    header = {key.removeprefix("language_model."): tensor for key, tensor in read_header(path / "model.safetensors").items()}

    def read(part, dtype):
        tensor = header[f"{name}.{part}"]
        return np.fromfile(path / "model.safetensors", dtype, int(np.prod(tensor.shape)), offset=tensor.offset).reshape(tensor.shape)

    words = read("weight", np.uint32)
    scales, biases = ((read(part, np.uint16).astype(np.uint32) << 16).view(np.float32) for part in ("scales", "biases"))
    bits = words.shape[-1] * 32 // (scales.shape[-1] * 64)
    codes = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    codes = codes.reshape(*words.shape[:-1], -1).astype(np.float32)
    return codes * np.repeat(scales, 64, axis=-1) + np.repeat(biases, 64, axis=-1)


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    digests = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        synthetic.write(tmp_path / name, 1, EXPERTS, 64, seed)
        digests.append(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).digest())
    assert digests[0] == digests[1] != digests[2]


def test_the_widths_are_those_of_the_35b_model(made):
    config = ModelConfig.from_file(made)
    assert (config.hidden_size, config.moe_intermediate_size, config.num_attention_heads, config.linear_num_value_heads) == (
        2048,
        512,
        16,
        32,
    )
    full = synthetic.config(40, 256, 248320)["text_config"]
    assert full["num_hidden_layers"] == 40 and full["num_experts_per_tok"] == 8


@pytest.mark.parametrize("kind", gguf_file.TYPES)
def test_gguf_holds_the_same_numbers(made, kind):
    """Read back and dequantised by the gguf package."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed (extra bench)")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made / "gguf" / f"{kind}.gguf").tensors}

    def theirs(name):
        return gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    layer = "model.layers.3."
    for ours, name in (
        (f"{layer}mlp.switch_mlp.down_proj", "blk.3.ffn_down_exps"),
        (f"{layer}self_attn.q_proj", "blk.3.attn_q"),
        ("lm_head", "output"),
    ):
        np.testing.assert_array_equal(theirs(f"{name}.weight"), dequantised(made, ours))
        assert tensors[f"{name}.weight"].tensor_type.name.lower() == kind
    np.testing.assert_array_equal(theirs("blk.0.ffn_gate_inp.weight"), dequantised(made, "model.layers.0.mlp.gate"))
    # llama.cpp wants the first value head of every key head, then the second: head 17 of 32 there is head 3 here (key head 1, its second).
    z, values = dequantised(made, "model.layers.0.linear_attn.in_proj_z"), theirs("blk.0.attn_gate.weight")
    np.testing.assert_array_equal(values[17 * 128 : 18 * 128], z[3 * 128 : 4 * 128])
    out, columns = dequantised(made, "model.layers.0.linear_attn.out_proj"), theirs("blk.0.ssm_out.weight")
    np.testing.assert_array_equal(columns[:, 17 * 128 : 18 * 128], out[:, 3 * 128 : 4 * 128])
    qkv, mixed = dequantised(made, "model.layers.0.linear_attn.in_proj_qkv"), theirs("blk.0.attn_qkv.weight")
    np.testing.assert_array_equal(mixed[:4096], qkv[:4096])
    np.testing.assert_array_equal(mixed[4096 + 17 * 128 :][:128], qkv[4096 + 3 * 128 :][:128])


def test_other_numbers_are_refused_rather_than_rounded(tmp_path):
    with pytest.raises(CheckpointError, match="one scale and the zero point 8"):
        gguf_file.write(DEMO, tmp_path / "demo.gguf")
    assert list(tmp_path.glob("*.gguf")) == []
    with pytest.raises(CheckpointError, match="half-precision"):
        gguf_file.pack(np.zeros((1, 32), np.uint8), 1 / 3, "q4_0")
    with pytest.raises(ValueError, match="expected one of q4_0, q4_k"):
        gguf_file.write(DEMO, tmp_path / "demo.gguf", "q8_0")


def test_another_checkpoint_is_not_overwritten(made):
    done = CliRunner().invoke(bench_command, ["synthetic", str(made), "--experts", "16", "--vocab", str(VOCABULARY)])
    assert done.exit_code == 2 and "another checkpoint" in done.output
    assert json.loads((made / "config.json").read_text())["text_config"]["num_experts"] == EXPERTS


def test_the_account_of_bytes_and_operations(made):
    work = work_of(made)
    tensors = {key.removeprefix("language_model."): tensor for key, tensor in read_header(made / "model.safetensors").items()}
    matrices = sum(
        tensor.bytes for name, tensor in tensors.items() if name.endswith((".weight", ".scales", ".biases")) and "norm" not in name
    )
    matrices -= sum(tensor.bytes for name, tensor in tensors.items() if "embed_tokens" in name or "conv1d" in name)
    assert work.weight_bytes == matrices
    # By hand, a token of four layers with 8 of 256 experts: 0.50 GFLOP. With 8 experts the router alone is smaller.
    assert work.token_operations == pytest.approx(0.5e9 - 2 * 4 * 248 * 2048, rel=5e-3)
    assert work.expert_share == 1 and work.prefill_bytes(1) == work.dense_bytes + work.expert_bytes == work.weight_bytes
    theirs = work_of(made, gguf=True)
    gates = sum(tensors[f"model.layers.{i}.mlp.{name}.weight"].shape[0] * 2048 for i in range(4) for name in ("gate", "shared_expert_gate"))
    assert theirs.weight_bytes - work.weight_bytes == gates * (4 - 8.5 / 8)  # routers are float32 there
