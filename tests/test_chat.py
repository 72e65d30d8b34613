"""What `chat` and `stream_chat` promise: the same answer in pieces and whole, thoughts and calls apart, every switch obeyed."""

from __future__ import annotations

import json
import logging

import pytest

import lily
from lily import testing
from lily.chat_options import _note_unread, split_options, thinking_variables
from lily.template import ChatTemplate
from lily.testing import scripted

QUESTION = [{"role": "user", "content": "2+2?"}]
OSLO = "<tool_call>\n<function=get_time>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"


def get_time(city: str):
    """The time in a city."""


def get_news():
    """The news."""


@pytest.fixture(scope="module")
def demo():
    with lily.Model.demo(progress=False) as model:
        yield model


def both(script, messages=QUESTION, **options):
    """The answer of `chat`, checked against what `stream_chat` sends."""
    reply = scripted(script).chat(messages, **options)
    deltas = list(scripted(script).stream_chat(messages, **options))
    last = deltas[-1]
    assert "".join(d.content for d in deltas) == reply.content
    assert "".join(d.reasoning for d in deltas) == (reply.reasoning or "")
    assert sum((d.tokens for d in deltas), []) == reply.tokens
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (last.finish_reason, last.usage) == (reply.finish_reason, reply.usage)
    pieces: dict[int, list] = {}
    for piece in (piece for d in deltas for piece in d.tool_calls):
        pieces.setdefault(piece.index, []).append(piece)
    done = [entry for entry in pieces.values() if entry[-1].done]
    assert [(e[0].name, json.loads("".join(p.arguments for p in e))) for e in done] == [(c.name, c.arguments) for c in reply.tool_calls]
    assert [c.id for c in last.message.tool_calls] == [e[0].id for e in done]
    return reply


# Thoughts


def test_thoughts_and_content_are_apart():
    reply = both("Two and two.\n</think>\n\nIt is 4.")
    assert (reply.reasoning, reply.content, reply.finish_reason) == ("Two and two.", "It is 4.", "stop")
    assert 0 < reply.usage.reasoning_tokens < reply.usage.generated_tokens
    assert str(reply) == reply.content


def test_thoughts_that_are_cut_stay_thoughts():
    reply = both("Let me add 2 and 2 and then", max_tokens=5)
    assert reply.content == "" and reply.reasoning.startswith("Let me") and reply.finish_reason == "length"
    assert reply.usage.reasoning_tokens == reply.usage.generated_tokens == 5


@pytest.mark.parametrize(
    "off",
    [
        {"thinking": False}, {"enable_thinking": False}, {"reasoning_effort": "none"}, {"reasoning_effort": "minimal"},
        {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": "false"}},
        {"thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"reasoning_effort": "none"}},
    ],
)  # fmt: skip
def test_every_spelling_switches_thoughts_off(off):
    model = scripted("It is 4.")
    reply = model.chat(QUESTION, **off)
    assert (reply.content, reply.reasoning, reply.usage.reasoning_tokens) == ("It is 4.", None, 0)
    prompt = model.decode(model.sessions._newest().tokens).split("It is 4.")[0]
    assert prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({}, {}),
        ({"thinking": True}, {"enable_thinking": True}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none", "thinking": True}, {"enable_thinking": True}),
        ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True, "preserve_thinking": True}}, {"enable_thinking": True, "preserve_thinking": True}),
    ],
)  # fmt: skip
def test_what_the_switches_mean_to_the_template(given, variables):
    assert thinking_variables(split_options(given)[0]) == variables


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"thinking": "maybe"}, "thinking"), ({"thinking": True, "enable_thinking": False}, "thinking"), ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": {"preserve_thinkin": True}}, "chat_template_kwargs.preserve_thinkin"),
        ({"chat_template_kwargs": {"raise_exception": None}}, "chat_template_kwargs.raise_exception"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [get_time], "tool_choice": "get_news"}, "tool_choice"), ({"tools": [get_time], "tool_choice": "get_time", "thinking": True}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"), ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_their_place(options, path):
    with pytest.raises(lily.MessageError) as caught:
        scripted("x").chat(QUESTION, **options)
    assert caught.value.path == path


def test_a_template_gets_the_variables_that_it_reads(caplog):
    model = scripted("It is 4.")
    _note_unread.cache_clear()
    with caplog.at_level(logging.INFO, "lily"):
        for _ in range(2):
            model.chat(QUESTION, reasoning_effort="low")  # the shipped template knows no levels
    assert [record.message.split()[0] for record in caplog.records if "no effect" in record.message] == ["reasoning_effort"]
    model.template = ChatTemplate(
        "{% if effort_words %}{{ effort_words }}{% endif %}{{ reasoning_effort }}{{ messages[0].content }}<think>"
    )
    assert model.template.variables == {"effort_words", "reasoning_effort", "messages"}
    caplog.clear()
    _note_unread.cache_clear()
    with caplog.at_level(logging.INFO, "lily"):
        model.chat(QUESTION, reasoning_effort="low", chat_template_kwargs={"effort_words": "Think: "})
    assert "no effect" not in caplog.text and model.decode(model.sessions._newest().tokens).startswith("Think: low")


def test_other_bad_options_are_refused_before_any_work():
    model = scripted("x")
    with pytest.raises(TypeError, match="unknown option"):
        model.stream_chat(QUESTION, temprature=1)
    with pytest.raises(lily.SamplingError):
        model.chat(QUESTION, temperature=-1)
    with pytest.raises(lily.MessageError, match=r"messages\[0\].role"):
        model.stream_chat([{"role": "narrator", "content": "x"}])
    model.template = None
    with pytest.raises(lily.TemplateError, match="no chat template"):
        model.chat(QUESTION)


# Tools


def test_a_call_is_returned_and_ends_with_tool_calls():
    reply = both(f"Look.\n</think>\n\nOne moment.\n\n{OSLO}", tools=[get_time])
    assert (reply.reasoning, reply.content, reply.finish_reason) == ("Look.", "One moment.", "tool_calls")
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("get_time", {"city": "Oslo"})]


