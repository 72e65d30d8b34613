"""One parser splits answers into thoughts, content and calls, and gives the same for every way the text is cut."""

from __future__ import annotations

import enum
import json
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lily
from lily.reasoning import ReplyParser
from lily.tools import chosen, convert, declared


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
TOOLS = declared([
    tool("get_time", city=TEXT, days=WHOLE),
    tool("get_news"),
    tool("write_file", path=TEXT, content=TEXT),
    tool("mixed", a={"type": "array"}, b={"type": "boolean"}, o={"type": "object"}, n={"type": ["string", "null"]}, x={"type": "number"}),
])  # fmt: skip


def call(name: str, **values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parse(pieces, tools=TOOLS, thinking=False):
    """What the deltas add up to, checked against what the parser says at the end."""
    parser = ReplyParser(tools, thinking=thinking)
    content = reasoning = ""
    calls: dict[int, dict[str, Any]] = {}
    for delta in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += delta.content
        reasoning += delta.reasoning
        for piece in delta.calls:
            entry = calls.setdefault(piece.index, {"id": piece.id, "name": piece.name, "arguments": "", "done": False})
            assert not entry["done"]
            entry["arguments"] += piece.arguments
            entry["done"] = piece.done
    assert (content, reasoning) == (parser.content, parser.reasoning)
    done = [entry for entry in calls.values() if entry["done"]]
    assert [(c.id, c.name, c.arguments) for c in parser.calls] == [(e["id"], e["name"], json.loads(e["arguments"])) for e in done]
    assert len({c.id for c in parser.calls}) == len(parser.calls) and all(c.id for c in parser.calls)
    return content, reasoning, [(c.name, c.arguments) for c in parser.calls], parser.unfinished


OSLO, LIMA = call("get_time", city="Oslo"), call("get_time", city="Lima", days="3")
TRICKY = 'print("</parameter>")\n# see </tool_call> and <function=x>\n</parameter> is no end\n\n  </parameter\n'
CASES = {
    "one call": (OSLO, ("", "", [("get_time", {"city": "Oslo"})], None)),
    "no arguments": (call("get_news"), ("", "", [("get_news", {})], None)),
    "two calls": (f"{OSLO}\n{LIMA}", ("", "", [("get_time", {"city": "Oslo"}), ("get_time", {"city": "Lima", "days": 3})], None)),
    "text between": (
        f"First:\n\n{OSLO}\nNow the second:\n{LIMA}\n",
        ("First:\nNow the second:", "", [("get_time", {"city": "Oslo"}), ("get_time", {"city": "Lima", "days": 3})], None),
    ),
    "text behind": (f"{OSLO}\nDone.\n", ("Done.\n", "", [("get_time", {"city": "Oslo"})], None)),
    "a payload of tags": (
        call("write_file", path="a.py", content=TRICKY),
        ("", "", [("write_file", {"path": "a.py", "content": TRICKY})], None),
    ),
    "types": (
        call("mixed", a="[1, {}]", b="True", o='{"k": [null]}', n="null", x="2.50"),
        ("", "", [("mixed", {"a": [1, {}], "b": True, "o": {"k": [None]}, "n": None, "x": 2.5})], None),
    ),
    "values that do not fit stay text": (
        call("mixed", a="oops", b="maybe", x="NaN"),
        ("", "", [("mixed", {"a": "oops", "b": "maybe", "x": "NaN"})], None),
    ),
    "text stays text": (call("get_time", city="12", days="12.0"), ("", "", [("get_time", {"city": "12", "days": 12})], None)),
    "an empty value": (call("write_file", path="", content="\n"), ("", "", [("write_file", {"path": "", "content": "\n"})], None)),
    "values on the tag's line": (
        "<tool_call><function=get_time><parameter=city>Oslo</parameter><parameter=days>\n3\n</parameter></function></tool_call>",
        ("", "", [("get_time", {"city": "Oslo", "days": 3})], None),
    ),
    "without the outer tag": (OSLO.removeprefix("<tool_call>\n"), ("", "", [("get_time", {"city": "Oslo"})], None)),
    "a broken tag between parameters": (
        OSLO.replace("</function>", "<parameter=\n<parameter=days>\n2\n</parameter>\n</function>"),
        ("", "", [("get_time", {"city": "Oslo", "days": 2})], None),
    ),
    "inline code": ("Use `<function=get_time>` or <tool_call> here.", ("Use `<function=get_time>` or <tool_call> here.", "", [], None)),
    "a tag that begins no call": ("<tool_call>\n<function=get_time>\nopens one.", ("<tool_call>\n<function=get_time>\nopens one.", "", [], None)),
    "an undeclared tool": (call("rm", path="/"), (call("rm", path="/"), "", [], None)),
    "cut in a value": (
        f"{OSLO}\n<tool_call>\n<function=write_file>\n<parameter=content>\nfirst li",
        ("", "", [("get_time", {"city": "Oslo"})], "<tool_call>\n<function=write_file>\n<parameter=content>\nfirst li"),
    ),
    "cut before the end": (OSLO[: -len("</function>\n</tool_call>")], ("", "", [], OSLO[: -len("</function>\n</tool_call>")])),
    "cut in the opening": ("Yes.\n<tool_call>\n<function=get_ti", ("Yes.", "", [], "<tool_call>\n<function=get_ti")),
    "a less-than sign at the end": ("a\n<", ("a\n<", "", [], None)),
    "white space": ("\n\n  code\n", ("  code\n", "", [], None)),
    "thoughts of its own": (f"<think>\nHm.\n</think>\n\nYes.\n{OSLO}", ("Yes.", "Hm.", [("get_time", {"city": "Oslo"})], None)),
}  # fmt: skip
THOUGHTS = {
    "thoughts, then content": ("Let me add.\n</think>\n\n4", ("4", "Let me add.", [], None)),
    "thoughts cut": ("Let me add 2 and", ("", "Let me add 2 and", [], None)),
    "thoughts cut in the tag": ("Let me add.\n</thi", ("", "Let me add.\n</thi", [], None)),
    "no thoughts": ("\n</think>\n\n4", ("4", "", [], None)),
    "calls in thoughts are thoughts": (f"I could\n{OSLO}\nor not.\n</think>\n\nNo.", ("No.", f"I could\n{OSLO}\nor not.", [], None)),
    "thoughts, then a call": (f"Look.\n</think>\n\n{OSLO}", ("", "Look.", [("get_time", {"city": "Oslo"})], None)),
    "a second tag is content": ("a</think>b</think>", ("b</think>", "a", [], None)),
}
ALL = [(text, want, False) for text, want in CASES.values()] + [(text, want, True) for text, want in THOUGHTS.values()]
NAMES = [*CASES, *THOUGHTS]


@pytest.mark.parametrize(("text", "want", "thinking"), ALL, ids=NAMES)
def test_an_answer_is_split_as_it_should_be(text, want, thinking):
    assert parse([text], thinking=thinking) == want


@pytest.mark.parametrize(("text", "want", "thinking"), ALL, ids=NAMES)
def test_every_cut_gives_the_same(text, want, thinking):
    assert parse(list(text), thinking=thinking) == want
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]], thinking=thinking) == want, cut


