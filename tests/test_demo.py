"""The shipped model: its card's perplexities, its reference logits, and its greedy answers."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pytest
from checkpoints import DATA, DEVICES, relative_rms

import lily

DEMO = DATA / "demo"
WINDOW = 1024
# The model card: perplexity of the 4-bit weights in float32 arithmetic, and how many windows of held-out text there are.
CARD = {
    "synthetic": (1.467, 20),
    "web": (20.160, 9),
    "austen": (63.315, 8),
    "moby": (113.022, 3),
    "devil": (114.777, 1),
    "wordnet": (21.027, 6),
}
GOLDENS = json.loads((DEMO / "goldens.json").read_text(encoding="utf-8"))


@lru_cache
def demo(device="cpu"):
    return lily.Model.demo(device=device, progress=False)


@lru_cache
def heldout():
    """The texts of each source joined, each followed by the end token."""
    texts = dict.fromkeys(CARD, "")
    for line in (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        texts[entry["domain"]] += entry["text"] + "<|endoftext|>"
    return texts


@pytest.mark.parametrize("source", CARD)
def test_perplexity_equals_the_cards(source):
    perplexity, windows = CARD[source]
    ids = demo().encode(heldout()[source])
    whole = (len(ids) - 1) // WINDOW
    assert whole == windows or source == "synthetic" and whole > windows
    score = demo().score(ids[: WINDOW * windows + 1], window=WINDOW)
    assert len(score.logprobs) == WINDOW * windows
    assert score.perplexity == pytest.approx(perplexity, rel=0.005)


def reference():
    stored = np.load(DEMO / "ref_q4_float32.npz")
    return stored["ids"], stored["positions"], stored["logits"]


def test_logits_as_shipped_are_within_4_percent_of_the_reference():
    ids, positions, wanted = reference()
    assert relative_rms(demo().logits(ids, last_only=False)[positions], wanted) <= 0.04


def test_float32_logits_equal_the_reference():
    ids, positions, wanted = reference()
    assert abs(demo("cpu:float32").logits(ids, last_only=False)[positions] - wanted).max() <= 1e-3


def assert_golden(device, prompt, golden):
    answer = demo(device).generate(prompt, max_tokens=golden["max_tokens"], temperature=0, logprobs=2)
    assert (answer.text, answer.finish_reason) == (golden["text"], golden["finish_reason"])
    assert min(entry.top[0][1] - entry.top[1][1] for entry in answer.logprobs) > 0.5
    assert golden["margin"] > 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("golden", GOLDENS["texts"], ids=range(len(GOLDENS["texts"])))
def test_greedy_texts_do_not_change(golden, device):
    """A regression test: the goldens are this engine's own answers, at margins that no change of sums reaches."""
    assert_golden(device, golden["prompt"], golden)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rendered_chat_with_a_tool_is_answered_by_a_call(device):
    golden = GOLDENS["tool"]
    prompt = demo(device).apply_chat_template(golden["messages"], tools=golden["tools"])
    assert_golden(device, prompt, golden)
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    assert golden["text"].endswith(call) and golden["finish_reason"] == "stop"
