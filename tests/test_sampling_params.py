"""Sampling settings: bad values raise at once with the field's name; good ones are inherited field by field."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from lily import CheckpointError, LilyError, Sampling, SamplingError
from lily.request import Request

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", "hot"), ("temperature", True),
        ("top_k", -1), ("top_k", 1.5), ("top_k", True), ("top_k", 1 << 40), ("top_k", "5"),
        ("top_p", 0), ("top_p", 1.01), ("top_p", NAN), ("top_p", [0.5]),
        ("min_p", -0.01), ("min_p", 1.5), ("min_p", NAN),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", INF),
        ("presence_penalty", NAN), ("presence_penalty", "1"), ("frequency_penalty", -INF),
        ("logit_bias", [1]), ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: NAN}),
        ("logit_bias", {1: None}), ("logit_bias", {True: 1.0}),
        ("seed", -1), ("seed", 1 << 64), ("seed", 1.0), ("seed", True),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field(field, value):
    with pytest.raises(SamplingError, match=f"^{field}") as caught:
        Sampling(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, LilyError)


def test_good_values_become_plain_numbers():
    sampling = Sampling(temperature=1, top_k=np.int32(5), top_p=np.float32(0.5), logit_bias={np.int64(3): 1}, seed=(1 << 64) - 1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 5, 0.5)
    assert type(sampling.top_k) is int and sampling.logit_bias == {3: 1.0}
    assert hash(sampling) == hash(Sampling(**sampling.to_dict())) and pickle.loads(pickle.dumps(sampling)) == sampling
    with pytest.raises(AttributeError):
        sampling.seed = 1


def test_greedy_switches_everything_off():
    resolved = Sampling.greedy().over(Sampling(temperature=1, top_k=20, presence_penalty=1.5, seed=4)).resolved()
    assert resolved == Sampling(0, 0, 1, 0, 1, 0, 0, {}, 4)


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": True, "temperature": None}, 1.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"temperature": 0.6}, 0.6),
        ({}, 0.0),
        ({"top_k": 20}, 0.0),
    ],
)
def test_the_checkpoints_temperature(config, temperature):
    assert Sampling.from_generation_config(config).resolved().temperature == temperature


def test_bad_checkpoint_values_are_a_checkpoint_error():
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p"):
        Sampling.from_generation_config({"top_p": 7})


def make(options=None, defaults=None):
    return Request.make(defaults or Sampling(), 100, options or {})


def test_request_over_sampling_over_checkpoint_over_greedy():
    defaults = Sampling.from_generation_config({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20})
    request = make({"sampling": Sampling(top_p=0.5, min_p=0.1), "top_k": 7}, defaults)
    got = request.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.6, 0.5, 7, 0.1, 1.0)
    assert make({"temperature": 0}, defaults).sampling.temperature == 0
    assert make().sampling.temperature == 0


def test_a_fresh_seed_for_each_request_and_a_given_one_kept():
    assert len({make().sampling.seed for _ in range(5)}) == 5
    assert make({"seed": 3}).sampling.seed == make({"sampling": Sampling(seed=3)}).sampling.seed == 3


def test_the_engine_sees_every_field():
    native = make({"token_mask": lambda ids: ids, "logprobs": 2, "logit_bias": {5: -1}}).native()
    assert native.pop("seed") >= 0
    assert native == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "logit_bias": {5: -1.0}, "logprobs": 2, "masked": True,
    }  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), [(0, -1), (False, -1), (True, 0), (1, 1), (20, 20)])
def test_logprobs(value, expected):
    assert make({"logprobs": value}).logprobs == expected


def test_max_tokens_has_an_alias():
    assert make({"max_new_tokens": 3}).max_tokens == make({"max_tokens": 3}).max_tokens == 3
    assert make({"max_tokens": 0}).max_tokens == 0 and make().max_tokens is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 1, "max_new_tokens": 1}, TypeError, "mean the same"),
        ({"max_tokens": -1}, ValueError, "max_tokens"),
        ({"max_tokens": 1.0}, TypeError, "max_tokens"),
        ({"max_tokens": True}, TypeError, "max_tokens"),
        ({"stop": ""}, ValueError, "empty"),
        ({"stop": [1]}, TypeError, "stop"),
        ({"logprobs": 21}, SamplingError, "logprobs"),
        ({"logprobs": -1}, SamplingError, "logprobs"),
        ({"logprobs": 1.5}, SamplingError, "logprobs"),
        ({"ignore_eos": "yes"}, TypeError, "ignore_eos"),
        ({"token_mask": 1}, TypeError, "token_mask"),
        ({"sampling": {"top_k": 1}}, TypeError, "sampling"),
        ({"temprature": 1}, TypeError, "temprature"),
        ({"logit_bias": {100: 1.0}}, SamplingError, "logit_bias names token 100"),
        ({"temperature": "hot"}, SamplingError, "temperature"),
    ],
)
def test_a_bad_option_is_named(options, error, message):
    with pytest.raises(error, match=message):
        make(options)
