"""Every form in which clients send messages renders to the same prompt, and what cannot be rendered is named by its place."""

from __future__ import annotations

import json

import pytest

import lily
from lily.messages import normalise
from lily.rendering import Rendering
from lily.template import ChatTemplate
from lily.testing import scripted

USER = {"role": "user", "content": "Colour of snow?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo", "days": 3}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12:05"}
MODEL = scripted("")
# Refuses a list without a user message, as the family's own templates do; thoughts only after the last user message.
STRICT = ChatTemplate(
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- if ns.last < 0 -%}{{- raise_exception('No user query found in messages.') -}}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' and not loop.first -%}{{- raise_exception('System message must be at the beginning.') -}}{%- endif -%}"
    "{%- if m.role == 'tool' -%}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}{%- else -%}"
    "{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- m.content -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<tool_call>\n<function=' + c.function.name + '>\n' -}}"
    "{%- for k, v in c.function.arguments|items -%}{{- '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' -}}{%- endfor -%}"
    "{{- '</function>\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
)


def render(messages, template=None, **options):
    return Rendering(template or MODEL.template, MODEL.tokenizer, normalise(messages), **options)


def assistant(**fields):
    return {"role": "assistant", **fields}


def test_developer_is_system():
    text = "Answer with one word."
    assert render([{"role": "developer", "content": text}, USER]).text == render([{"role": "system", "content": text}, USER]).text


def test_system_messages_are_joined_at_the_front():
    found = normalise([{"role": "system", "content": "One."}, USER, {"role": "developer", "content": "Two."}, USER])
    assert [m["role"] for m in found.messages] == ["system", "user", "user"] and found.places == [0, 1, 3]
    assert found.messages[0]["content"] == "One.\n\nTwo."


def test_an_empty_system_message_is_none():
    assert normalise([{"role": "system", "content": ""}, USER]).messages == [USER]


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([{"role": "narrator", "content": "Hi"}], "messages[0].role"),
        ([USER, {"content": "Hi"}], "messages[1].role"),
        ([RESULT], "messages[0].role"),
        ([USER, RESULT], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([USER, assistant(tool_calls="x")], "messages[1].tool_calls"),
        ([USER, assistant(tool_calls=[{"function": {"name": ""}}])], "messages[1].tool_calls[0].function.name"),
        ([USER, assistant(tool_calls=[{"function": {"name": "f", "arguments": "{"}}])], "messages[1].tool_calls[0].function.arguments"),
        ([USER, assistant(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])], "messages[1].tool_calls[0].function.arguments"),
        ([USER, assistant(reasoning_content=["x"])], "messages[1].reasoning_content"),
        ([], "messages"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(messages, path):
    with pytest.raises(lily.errors.MessageError) as caught:
        normalise(messages)
    assert caught.value.path == path and path in str(caught.value)
    assert isinstance(caught.value, (ValueError, lily.TemplateError))


@pytest.mark.parametrize("messages", ["Hi", USER, None, 5])
def test_other_types_are_type_errors(messages):
    with pytest.raises(TypeError, match="messages"):
        normalise(messages)


def test_lists_of_text_parts_are_joined():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    assert normalise([{"role": "user", "content": parts}]).messages[0]["content"] == "What is 2+2?"
    tool = normalise([USER, assistant(tool_calls=[CALL]), RESULT | {"content": [{"type": "text", "text": "12:05"}]}])
    assert tool.messages == normalise([USER, assistant(tool_calls=[CALL]), RESULT]).messages


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "video", "video": "x"}, "video"),
        ({"type": "mystery"}, "mystery"),
    ],
)
def test_parts_that_are_no_text_are_refused_never_dropped(part, what):
    with pytest.raises(lily.errors.MessageError, match=what) as caught:
        normalise([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}])
    assert caught.value.path == "messages[0].content[1]"


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_no_content_has_four_spellings(content):
    expected = render([USER, assistant(content="", tool_calls=[CALL]), RESULT]).text
    assert render([USER, assistant(tool_calls=[CALL], **content), RESULT]).text == expected
    assert "<function=get_time>" in expected


