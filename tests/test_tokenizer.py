"""Tokenizer, incremental text and chat templates, against stored cases and against the tokenizers library itself."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from lily import CheckpointError, TemplateError
from lily.template import ChatTemplate
from lily.tokenizer import Detokenizer, Tokenizer

FIXTURES = Path(__file__).parent / "data" / "fixtures"
MOE = FIXTURES / "a_moe_q4g64"
CASES = json.loads((FIXTURES / "tokenizer_cases.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(MOE)


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.from_directory(MOE)


@pytest.fixture
def directory(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MOE / name, tmp_path / name)
    return tmp_path


def streamed(tokenizer, ids, **options):
    stream = Detokenizer(tokenizer, **options)
    return [stream.push(token) for token in ids] + [stream.finish()]


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: repr(case["text"])[:24])
def test_stored_encodings(tokenizer, case):
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["decoded_skip"]


@pytest.mark.parametrize("case", CASES["stream"], ids=lambda case: repr(case["text"])[:24])
def test_every_prefix_of_a_stream_decodes_as_stored(tokenizer, case):
    for n, expected in enumerate(case["prefix_decodes"], 1):
        assert "".join(streamed(tokenizer, case["ids"][:n])) == tokenizer.decode(case["ids"][:n]) == expected


def test_decoding_equals_the_library_on_random_ids(tokenizer):
    source = random.Random(0)
    for _ in range(500):
        ids = [source.randrange(len(tokenizer) + 6) for _ in range(source.randrange(1, 40))]
        for skip in (False, True):
            expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
            assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == expected


def test_only_whole_characters_leave_a_stream(tokenizer):
    text = "Tr\u017e se\u0159adil \U0001f99c \u65e5\u672c \U0001f468\u200d\U0001f469\u200d\U0001f467"
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids) == text


def test_an_unfinished_character_is_flushed_and_an_invalid_byte_holds_nothing_up(tokenizer):
    first = tokenizer.encode("\u6570")[0]
    assert streamed(tokenizer, [first]) == ["", "\ufffd"]
    stream = Detokenizer(tokenizer)
    assert stream.push(first) == "" and stream.push(tokenizer.encode("a")[0]) == "\ufffda"


def test_a_real_replacement_character_is_not_held_back(tokenizer):
    pieces = streamed(tokenizer, tokenizer.encode("a\ufffdb"))
    assert "".join(pieces) == "a\ufffdb" and pieces[-1] == ""


def test_byte_zero_survives(tokenizer):
    ids = tokenizer.encode("a\0b")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "a\0b"


def test_added_tokens_are_literal_text(directory):
    path = directory / "tokenizer.json"
    parsed = json.loads(path.read_text())
    parsed["added_tokens"].append(dict(parsed["added_tokens"][-1], id=506, content="caf\u00e9 \u0120\u65e5"))
    path.write_text(json.dumps(parsed))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.decode([506]) == "".join(streamed(tokenizer, [506])) == "caf\u00e9 \u0120\u65e5"


def test_ids_without_a_string_print_nothing(tokenizer):
    assert len(tokenizer) == 506
    assert tokenizer.decode([74, 511, 100_000, 75]) == tokenizer.decode([74, 75])
    with pytest.raises(ValueError, match="negative"):
        tokenizer.decode([-1])


def test_text_that_is_not_text(tokenizer):
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(TypeError, match="expected str"):
        tokenizer.encode(b"bytes")


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_end|>"]},
        {"tokenizer_class": "NoSuchTokenizer", "extra_special_tokens": {"end": "<|im_end|>"}},
        {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "added_tokens_decoder": []},
        {},
        None,
    ],
)
def test_the_form_of_tokenizer_config_does_not_matter(directory, config):
    path = directory / "tokenizer_config.json"
    if config is None:
        path.unlink()
    else:
        path.write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(directory)
    for case in CASES["encode"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.end_tokens() == {1}
    assert ChatTemplate.from_directory(directory) is not None


def test_truncation_and_padding_in_the_file_are_switched_off(directory):
    path = directory / "tokenizer.json"
    parsed = json.loads(path.read_text())
    parsed["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(parsed))
    assert len(Tokenizer.from_directory(directory).encode("Hello world")) == 9


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_a_missing_or_broken_tokenizer_is_refused(directory, text):
    path = directory / "tokenizer.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(directory)


def test_another_kind_of_decoder_is_refused(directory):
    path = directory / "tokenizer.json"
    parsed = json.loads(path.read_text())
    parsed["decoder"] = {"type": "Fuse"}
    path.write_text(json.dumps(parsed))
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer.from_directory(directory)


def test_end_tokens_are_the_union_of_every_source(tokenizer):
    assert tokenizer.end_tokens({"eos_token_id": [0]}, {"eos_token_id": 5}, {"eos_token_id": None}, {}) == {0, 1, 5}
    for bad in ("1", [1.5], [True], -1):
        with pytest.raises(CheckpointError, match="eos_token_id"):
            tokenizer.end_tokens({"eos_token_id": bad})


def test_names_of_tokens(tokenizer):
    assert tokenizer.token_to_id("<|im_end|>") == 1 and tokenizer.token_to_id("no such token") is None
    assert tokenizer.is_special(1) and not tokenizer.is_special(tokenizer.token_to_id("<think>"))
    assert "506 tokens" in repr(tokenizer)


# Chat templates


@pytest.mark.parametrize("case", CASES["chat"], ids=lambda case: case["name"])
def test_stored_chats(tokenizer, template, case):
    variables = dict(case["input"])
    text = template.render(variables.pop("conversation"), **variables)
    assert text == case["rendered"]
    assert tokenizer.encode(text) == case["ids"]


def test_the_jinja_file_wins_over_tokenizer_config(directory):
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config", "eos_token": "<e>"}))
    (directory / "chat_template.jinja").write_text("from file")
    assert ChatTemplate.from_directory(directory).render([]) == "from file"
    (directory / "chat_template.jinja").unlink()
    assert ChatTemplate.from_directory(directory).render([]) == "from config"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ eos_token }}"}]
    config.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "<e>"}}))
    assert ChatTemplate.from_directory(directory).render([]) == "<e>"
    config.unlink()
    assert ChatTemplate.from_directory(directory) is None


def render(source, messages=(), **variables):
    return ChatTemplate(source).render(list(messages), **variables)


def test_json_is_written_as_in_training():
    value = {"b": "<\u00e9&'>", "a": [1, None, True]}
    assert render("{{ v|tojson }}", v=value) == '{"b": "<\u00e9&\'>", "a": [1, null, true]}'
    assert render("{{ v|tojson(indent=1) }}", v={"a": 1}) == '{\n "a": 1\n}'


def test_blocks_loops_and_clock():
    assert render("{% for x in v %}\n  {% if x == 2 %}\n    {% break %}\n  {% endif %}\n{{ x }}{% endfor %}", v=[1, 2, 3]) == "1"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No user query found.') }}", "No user query found"),
        ("{% if %}", "does not parse"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "messages"),
        ("{% for x in 'text'|items %}{% endfor %}", "pairs from a mapping"),
        ("{{ missing.field }}", "missing"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_template_error(source, message):
    with pytest.raises(TemplateError, match=message):
        render(source)


def test_messages_and_tools_must_be_objects(template):
    for bad in ("text", {"role": "user"}, ["text"]):
        with pytest.raises(TypeError, match="messages must be"):
            template.render(bad)
    with pytest.raises(TypeError, match="tools must be"):
        template.render([{"role": "user", "content": "x"}], tools=[len])


def test_a_template_that_is_not_text_is_refused(directory):
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TemplateError, match="cannot be read"):
        ChatTemplate.from_directory(directory)
