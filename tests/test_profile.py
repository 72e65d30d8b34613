"""`Model.profile`: its parts are the plan's, and they add up to the time that passed."""

from __future__ import annotations

import json

import pytest

import lily

PROMPT = "Once upon a time there was a little dog. " * 8


@pytest.fixture(scope="module")
def model():
    with lily.Model.demo() as model:
        yield model


@pytest.fixture(scope="module")
def profile(model):
    return model.profile(PROMPT, steps=8)


def test_dispatches_and_stages_are_those_of_the_plan(profile):
    plan = lily.plan(profile.source)
    assert (profile.decode_dispatches, profile.decode_stages) == (plan.decode["dispatches"], plan.decode["stages"])
    nbytes = sum(kernel.nbytes for kernel in profile.kernels("decode"))
    assert plan.bytes_per_token <= nbytes < 1.1 * plan.bytes_per_token  # and the context's keys and values


def test_stages_add_up_to_the_time_that_passed(model):
    """Nearly all of it on a machine that does nothing else. Beside other processes threads wait to be woken, and a step ahead of the last that was
    asked for may be one that had to wait: so the best of five."""

    def within(found, phase, wall):
        return 0 < found.seconds(phase) <= wall * 1.05 and found.seconds(phase) >= 0.1 * wall

    tried = []
    for _ in range(5):
        found = model.profile(PROMPT, steps=8)
        if within(found, "decode", found.decode_seconds) and within(found, "prefill", found.prefill_seconds):
            return
        tried.append((found.seconds("decode"), found.decode_seconds, found.seconds("prefill"), found.prefill_seconds))
    pytest.fail(f"stages and wall, decode and prefill: {tried}")


def test_attention_reads_the_keys_and_values_of_the_whole_context(model):
    found = model.profile([5] * 1000, steps=3)
    read = sum(kernel.nbytes for kernel in found.kernels("decode") if kernel.kernel.startswith("attn_split"))
    assert read == pytest.approx(1002 * model.memory().kv_bytes_per_token, rel=0.1)


def test_the_slowest_kernel_comes_first_and_shares_are_of_the_read_rate(profile):
    seconds = [kernel.seconds for kernel in profile.kernels("decode")]
    assert seconds == sorted(seconds, reverse=True) and profile.read_rate > 0
    kernel = profile.kernels("decode")[0]
    assert kernel.bytes_per_second == pytest.approx(kernel.nbytes / kernel.seconds)
    with pytest.raises(ValueError, match="expected decode or prefill"):
        profile.kernels("training")


def test_table_json_and_plot(profile, tmp_path):
    text = str(profile)
    assert "dispatches in" in text and all(kernel.kernel in text for kernel in profile.kernels("prefill"))
    found = json.loads(json.dumps(profile.to_dict()))
    assert {entry["kernel"] for entry in found["kernels"]["decode"]} == {kernel.kernel for kernel in profile.kernels("decode")}
    assert "<pre>" in profile._repr_html_()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    profile.plot().savefig(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_profiling_changes_no_answer_and_stops_the_clock(model):
    before = model.generate(PROMPT, max_tokens=8, temperature=0).tokens
    model.profile(PROMPT, steps=2)
    assert model.generate(PROMPT, max_tokens=8, temperature=0).tokens == before
    from lily._engine import native

    with pytest.raises(ValueError, match="no clock is running"):
        native().stop_clock(model._native)


def test_a_prompt_that_does_not_fit_leaves_the_model_usable(model):
    with pytest.raises(lily.ContextOverflowError):
        model.profile([1] * model.max_context, steps=1)
    with pytest.raises(ValueError, match="positive"):
        model.profile(PROMPT, steps=0)
    assert model.profile([1, 2, 3], steps=1).prompt_tokens == 3
