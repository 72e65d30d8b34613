"""The small oracle checkpoints: exact in float32, within the bars as shipped, and as the rounding contract says.

The references were made by an independent implementation; MODEL.md section 13 sets the bars.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from checkpoints import (
    DENSE,
    DEVICES,
    FIXTURES,
    GREEDY,
    MOE,
    NAMES,
    PROMPTS,
    assert_same,
    decode_rows,
    everything,
    expected,
    force,
    load,
    model,
    prompt,
    relative_rms,
    sharded_with_junk,
)
from reference_model import Reference
from safetensors.numpy import load_file

import lily
from lily.testing import state, trace

ROUTED = [name for name in NAMES if "moe" in name]


def reference(name, length):
    return expected(name)[f"logits_ref_{length}"]


def rows(loaded, name, length):
    """Logits at the positions that the reference has."""
    wanted = len(reference(name, length))
    return loaded.logits(prompt(name, length), last_only=False)[-wanted:]


# Bar 1: float32


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_equal_the_reference(name, length):
    assert abs(rows(model(name, "cpu:float32"), name, length) - reference(name, length)).max() <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_equal_the_reference_through_decode_steps(name):
    session = model(name, "cpu:float32").session()
    assert abs(decode_rows(session, prompt(name, 64)) - reference(name, 64)).max() <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_equal_an_exact_computation_from_the_files(name):
    ids = prompt(name, 64)
    exact = Reference(FIXTURES / name).logits(ids)
    assert abs(model(name, "cpu:float32").logits(ids, last_only=False) - exact).max() <= 1e-3


def read_whole(session, ids):
    session.append(ids)


def read_one_by_one(session, ids):
    for token in ids:
        session.append([int(token)])


def decode_one_by_one(session, ids):
    session.append(ids[:1])
    for token in ids[1:]:
        force(session, token)
    session.logits()  # the last one is still pending


GREEDY_CASES = [
    (name, length, feed)
    for name, length, feed in itertools.product(NAMES, PROMPTS, (read_whole, read_one_by_one, decode_one_by_one))
    if feed is read_whole or length in (7, 64)
]


@pytest.mark.parametrize(("name", "length", "feed"), GREEDY_CASES)
def test_float32_greedy_text_equals_the_reference(name, length, feed):
    session = model(name, "cpu:float32").session()
    feed(session, prompt(name, length))
    assert session.generate(max_tokens=32, **GREEDY).tokens == expected(name)[f"greedy_ref_{length}"].tolist()


def as_reference(key, value, shape):
    """A stored state in the reference's layout, without the batch axis: S is [heads, values, keys], K and V [heads, T, D]."""
    if key.endswith("conv_state"):
        return value.reshape(shape[1:])
    if key.endswith("recurrent_state"):
        heads, values, keys = shape[1:]
        return value.reshape(heads, keys, values).transpose(0, 2, 1)
    heads, tokens, dim = shape[1:]
    return value.reshape(-1, heads, dim).transpose(1, 0, 2)[:, -tokens:]


@pytest.mark.parametrize("feed", [read_whole, read_one_by_one, decode_one_by_one])
@pytest.mark.parametrize("length", [7, 300])
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_float32_states_equal_the_reference(name, length, feed):
    stored = load_file(FIXTURES / name / "states.safetensors")
    session = model(name, "cpu:float32").session()
    feed(session, prompt(name, length))
    found = state(session)
    compared = 0
    for key, wanted in stored.items():
        if key.startswith(f"ref.prompt_{length}."):
            part = key.split(".", 2)[2]
            assert abs(as_reference(part, found[part], wanted.shape) - wanted[0]).max() <= 1e-4 * abs(wanted).max(), part
            compared += 1
    assert compared >= 6