PIECES = ["<tool_call>", "</tool_call>", "<function=get_time>", "<function=x>", "</function>", "<parameter=city>", "<parameter=days>",
          "</parameter>", "</think>", "<think>", "\n", " ", "<", "Oslo", "3", '"', "\\", "é", OSLO, LIMA]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.integers(0, 300), max_size=8), st.booleans())
def test_random_text_at_random_cuts_gives_the_same(parts, cuts, thinking):
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert parse(pieces, thinking=thinking) == parse([text], thinking=thinking) == parse(list(text), thinking=thinking)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('a<>/\n "=') | st.characters(codec="utf-8"), max_size=40), st.integers(1, 7))
def test_every_value_comes_back_as_it_was_written(value, step):
    text = call("write_file", path="p", content=value)
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    if "</parameter>" not in value:
        assert parse(pieces)[2] == [("write_file", {"path": "p", "content": value})]


def test_without_tools_nothing_is_parsed():
    text = f"In this format <function=foo> opens a call and </tool_call> ends it.\n{OSLO}"
    assert parse([text], tools=[]) == (text, "", [], None)
    assert parse(list(text), tools=[]) == (text, "", [], None)


def test_arguments_arrive_while_they_are_written():
    parser = ReplyParser(TOOLS)
    parser.push("<tool_call>\n<function=write_file>\n<parameter=content>\nfirst line\nsecond")
    assert sum(len(delta.arguments) for delta in parser.push(" line and").calls) == len(" line and")
    assert not parser.calls and parser.unfinished is None