def test_without_tools_nothing_is_a_call():
    reply = both(OSLO, thinking=False)
    assert (reply.content, reply.tool_calls, reply.finish_reason) == (OSLO, [], "stop")


def test_a_call_in_the_thoughts_is_a_thought():
    reply = both(f"{OSLO}\n</think>\n\nNo.", tools=[get_time])
    assert (reply.reasoning, reply.content, reply.tool_calls, reply.finish_reason) == (OSLO, "No.", [], "stop")


def test_a_cut_call_is_not_presented_as_complete():
    script = f"{OSLO}\n<tool_call>\n<function=get_time>\n<parameter=city>\nLi"
    full = len(scripted("").encode(script))
    reply = both(script, tools=[get_time], thinking=False, max_tokens=full)
    assert [c.arguments for c in reply.tool_calls] == [{"city": "Oslo"}] and reply.finish_reason == "length"
    assert reply.unfinished_call == "<tool_call>\n<function=get_time>\n<parameter=city>\nLi" and reply.content == ""


def test_tool_choice_none_shows_no_tools_and_looks_for_no_calls():
    model = scripted(OSLO)
    reply = model.chat(QUESTION, tools=[get_time], tool_choice="none", thinking=False)
    assert reply.content == OSLO and not reply.tool_calls
    assert "<tools>" not in model.decode(model.sessions._newest().tokens)


@pytest.mark.parametrize("choice", ["get_news", {"type": "function", "function": {"name": "get_news"}}, get_news])
def test_a_named_tool_is_called(choice):
    model = scripted("</function>\n</tool_call>")
    reply = model.chat(QUESTION, tools=[get_time, get_news], tool_choice=choice)
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("get_news", {})] and reply.finish_reason == "tool_calls"
    assert "</think>\n\n<tool_call>\n<function=get_news>\n</function>" in model.decode(model.sessions._newest().tokens)


def test_a_required_call_chooses_among_the_declared_tools(demo):
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    for tools in ([get_time, get_news], [get_time], [get_news]):
        for deltas in (demo.stream_chat(question, tools=tools, tool_choice="required", temperature=0, max_tokens=40),):
            named = [piece.name for delta in deltas for piece in delta.tool_calls if piece.name]
            assert named and set(named) <= {tool.__name__ for tool in tools}
    assert demo.chat(question, tools=[get_news], tool_choice="required", max_tokens=40).tool_calls[0].arguments == {}


def test_a_template_that_always_thinks_cannot_require_a_call():
    model = scripted("x")
    model.template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}")
    with pytest.raises(lily.TemplateError, match="required"):
        model.chat(QUESTION, tools=[get_time], tool_choice="required")