def traced(name, length=7):
    """A trace, with the layer outputs and the slices that the engine keeps in one buffer taken apart."""
    loaded = model(name, "cpu:float32")
    config = loaded.config
    found = trace(loaded, prompt(name, length))
    found["hidden.0"] = found.pop("embed_tokens.out")
    widths = {
        "q_proj": 2 * config.num_attention_heads * config.head_dim,
        "k_proj": config.num_kv_heads * config.head_dim,
        "v_proj": config.num_kv_heads * config.head_dim,
    }
    for i, kind in enumerate(config.layer_types):
        layer = f"layers.{i}"
        mixer = f"{layer}.self_attn.o_proj.out" if kind == "full_attention" else f"{layer}.linear_attn.out_proj.out"
        found[f"{layer}.mlp.out"] = found[f"hidden.{i + 1}"] - found[f"hidden.{i}"] - found[mixer]
        if kind == "full_attention":
            start = 0
            for part, width in widths.items():
                at = f"{layer}.self_attn.{part}.out"
                found[at] = found[at].reshape(length, sum(widths.values()))[:, start : start + width]
                start += width
    return found


def assert_close(found, wanted, tolerance, name):
    assert abs(found.reshape(wanted.shape) - wanted).max() <= tolerance * abs(wanted).max(), name


@pytest.mark.parametrize("name", NAMES)
def test_float32_residual_stream_and_every_module_equal_the_reference(name):
    found = traced(name)
    stored = load_file(FIXTURES / name / "trace_ref_7.safetensors")
    for i in range(model(name).config.num_layers + 1):
        assert_close(found[f"hidden.{i}"], expected(name)[f"hidden_ref_7.{i}"], 1e-3, f"hidden.{i}")
    for key, wanted in stored.items():
        part = key.removeprefix("trace.")
        if part.endswith("gate.indices"):
            assert np.array_equal(found[part].reshape(wanted.shape), wanted), part
        else:
            assert_close(found[part], wanted, 1e-3, part)
    assert len(stored) >= 24


@pytest.mark.parametrize("name", ROUTED)
def test_float32_routing_equals_the_reference(name):
    loaded = model(name, "cpu:float32")
    found = trace(loaded, prompt(name, 64))
    for i in range(loaded.config.num_layers):
        indices, weights = (expected(name)[f"router_ref_64.{i}.{part}"] for part in ("indices", "weights"))
        assert np.array_equal(found[f"layers.{i}.mlp.gate.indices"].reshape(indices.shape), indices), i
        assert_close(found[f"layers.{i}.mlp.gate.weights"], weights, 1e-4, i)


# Bar 2: as shipped


def assert_within_the_bar(name, found, lengths):
    wanted = np.concatenate([reference(name, n) for n in lengths])
    published = np.concatenate([expected(name)[f"logits_mlx_{n}"] for n in lengths])
    error = relative_rms(found, wanted)
    assert error <= (0.04 if name == DENSE else 0.07)
    assert error <= relative_rms(published, wanted) + 0.005
    second, first = np.sort(wanted, axis=-1)[:, -2:].T
    clear = first - second > 0.5
    assert clear.sum() >= 20
    assert np.array_equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])


@pytest.mark.parametrize("name", NAMES)
def test_as_shipped_within_the_bar(name):
    found = np.concatenate([rows(model(name), name, n) for n in (64, 300)])
    assert_within_the_bar(name, found, (64, 300))


@pytest.mark.parametrize("name", NAMES)
def test_as_shipped_within_the_bar_through_decode_steps(name):
    assert_within_the_bar(name, decode_rows(model(name).session(), prompt(name, 64)), (64,))


# Bar 3: the rounding contract


@pytest.mark.parametrize("length", [64, 300])
def test_as_shipped_follows_the_rounding_contract(length):
    ids = prompt(DENSE, length)
    emulated = Reference(FIXTURES / DENSE, rounded=True).logits(ids)
    found = model(DENSE).logits(ids, last_only=False)
    assert relative_rms(found, emulated) <= 0.01


# Forms of a checkpoint


@pytest.mark.parametrize("device", DEVICES)
def test_shards_and_foreign_tensors_change_nothing(device, tmp_path):
    with lily.Model.from_pretrained(sharded_with_junk(tmp_path), device=device, progress=False) as other:
        plain = load(MOE, device)
        for length in PROMPTS:
            ids = prompt(MOE, length)
            assert np.array_equal(other.logits(ids, last_only=False), plain.logits(ids, last_only=False))
        sessions = [m.prefill(prompt(MOE, 64)) for m in (plain, other)]
        for session in sessions:
            session.generate(max_tokens=16, **GREEDY)
        assert_same(*(everything(session) for session in sessions))
