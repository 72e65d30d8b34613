"""`model.rank`: continuations in order of likelihood, after a prompt that is read once."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import DENSE, MOE, NAMES, model, prompt

import lily
from lily.testing import scripted


@pytest.mark.parametrize("name", NAMES)
def test_each_logprob_is_the_score_of_the_whole_text_in_every_bit(name):
    loaded, ids = model(name), prompt(name, 64).tolist()
    choices = [[7], [9, 30, 31], [3] * 17, [400, 2]]
    ranked = loaded.rank(ids, choices)
    for entry in ranked:
        scored = loaded.score(ids + choices[entry.index]).logprobs[-len(choices[entry.index]) :]
        assert entry.logprob == float(scored.sum(dtype=np.float64)) and entry.choice is choices[entry.index]
    assert [entry.logprob for entry in ranked] == sorted((entry.logprob for entry in ranked), reverse=True)


@pytest.mark.parametrize("device", ["cpu", "cpu:float32"])
def test_a_prompt_of_one_token(device):
    loaded = model(DENSE, device)
    assert loaded.rank([5], [[6, 7]])[0].logprob == float(loaded.score([5, 6, 7]).logprobs.sum(dtype=np.float64))


def test_the_prompt_is_read_once():
    loaded = model(MOE)
    read = []

    class Counted:
        def __init__(self, session):
            self._native, self._session = self, session

        def append(self, ids, progress):
            read.append(len(ids))
            self._session._native.append(ids, progress)

        def append_rows(self, ids, mode, progress):
            read.append(len(ids))
            return self._session._native.append_rows(ids, mode, progress)

        def fork(self):
            return Counted(self._session.fork())

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self._session.close()

    from types import SimpleNamespace

    from lily.scoring import rank

    shim = SimpleNamespace(_ids=loaded._ids, tokenizer=loaded.tokenizer, config=loaded.config, max_context=loaded.max_context,
                           session=lambda: Counted(loaded.session()))  # fmt: skip
    result = rank(shim, prompt(MOE, 300), [[1, 2], [3], [4, 5, 6]])
    assert read == [299, 3, 2, 4] and result == loaded.rank(prompt(MOE, 300), [[1, 2], [3], [4, 5, 6]])


def test_text_choices_are_ranked_by_what_the_model_expects():
    ranked = lily.Model.demo(progress=False).rank("The capital of France is", [" London", " Paris", " purple"])
    assert (ranked[0].choice, ranked[0].index) == (" Paris", 1) and len(ranked) == 3


def test_prompt_and_choice_are_encoded_apart():
    loaded = lily.Model.demo(progress=False)
    whole, apart = loaded.encode("lit") + loaded.encode("tle"), loaded.encode("little")
    assert whole != apart
    assert loaded.rank("lit", ["tle"])[0].logprob == loaded.rank(loaded.encode("lit"), [loaded.encode("tle")])[0].logprob


def test_equal_choices_keep_their_order():
    ranked = model(DENSE).rank([1, 2, 3], [[9], [8], [9]])
    places = [entry.index for entry in ranked if entry.choice == [9]]
    assert places == [0, 2]


@pytest.mark.parametrize(
    ("given", "choices", "error", "message"),
    [
        ("x", [], ValueError, "choices is empty"),
        ("x", "abc", TypeError, "choices is str"),
        ("x", None, TypeError, "choices is NoneType"),
        ("x", ["a", ""], ValueError, "choice 1: the prompt is empty"),
        ("x", ["a", 3], TypeError, "choice 1"),
        ("x", [[1 << 20]], ValueError, "choice 0: token id"),
        ("", ["a"], ValueError, "the prompt is empty"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_read(given, choices, error, message):
    with pytest.raises(error, match=message):
        scripted("x").rank(given, choices)


def test_the_longest_choice_must_fit():
    loaded = scripted("x", max_context=16)
    assert len(loaded.rank([1] * 10, [[2] * 6])) == 1
    with pytest.raises(lily.ContextOverflowError) as caught:
        loaded.rank([1] * 10, [[2], [2] * 7])
    assert (caught.value.tokens, caught.value.limit) == (17, 16)


def test_no_session_is_left_behind():
    with lily.Model.demo(progress=False) as loaded:
        loaded.rank("Once upon a", [" time", " day"])
        before = loaded.memory()
        loaded.rank("Once upon a", [" time", " day"])
        assert loaded.memory() == before