def test_arguments_may_be_a_json_string():
    arguments = {"z": {"b": [1, 2.5, None], "a": {"ü": "日本 \"'<>&"}}, "city": "Oslo", "yes": True, "no": None}
    as_object = {"function": {"name": "f", "arguments": arguments}}
    as_text = {"function": {"name": "f", "arguments": json.dumps(arguments)}}
    found = [render([USER, assistant(tool_calls=[call]), RESULT]).text for call in (as_object, as_text)]
    assert found[0] == found[1]
    assert list(normalise([USER, assistant(tool_calls=[as_text])]).messages[1]["tool_calls"][0]["function"]["arguments"]) == list(arguments)


@pytest.mark.parametrize("template", [None, STRICT], ids=["shipped", "strict"])
def test_a_tool_round_without_a_user_message_is_rendered(template):
    messages = [{"role": "system", "content": "Be brief."}, assistant(tool_calls=[CALL]), RESULT]
    text = render(messages, template).text
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n<think>")
    assert "12:05" in text and "stand-in" not in text and text.count("<|im_start|>user") == 1


def test_what_the_template_refuses_for_another_reason_stays_refused():
    template = ChatTemplate("{{ raise_exception('never') }}")
    for messages in ([USER], [assistant(content="x")], [{"role": "system", "content": "x"}]):
        with pytest.raises(lily.TemplateError, match="never"):
            render(messages, template)
    with pytest.raises(lily.TemplateError, match="No user query"):
        render([{"role": "system", "content": "Be brief."}], STRICT)


HEADER = "x-client-billing-header: version=0.0.1; entry=cli; cch={};\n"


def test_volatile_header_lines_are_dropped_from_the_system_text():
    first, second = (HEADER.format(value) + "You help with gardens." for value in ("a1b2c", "d4e5f"))
    system = [[{"role": "system", "content": text}, USER] for text in (first, second, "You help with gardens.")]
    assert len({render(messages).text for messages in system}) == 1
    assert normalise(system[0], drop_volatile=False).messages[0]["content"] == first
    inside = "Send the x-client-billing-header: 5 yourself.\n" + HEADER
    assert normalise([{"role": "system", "content": inside}, USER]).messages[0]["content"] == inside


# Places between turns

CHAT = [
    {"role": "system", "content": "Be brief."}, USER, assistant(reasoning_content="Snow.", content="White."), USER,
    assistant(tool_calls=[CALL]), RESULT, RESULT, assistant(content="Then.", tool_calls=[CALL]), RESULT,
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_time"}}]


@pytest.mark.parametrize("template", [None, STRICT], ids=["shipped", "strict"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("length", range(2, len(CHAT) + 1))
def test_marks_are_token_prefixes_that_end_before_a_turn(template, tools, length):
    rendering = render(CHAT[:length], template, tools=tools)
    marks = rendering.marks()
    expected = 1 + (length > 1) + sum(m["role"] == "assistant" for m in CHAT[:length])
    users = [i for i, m in enumerate(CHAT[:length]) if m["role"] == "user"]
    assert len(marks) == expected + (1 if users[-1] > 1 else 0)
    start = MODEL.tokenizer.token_to_id("<|im_start|>")
    for mark in marks:
        assert rendering.ids[mark] == start
        assert MODEL.encode(MODEL.decode(rendering.ids[:mark])) == rendering.ids[:mark]


def test_a_token_names_its_message():
    rendering = render(CHAT, tools=TOOLS)
    places = [rendering.message_at(i) for i in range(len(rendering.ids))]
    assert [place for i, place in enumerate(places) if i == 0 or places[i - 1] != place] == [0, 1, 2, 3, 4, 5, 7, 8, None]


@pytest.mark.parametrize(("variables", "thinking"), [({}, True), ({"enable_thinking": False}, False)])
def test_the_answer_begins_in_the_state_in_which_the_prompt_ended(variables, thinking):
    assert render([USER], variables=variables).thinking is thinking
