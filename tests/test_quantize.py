"""Quantisation as MLX does it: the same codes, scales and biases in every bit, when converting and when loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import FIXTURES, MOE, ORIGINAL, load, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_model import unpack
from safetensors.numpy import load_file

import lily
from lily import staging, values
from lily.affine import from_bf16, pack, quantize, to_bf16
from lily.config import ModelConfig
from lily.quantization import BITS, GROUPS, Packing, packing_for
from lily.weights import load_weights

PACKED = load_file(FIXTURES / "quant_packing.safetensors")
IDS = prompt(ORIGINAL, 64)


def weights_of(name):
    return load_weights(FIXTURES / name, ModelConfig.from_file(FIXTURES / name))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_codes_scales_and_biases_are_those_of_mlx(bits, group):
    codes, scales, biases = quantize(PACKED["source_f32"], bits, group)
    base = f"affine_b{bits}_g{group}"
    assert np.array_equal(codes, PACKED[f"{base}.weight"]) and codes.dtype == np.uint32
    assert np.array_equal(unpack(codes, 256), PACKED[f"{base}.codes"])
    assert np.array_equal(scales, PACKED[f"{base}.scales_bf16bits"]) and np.array_equal(biases, PACKED[f"{base}.biases_bf16bits"])


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_a_little_endian_stream_of_bits(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 96), np.uint8)
    assert np.array_equal(unpack(pack(codes, bits), 96), codes)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from(GROUPS), st.integers(0, 2**32 - 1), st.integers(-30, 30), st.sampled_from([0, 0.5, 1]))
def test_a_value_comes_back_within_a_step(bits, group, seed, exponent, zeros):
    random = np.random.default_rng(seed)
    values = from_bf16(to_bf16((random.standard_normal((2, 2 * group)) * 2.0**exponent).astype(np.float32)))
    values[random.random(values.shape) < zeros] = 0
    codes, scales, biases = quantize(values, bits, group)
    spread = lambda x: np.repeat(from_bf16(x).astype(np.float64), group, axis=1)  # noqa: E731
    back = spread(scales) * unpack(codes, 2 * group) + spread(biases)
    # Half a step of rounding, the edge that moves with the step (another half), and bfloat16's rounding of the scale.
    largest = np.repeat(np.abs(values).reshape(2, 2, group).max(axis=2), group, axis=1)
    allowed = 1.001 * np.abs(spread(scales)) + largest * 2.0**-7
    assert (np.abs(back - values) <= allowed).all()


def test_routers_and_shared_gates_have_eight_bits():
    assert packing_for("layers.3.mlp.gate", 2048, 4, 32) == packing_for("layers.3.mlp.shared_expert_gate", 2048, 4, 128) == Packing(8, 64)
    assert packing_for("layers.3.mlp.gate_proj", 2048, 4, 32) == Packing(4, 32)
    assert packing_for("layers.3.mlp.down_proj", 96, 4, 64) is None and packing_for("layers.3.mlp.gate", 96, 4, 32) is None


# At load


def dequantized(entry):
    """float32 of a staged weight, as MLX's embedding lookup has it; experts in one block of rows."""
    rows, cols = entry["experts"] * entry["rows"], entry["cols"]
    part = {name: values.read_bytes(p["file"], p["offset"], p["bytes"]) for name, p in entry["parts"].items()}
    codes = unpack(np.frombuffer(part["weight"], np.uint32).reshape(rows, -1), cols)
    scales, biases = (
        np.repeat(from_bf16(np.frombuffer(part[name], np.uint16)).reshape(rows, -1), entry["group"], 1) for name in ("scales", "biases")
    )
    return scales * codes + biases


@pytest.mark.parametrize("bits", [4, 8])
def test_every_matrix_that_the_group_divides_is_quantised(bits):
    original = weights_of(ORIGINAL)
    with staging.staged(original, quantize=bits) as ready:
        for before, after in zip(original, ready, strict=True):
            if before["kind"] == "vector" or before["cols"] % 64:
                assert after == before
                continue
            expected = 8 if before["name"].endswith(("mlp.gate", "shared_expert_gate")) else bits
            assert (after["format"], after["bits"], after["group"], after["expert_stride_rows"]) == ("affine", expected, 64, after["rows"])
            blocks = [values.read_floats(before, b.start, (b.count, before["cols"])) for b in values.blocks_of(before)]
            parts = [quantize(block, expected, 64) for block in blocks]
            for i, name in enumerate(("weight", "scales", "biases")):
                part = after["parts"][name]
                assert values.read_bytes(part["file"], part["offset"], part["bytes"]) == b"".join(p[i].tobytes() for p in parts)
            assert abs(dequantized(after) - np.concatenate(blocks)).max() <= 0.2 * abs(np.concatenate(blocks)).max()
    assert {w["name"].split(".")[-2] for w, r in zip(original, ready, strict=True) if w["kind"] == "linear" and w is r} == {
        "switch_mlp", "shared_expert",
    }  # fmt: skip


