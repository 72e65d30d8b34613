"""`lily eval`: how far predictions are from float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import lily
from lily import evaluation
from lily.cli import cli
from lily.evaluation import compare, lily_source, read_text, windows
from lily.model import DEMO

DATA = Path(__file__).parent / "data" / "demo"


def source(function):
    """Logits [rows, vocab] of ids, in two pieces."""

    def rows(ids):
        logits = function(ids)
        yield logits[:3]
        yield logits[3:]

    return rows


def test_figures_by_hand():
    """Four tokens; the reference gives each 1/4, a side gives the target's neighbour twice the weight."""
    ids = np.array([0, 1, 2, 3, 0, 1], np.int32)
    uniform = source(lambda ids: np.zeros((len(ids), 4), np.float32))
    tilted = np.log(np.array([1, 1, 1, 2], np.float32))
    found = compare([ids], ("reference", uniform), [("same", uniform), ("tilted", source(lambda ids: np.tile(tilted, (len(ids), 1))))])
    same, other = found.sides
    assert found.positions == 5 and found.reference_perplexity == pytest.approx(4)
    assert (same.agreement, same.perplexity_change, same.divergence, same.logprob_distance) == (1, 0, 0, 0)
    assert other.perplexity == pytest.approx(np.exp((4 * np.log(5) + np.log(5 / 2)) / 5))
    assert other.agreement == 0 and found.between == 0
    assert other.divergence == pytest.approx(np.log(5) - np.log(4) - np.log(2) / 4)
    assert other.logprob_distance == pytest.approx((4 * np.log(5 / 4) + np.log(8 / 5)) / 5)


def test_windows_are_spread_over_the_text():
    found = windows(range(1000), window=100, positions=300)
    assert [(int(w[0]), len(w)) for w in found] == [(0, 101), (300, 101), (600, 101)]
    assert [len(w) for w in windows(range(40), window=100)] == [40]
    with pytest.raises(ValueError, match="at least two"):
        windows([1])


def test_the_shipped_model_meets_its_bars_against_stored_float32_logits():
    """The stored logits, at some positions of a text, are of an independent float32 implementation."""
    stored = np.load(DATA / "ref_q4_float32.npz")
    ids, at = stored["ids"].astype(np.int32), stored["positions"]
    at, logits = at[at + 1 < len(ids)], stored["logits"][stored["positions"] + 1 < len(ids)]
    with lily.Model.demo() as model:
        ours = np.concatenate(list(lily_source(model)(ids)))[at]
    targets = np.append(ids[:1], ids[at + 1])
    found = compare([targets], ("float32", lambda _: iter([logits])), [("lily", lambda _: iter([ours]))])
    assert found.positions == len(at) and found.bars["agreement"], str(found)
    assert abs(found.sides[0].perplexity_change) < 0.005  # so few positions say less than the bar's 4,096


def test_two_sides_of_different_size_are_refused():
    narrow, wide = (source(lambda ids, n=n: np.zeros((len(ids), n), np.float32)) for n in (4, 5))
    with pytest.raises(ValueError, match="gave logits"):
        compare([np.arange(4, dtype=np.int32)], ("reference", narrow), [("wide", wide)])


def test_texts_and_domains(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"domain": "a", "text": "one"}\n{"domain": "b", "text": "two"}\n')
    assert read_text(file) == "one<|endoftext|>two<|endoftext|>" and read_text(file, "b") == "two<|endoftext|>"
    with pytest.raises(ValueError, match="no text of domain 'c'"):
        read_text(file, "c")
    plain = tmp_path / "text.txt"
    plain.write_text("three")
    assert read_text(plain) == "three"
    with pytest.raises(ValueError, match="no domains"):
        read_text(plain, "a")


def test_against_mlx_lm_on_the_command_line():
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (extra bench)")
    options = ["eval", str(DEMO), str(DATA / "heldout.jsonl"), "--positions", "32", "--window", "16", "--json"]
    done = CliRunner().invoke(cli, options, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["positions"] == 32 and found["published"]["agreement"] == evaluation.PUBLISHED_AGREEMENT
    ours, theirs = found["sides"]
    assert ours["agreement"] >= 0.9 and ours["divergence"] < theirs["divergence"]  # closer to float32 than MLX-LM's bf16