def test_an_answer_goes_back_into_the_messages_as_it_is(demo):
    def get_weather(city: str):
        """Weather of a city."""

    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    reply = demo.chat(messages, tools=[get_weather], temperature=0)
    assert reply.tool_calls[0].arguments == {"city": "Oslo"}
    messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "Sunny, 20 degrees."}]
    second = demo.chat(messages, tools=[get_weather], temperature=0, max_tokens=60)
    assert second.usage.reused_tokens == reply.usage.prompt_tokens + reply.usage.generated_tokens  # nothing is read again
    assert reply.to_message()["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


# Options of generate


def test_logprobs_stops_and_limits_are_those_of_generate():
    reply = both("It is 4. END and more", thinking=False, stop="END", logprobs=2)
    assert (reply.content, reply.finish_reason) == ("It is 4. ", "stop")
    assert [entry.token for entry in reply.logprobs] == reply.tokens and len(reply.logprobs[0].top) == 2
    none = both("x", max_tokens=0)
    assert (none.content, none.reasoning, none.tokens, none.finish_reason) == ("", None, [], "length")


def test_the_same_seed_gives_the_same_answer(demo):
    first, second = (demo.chat(QUESTION, temperature=1, seed=4, max_tokens=20) for _ in range(2))
    assert first.tokens == second.tokens and first.sampling.seed == 4


# Leaving early


def test_a_closed_stream_stops_and_keeps_what_it_has():
    model = scripted("many words " * 50, repeat=True)
    stream = model.stream_chat(QUESTION, thinking=False)
    for _ in range(5):
        next(stream)
    stream.close()
    assert model._native.in_flight == 0 and len(model.sessions) == 1
    assert model.chat(QUESTION, thinking=False, max_tokens=3).usage.reused_tokens > 0


def test_an_error_in_the_middle_leaves_the_model_usable():
    model = scripted("It is 4.")
    testing.fail_at(model, 2, 0)
    with pytest.raises(lily.GPUError):
        model.chat(QUESTION, thinking=False)
    assert model._native.in_flight == 0
    assert model.chat(QUESTION, thinking=False).content == "It is 4."


def test_a_model_closed_in_the_middle_keeps_nothing():
    model = lily.Model.demo(progress=False)
    stream = model.stream_chat(QUESTION, max_tokens=8)
    next(stream)
    model.close()
    list(stream)  # what has begun may end
    assert len(model.sessions) == 0


# Structured output


SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["total"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


@pytest.mark.parametrize("thinking", [True, False])
def test_json_by_a_schema_begins_behind_the_thoughts(demo, thinking):
    pytest.importorskip("llguidance")
    question = [{"role": "user", "content": "Boxes: 4 rows of 9, minus 5?"}]
    reply = demo.chat(question, response_format=FORMAT, thinking=thinking, temperature=0, max_tokens=120)
    assert reply.finish_reason == "stop"
    assert set(json.loads(reply.content)) == {"total"} and reply.content[0] == "{"
    assert (reply.reasoning is not None) is thinking and "{" not in (reply.reasoning or "")
    streamed = demo.stream_chat(question, response_format=FORMAT, thinking=thinking, temperature=0, max_tokens=120)
    assert "".join(delta.content for delta in streamed) == reply.content


def test_any_json_object(demo):
    pytest.importorskip("llguidance")
    model = scripted('{"a": [1, "x"]} and more')
    assert model.chat(QUESTION, response_format={"type": "json_object"}, thinking=False).content == '{"a": [1, "x"]}'


def test_structured_output_and_other_masks_act_together():
    pytest.importorskip("llguidance")
    import numpy as np

    model = scripted("{}")
    seen = []

    def mask(ids):
        seen.append(len(ids))
        return np.full(192, 0xFFFFFFFF, np.uint32)

    assert model.chat(QUESTION, response_format={"type": "json_object"}, thinking=False, token_mask=mask).content == "{}" and seen
    with pytest.raises(lily.MessageError, match="schema"):
        model.chat(QUESTION, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}})
    assert model.chat(QUESTION, response_format={"type": "text"}, thinking=False).content == "{}"


@pytest.mark.parametrize("tools", [[get_time], [get_time, get_news]])
@pytest.mark.parametrize("thoughts", ["", "Which one?\n</think>\n\n"], ids=["plain", "thinking"])
def test_with_tools_structured_output_is_either_json_or_a_call(thoughts, tools):
    options = {"tools": tools, "response_format": {"type": "json_object"}, "thinking": bool(thoughts)}
    called = both(thoughts + OSLO, **options)
    assert [(c.name, c.arguments) for c in called.tool_calls] == [("get_time", {"city": "Oslo"})]
    assert (called.content, called.finish_reason, called.reasoning) == ("", "tool_calls", "Which one?" if thoughts else None)
    answered = both(thoughts + '{"total": 31}', **options)
    assert json.loads(answered.content) == {"total": 31} and not answered.tool_calls


def test_with_tools_structured_output_is_never_prose_nor_a_call_of_an_unknown_tool():
    options = {"tools": [get_time], "response_format": {"type": "json_object"}, "thinking": False, "temperature": 0, "max_tokens": 40}
    prose = scripted("It is noon.", repeat=True).chat(QUESTION, **options)
    assert prose.content[:1] == "{" or prose.tool_calls or prose.unfinished_call
    other = scripted(OSLO.replace("get_time", "get_rich")).chat(QUESTION, **options)
    assert [call.name for call in other.tool_calls] in ([], ["get_time"]) and "get_rich" not in other.content


def test_a_required_call_leaves_no_place_for_json():
    reply = scripted("city>\nOslo\n</parameter>\n</function>\n</tool_call>").chat(
        QUESTION, tools=[get_time], tool_choice="required", response_format={"type": "json_object"}, thinking=False
    )
    assert reply.tool_calls[0].name == "get_time" and reply.content == ""


def test_structured_output_without_its_library_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"lily-inference\[structured\]"):
        scripted("{}").chat(QUESTION, response_format={"type": "json_object"})