def test_experts_fused_in_one_tensor_come_apart():
    original = {w["name"]: w for w in weights_of(ORIGINAL)}
    fused = load_file_bf16(FIXTURES / ORIGINAL / "model.safetensors", "model.language_model.layers.1.mlp.experts.gate_up_proj")
    width = fused.shape[1] // 2
    for kind, rows in (("gate", slice(None, width)), ("up", slice(width, None))):
        weight = original[f"layers.1.mlp.switch_mlp.{kind}_proj"]
        blocks = [values.read_floats(weight, b.start, (b.count, weight["cols"])) for b in values.blocks_of(weight)]
        assert np.array_equal(np.concatenate(blocks), fused[:, rows].reshape(-1, fused.shape[2]))


def load_file_bf16(path, name):
    from lily.safetensors_header import read_header

    tensor = read_header(path)[name]
    raw = np.frombuffer(values.read_bytes(str(path), tensor.offset, tensor.bytes), np.uint16)
    return from_bf16(raw).reshape(tensor.shape)


@pytest.mark.parametrize("device", ["cpu", "cpu:float32"])
def test_eight_bits_change_little_and_four_bits_use_less_memory(device):
    plain, eight, four = (load(ORIGINAL, device, quantize=bits) for bits in (None, 8, 4))
    exact = plain.logits(IDS, last_only=False)
    error = {m: np.sqrt(np.square(m.logits(IDS, last_only=False) - exact).mean() / np.square(exact).mean()) for m in (eight, four)}
    assert error[eight] < error[four] / 3
    assert four.memory().weights < eight.memory().weights < plain.memory().weights


def test_a_checkpoint_that_is_quantised_stays_as_it_is():
    weights = weights_of(MOE)
    with staging.staged(weights, quantize=8) as ready:
        assert ready is weights


def test_a_session_belongs_to_the_weights_that_made_it(tmp_path):
    plain, four, again = (load(ORIGINAL, quantize=bits) for bits in (None, 4, 4))
    assert len({plain.digest, four.digest}) == 2 and four.digest == again.digest
    four.prefill(IDS).save(tmp_path / "session.lily")
    assert np.array_equal(lily.Session.load(again, tmp_path / "session.lily").logits(), four.logits(IDS))
    with pytest.raises(lily.SessionMismatchError):
        lily.Session.load(plain, tmp_path / "session.lily")


def test_blocks_cover_every_row_once(monkeypatch):
    monkeypatch.setattr(values, "_BLOCK_ELEMENTS", 700)
    for weight in weights_of(ORIGINAL):
        if weight["kind"] == "linear":
            rows = [row for block in values.blocks_of(weight) for row in range(block.row, block.row + block.count)]
            assert rows == list(range(weight["experts"] * weight["rows"]))


def test_small_blocks_give_the_same_model(monkeypatch):
    expected = load(ORIGINAL, quantize=4).logits(IDS)
    monkeypatch.setattr(values, "_BLOCK_ELEMENTS", 700)
    assert np.array_equal(load(ORIGINAL, quantize=4).logits(IDS), expected)


def test_progress_counts_elements_to_the_end():
    seen = []
    lily.Model.from_pretrained(FIXTURES / ORIGINAL, quantize=4, progress=lambda *event: seen.append(event))
    steps = [event for event in seen if event[0] == "convert"]
    assert steps[-1][1] == steps[-1][2] and [s[1] for s in steps] == sorted(s[1] for s in steps)


def test_the_memory_limit_is_checked_before_anything_is_converted(monkeypatch):
    monkeypatch.setattr(staging, "_temporary", lambda size: pytest.fail("a file was made"))
    with pytest.raises(lily.OutOfMemoryError) as caught:
        load(ORIGINAL, quantize=4, memory_limit=100_000)
    assert caught.value.needed > caught.value.available == 100_000 and caught.value.hint


def test_nothing_is_left_in_the_temporary_directory(tmp_path):
    code = f"""
import lily, os
model = lily.Model.from_pretrained({str(FIXTURES / ORIGINAL)!r}, quantize=4, progress=False)
print(os.listdir({str(tmp_path)!r}), len(model.generate([1, 2], max_tokens=2, ignore_eos=True).tokens))
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "[] 2\n" and list(tmp_path.iterdir()) == []


def test_open_files_are_given_back():
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("open files are counted in /proc")
    before = len(list(folder.iterdir()))
    model = load(ORIGINAL, quantize=4)
    assert len(list(folder.iterdir())) == before
    model.close()


def test_a_full_disk_is_said_clearly(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(lily.LilyError, match="set TMPDIR"):
        load(ORIGINAL, quantize=4)


@pytest.mark.parametrize(
    ("bits", "error"), [(3, ValueError), (16, ValueError), (0, ValueError), ("4", TypeError), (True, TypeError), (4.0, TypeError)]
)
def test_other_widths_are_refused(bits, error):
    with pytest.raises(error, match="expected 4, 8 or None"):
        load(ORIGINAL, quantize=bits)


def test_the_command_line_takes_it_too():
    command = [sys.executable, "-m", "lily", "generate", "Hello", "-m", str(FIXTURES / ORIGINAL), "-n", "2", "--json", "--quantize"]
    good = subprocess.run([*command, "4"], capture_output=True, text=True)
    assert good.returncode == 0 and good.stderr == ""
    bad = subprocess.run([*command, "5"], capture_output=True, text=True)
    assert bad.returncode == 1 and "quantize is 5, expected 4, 8 or None" in bad.stderr