def test_the_state_says_whether_it_thinks():
    parser = ReplyParser(thinking=True)
    assert parser.thinking
    parser.push("x</think>")
    assert not parser.thinking


# Tools


class Colour(enum.Enum):
    RED = "red"


def get_weather(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    tags: list[str] | None = None,
    note: str | None = None,
    c: Colour = Colour.RED,
    z: Any = 0,
):
    """The weather of a city.

    Args:
        city: Its name,
            in English.
        days (int): How many.

    Returns:
        A text.
    """


def test_a_function_is_its_own_declaration():
    (found,) = declared([get_weather])
    function = found.declaration["function"]
    assert (function["name"], function["description"]) == ("get_weather", "The weather of a city.")
    properties = function["parameters"]["properties"]
    assert properties["city"] == {"type": "string", "description": "Its name, in English."}
    assert properties["days"] == {"type": "integer", "description": "How many."}
    assert properties["unit"] == {"type": "string", "enum": ["C", "F"]}
    assert properties["tags"] == {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    assert properties["note"] == {"type": ["string", "null"]}
    assert properties["c"] == {"enum": ["red"]} and properties["z"] == {}
    assert function["parameters"]["required"] == ["city"]


def test_declarations_in_json_are_shown_as_they_are():
    given = tool("f", x=TEXT)
    assert declared([given])[0].declaration is given
    assert declared([{"type": "function", "name": "f", "parameters": {}}])[0].declaration == {
        "type": "function",
        "function": {"name": "f", "parameters": {}},
    }


@pytest.mark.parametrize(
    ("tools", "path"),
    [
        ([{"type": "retrieval"}], "tools[0].type"),
        ([tool("a"), tool("a")], "tools[1].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": [1]}}], "tools[0].function.parameters"),
        ([lambda x: x], "tools[0].function.name"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_their_place(tools, path):
    with pytest.raises(lily.errors.MessageError) as caught:
        declared(tools)
    assert caught.value.path == path


def test_tool_choice():
    names = [t.name for t in TOOLS]
    assert chosen("auto", TOOLS) == (list(TOOLS), []) and chosen("none", TOOLS) == ([], [])
    assert chosen("required", TOOLS) == (list(TOOLS), names)
    for one in ({"type": "function", "function": {"name": "get_news"}}, "get_news", {"name": "get_news"}):
        assert chosen(one, TOOLS) == (list(TOOLS), ["get_news"])
    for bad in ("sometimes", {"function": {"name": "nope"}}, 5):
        with pytest.raises(lily.errors.MessageError, match="tool_choice"):
            chosen(bad, TOOLS)
    with pytest.raises(lily.errors.MessageError, match="no tools"):
        chosen("required", [])


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("5", {"$ref": "#/$defs/n"}, 5), ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5), ("none", {"type": "null"}, "none"),
        ("x", {"enum": ["x", 1]}, "x"), ("1", {"enum": ["x", 1]}, 1), ("{}", {"properties": {}}, {}), ("[]", {"items": {}}, []),
        ("5", {}, "5"), ("5", None, "5"), ("true", {"const": True}, True), ("5", {"$ref": "#/$defs/loop"}, "5"),
        ('"5"', {"type": ["integer", "string"]}, '5'), ("Infinity", {"type": "number"}, "Infinity"), ("3", {"type": "number"}, 3),
    ],
)  # fmt: skip
def test_values_get_their_types_from_the_schema(raw, schema, value):
    found = convert(raw, schema, {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}})
    assert found == value and type(found) is type(value)
