"""Requests in small steps: the results are those of the whole calls, and every border is a place to stop."""

from __future__ import annotations

import numpy as np
import pytest

import lily
from lily.stepping import ChatSteps, Piece, Reading, TextSteps
from lily.testing import scripted, state

QUESTION = [{"role": "user", "content": "What is a young dog called?"}]


@pytest.fixture(scope="module")
def demo():
    with lily.Model.demo(progress=False) as model:
        model._native.set_chunk(64)  # more borders for fewer tokens
        yield model


def run(steps):
    """The readings, and the deltas of each answer."""
    readings, answers = [], {}
    for step in steps:
        if isinstance(step, Reading):
            readings.append(step)
        else:
            answers.setdefault(step.index, []).append(step.delta)
    return readings, answers


def test_a_chat_in_steps_is_the_chat(demo):
    options = {"temperature": 0.8, "seed": 3, "max_tokens": 30}
    demo.sessions.clear()
    whole = demo.chat(QUESTION, **options)
    demo.sessions.clear()
    readings, answers = run(ChatSteps(demo, QUESTION, options).steps())
    message = answers[0][-1].message
    assert (message.tokens, message.content, message.reasoning) == (whole.tokens, whole.content, whole.reasoning)
    assert readings[0] == Reading(0, whole.usage.prompt_tokens, 0) and readings[-1].done == whole.usage.prompt_tokens
    assert message.usage == whole.usage and list(answers) == [0]


def test_a_text_in_steps_is_the_text_and_is_reused(demo):
    demo.sessions.clear()
    whole = demo.generate("The cat sat", max_tokens=8, temperature=0)
    for reused in (0, len(demo.encode("The cat sat"))):
        readings, answers = run(TextSteps(demo, "The cat sat", {"max_tokens": 8, "temperature": 0}).steps())
        assert [token for chunk in answers[0] for token in chunk.tokens] == whole.tokens
        assert answers[0][-1].usage.reused_tokens == readings[0].reused == reused


def test_a_long_prompt_is_read_chunk_by_chunk_with_the_bits_and_snapshots_of_one_call(demo):
    ids = np.random.default_rng(1).integers(0, 6000, 300).tolist()
    demo.sessions.clear()
    plain = demo.prefill(ids)
    steps = TextSteps(demo, ids, {"max_tokens": 0}).steps()
    readings, _ = run(steps)
    chunk = demo._native.chunk
    assert [reading.done for reading in readings] == [0, *range(chunk, 300, chunk), 300]
    stored = demo.sessions._newest()
    left, right = state(plain), state(stored)
    assert left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)
    assert stored._native.snapshots == plain._native.snapshots


def test_the_places_to_go_on_from_are_those_of_chat(demo):
    messages = [{"role": "system", "content": "Be brief. " * 60}, *QUESTION, {"role": "assistant", "content": "A puppy."}, *QUESTION]
    snapshots = []
    for ask in (lambda: demo.chat(messages, max_tokens=0), lambda: run(ChatSteps(demo, messages, {"max_tokens": 0}).steps())):
        demo.sessions.clear()
        ask()
        snapshots.append(demo.sessions._newest()._native.snapshots)
    assert snapshots[0] == snapshots[1] and len(snapshots[0]) > 3


def test_several_answers_share_one_reading(demo):
    demo.sessions.clear()
    options = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "thinking": False}
    readings, answers = run(ChatSteps(demo, QUESTION, options, n=3).steps())
    alone = [demo.chat(QUESTION, **options | {"seed": 7 + i}).tokens for i in range(3)]
    assert [answers[i][-1].message.tokens for i in range(3)] == alone
    assert sum(1 for reading in readings if reading.done == reading.total) == 1


def test_answers_take_turns():
    model = scripted("a b c d e f")
    order = [step.index for step in ChatSteps(model, QUESTION, {"thinking": False}, n=2).steps() if isinstance(step, Piece)]
    assert order[:4] == [0, 1, 0, 1]


def test_each_answer_has_its_own_mask():
    pytest.importorskip("llguidance")
    model = scripted('{"a": 1}')
    steps = ChatSteps(model, QUESTION, {"thinking": False, "response_format": {"type": "json_object"}}, n=3).steps()
    assert [answer[-1].message.content for answer in run(steps)[1].values()] == ['{"a": 1}'] * 3


@pytest.mark.parametrize("after", range(6))
def test_leaving_at_any_step_stops_the_device_and_keeps_what_was_read(after):
    model = scripted("many words " * 10, repeat=True)
    steps = ChatSteps(model, [{"role": "user", "content": "jar shelf " * 100}], {"thinking": False}, n=2).steps()
    seen = [next(steps) for _ in range(after + 1)]
    steps.close()
    done = max(step.done for step in seen if isinstance(step, Reading))
    assert model._native.in_flight == 0 and (done == 0 or len(model.sessions._newest()) >= done)


def test_a_prompt_that_does_not_fit_is_refused_before_any_work():
    model = scripted("x", max_context=64)
    with pytest.raises(lily.ContextOverflowError):
        TextSteps(model, [1] * 65, {}).check_length()
    with pytest.raises(lily.ContextOverflowError):
        next(ChatSteps(model, [{"role": "user", "content": "jar " * 100}], {}).steps())
    assert run(TextSteps(model, [1] * 64, {}).steps())[1][0][-1].finish_reason == "length"


def test_memory_that_runs_out_takes_stored_sessions_first():
    with lily.Model.demo(progress=False, memory_limit=28 << 20) as model:
        model._native.set_chunk(64)
        model.sessions.budget = 1 << 40
        for i in range(10):
            ids = np.random.default_rng(i).integers(0, 6000, 200).tolist()
            assert run(TextSteps(model, ids, {"max_tokens": 2, "ignore_eos": True}).steps())[1][0][-1].usage.generated_tokens == 2
        assert 0 < len(model.sessions) < 10


def test_memory_that_nothing_can_make_is_an_error_and_the_model_works():
    with lily.Model.demo(progress=False, memory_limit=28 << 20) as model:
        model._native.set_chunk(64)
        with pytest.raises(lily.OutOfMemoryError):
            run(TextSteps(model, [5] * 30_000, {}).steps())
        assert run(TextSteps(model, [5] * 100, {"max_tokens": 2, "ignore_eos": True}).steps())[1][0][-1].usage.generated_tokens == 2


def test_only_the_first_call_without_parallel_calls():
    def get_time(city: str):
        """The time."""

    def call(city):
        return f"<tool_call>\n<function=get_time>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"

    model = scripted(f"{call('Oslo')}\n{call('Lima')}")
    both = model.chat(QUESTION, tools=[get_time], thinking=False)
    one = model.chat(QUESTION, tools=[get_time], thinking=False, parallel_tool_calls=False)
    assert [len(reply.tool_calls) for reply in (both, one)] == [2, 1]
    assert one.finish_reason == "tool_calls" and one.unfinished_call is None
    assert model.decode(one.tokens) == call("Oslo")
    with pytest.raises(TypeError, match="parallel_tool_calls"):
        model.chat(QUESTION, parallel_tool_calls="no")


def test_a_stop_string_is_named():
    model = scripted("one two three")
    assert model.chat(QUESTION, thinking=False, stop=["three", "two"]).stop_string == "two"
    assert model.chat(QUESTION, thinking=False).stop_string is None
