"""The whole family: plans of the released shapes, and slices of true width through load, prefill and decode."""

from __future__ import annotations

import importlib.util
import json
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
from checkpoints import decode_rows, relative_rms

import lily
from lily.config import ModelConfig
from lily.layout import Linear, weights_of

_spec = importlib.util.spec_from_file_location("make_slice", Path(__file__).parents[1] / "examples" / "make_slice.py")
make_slice = importlib.util.module_from_spec(_spec)
sys.modules["make_slice"] = make_slice  # dataclasses look their module up
_spec.loader.exec_module(make_slice)

SIZES = make_slice.SIZES
VOCABULARY = 248320
# Text parameters in billions, and bytes of K and V for each token, by hand from the released widths.
RELEASED = {
    "0.8b": (0.752, 6 * 2 * 2 * 256 * 2),
    "2b": (1.882, 6 * 2 * 2 * 256 * 2),
    "4b": (4.206, 8 * 2 * 4 * 256 * 2),
    "9b": (8.954, 8 * 2 * 4 * 256 * 2),
    "27b": (26.896, 16 * 2 * 4 * 256 * 2),
    "35b-a3b": (34.661, 10 * 2 * 2 * 256 * 2),
    "122b-a10b": (122.112, 12 * 2 * 2 * 256 * 2),
    "397b-a17b": (396.346, 15 * 2 * 2 * 256 * 2),
}
# A slice keeps all widths; only these are cut.
LAYERS, EXPERTS, SMALL_VOCABULARY = 4, 16, 6144
IN_SUITE = ("0.8b", "35b-a3b")
SLICES = [name if name in IN_SUITE else pytest.param(name, marks=pytest.mark.soak) for name in SIZES]
IDS = np.random.default_rng(5).integers(0, SMALL_VOCABULARY, 40)


def released(name):
    size = SIZES[name]
    return make_slice.config(size.layers, size.experts, VOCABULARY, size)


@pytest.mark.parametrize("name", SIZES)
def test_the_released_widths_have_the_released_number_of_parameters(name):
    weights = weights_of(ModelConfig.from_dict(released(name)))
    count = sum(prod(weight.shape) for weight in weights)
    assert count / 1e9 == pytest.approx(RELEASED[name][0], abs=5e-4)


def test_parameter_counts_that_were_published_exactly():
    count = {n: sum(prod(w.shape) for w in weights_of(ModelConfig.from_dict(released(n)))) for n in ("2b", "122b-a10b")}
    assert count["122b-a10b"] == 122_111_526_912
    # The public count of the 2B model has its multi-token-prediction head: one attention layer, fc and three norms more.
    hidden, ffn = 2048, 6144
    attention = hidden * (2 * 2048 + 2 * 512) + 2048 * hidden + 2 * 256
    assert count["2b"] + attention + 3 * hidden * ffn + 2 * hidden + 2 * hidden * hidden + 3 * hidden == 1_942_653_248


@pytest.mark.parametrize("name", SIZES)
def test_the_plan_of_a_released_model(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released(name)))
    config = ModelConfig.from_file(path)
    plan = lily.plan(path)
    assert plan.kv_bytes_per_token == RELEASED[name][1]
    recurrent = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    conv = 3 * config.conv_channels * 2
    assert plan.state_bytes == pytest.approx(config.layer_types.count("linear_attention") * (recurrent + conv), rel=0.01)
    # 4 bits in groups of 64 are 4.5 bits for each parameter; routers, with 8.5, and norms are few.
    linear = sum(prod(weight.shape) for weight in weights_of(config) if isinstance(weight, Linear))
    assert linear * 4.5 / 8 <= plan.weights <= linear * 4.55 / 8
    # A decode step reads every weight once, but of the experts only the chosen ones, and one row of the embedding.
    skipped = 0 if config.tied else VOCABULARY * config.hidden_size
    if config.is_moe:
        skipped += (
            (config.num_experts - config.experts_per_token) * config.num_layers * 3 * config.moe_intermediate_size * config.hidden_size
        )
    least = (linear - skipped) * 4.5 / 8 + 2 * plan.state_bytes
    sampler = 12 * 4 * VOCABULARY  # passes over logits, counts and bias, with every option on
    assert least <= plan.bytes_per_token <= 1.02 * least + sampler
    assert plan.decode["stages"] <= plan.decode["dispatches"] <= 9 * config.num_layers


def test_the_plan_of_the_35b_model_keeps_its_promise(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released("35b-a3b")))
    plan = lily.plan(path)
    assert plan.decode["dispatches"] <= 340 and plan.decode["stages"] <= 290
    assert plan.state_bytes / (1 << 20) == pytest.approx(61, abs=1) and plan.kv_bytes_per_token == 20 * 1024


@pytest.fixture(scope="module")
def slice_of(tmp_path_factory):
    """The directory of a size's slice; only the last one made is kept, they are large."""
    made = {}

    def make(name):
        if name not in made:
            for path in [p for directory in made.values() for p in directory.iterdir()]:
                path.unlink()
            made.clear()
            made[name] = tmp_path_factory.mktemp(name)
            make_slice.write(made[name], LAYERS, EXPERTS, SMALL_VOCABULARY, size=name)
        return made[name]

    yield make
    for path in [p for directory in made.values() for p in directory.iterdir()]:
        path.unlink()


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_true_width_loads_reads_and_decodes(slice_of, name):
    bar = 0.10 if SIZES[name].experts else 0.05
    directory = slice_of(name)
    assert lily.inspect(directory).ok
    with lily.Model.from_pretrained(directory, device="cpu:float32", progress=False) as exact:
        expected = exact.logits(IDS, last_only=False)
        scale = abs(expected).max()
        with exact.session() as session:
            assert abs(decode_rows(session, IDS[:8]) - expected[:8]).max() <= 1e-3 * scale
    with lily.Model.from_pretrained(directory, device="cpu", progress=False) as model:
        read = model.logits(IDS, last_only=False)
        assert np.isfinite(read).all() and relative_rms(read, expected) <= bar
        with model.session() as session:
            assert relative_rms(decode_rows(session, IDS[:8]), expected[:8]) <= bar
        with model.session() as session:  # cut elsewhere, the same bits
            session.append(IDS[:23])
            session.append(IDS[23:])
            assert np.array_equal(session.logits(), read[-1])
        assert len(model.generate(IDS, max_tokens=3, temperature=0, ignore_eos=True).tokens) == 3
