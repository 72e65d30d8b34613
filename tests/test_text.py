"""From tokens to text: stops, end tokens, streams, limits and failures, on a model whose tokens are scripted."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import lily
from lily.testing import fail_at, scripted
from lily.text import StopMatcher

END = 6137  # <|im_end|> of the shipped tokenizer


def matched(pieces, stops):
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + (matcher.finish() if matcher.matched is None else ""), matcher.matched


# Stop strings


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("fine\n\nUser: x", ["\n\nUser:", "END"], "fine"),
        ("fine END", ["\n\nUser:", "END"], "fine "),
        ("EN", ["\n\nUser:", "END"], "EN"),
        ("EENEND.", ["END"], "EEN"),
        ("aabaabaab!", ["aabaab!"], "aab"),
        ("abcd", ["abcd", "bc"], "a"),
        ("xabc", ["abc", "bc", "c"], "x"),
        ("", ["x"], ""),
        ("no stop", [], "no stop"),
        ("\u6570\U0001f642END", ["\U0001f642E"], "\u6570"),
    ],
)
def test_stops_do_not_depend_on_the_cut(text, stops, expected):
    assert matched([text], stops)[0] == matched(list(text), stops)[0] == expected
    for cut in range(len(text) + 1):
        assert matched([text[:cut], text[cut:]], stops)[0] == expected
    source = random.Random(0)
    for _ in range(30):
        cuts = sorted(source.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert matched(pieces, stops)[0] == expected


def test_only_what_may_become_a_stop_is_held():
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(piece) for piece in ("a\n", "\nUse", "d", "\n")] == ["a", "", "\n\nUsed", ""]
    assert matcher.finish() == "\n" and matcher.push("") == ""


def test_nothing_passes_after_a_match():
    matcher = StopMatcher(["END"])
    assert matcher.push("aEND") == "a" and matcher.push("more") == "" and matcher.finish() == ""


def text_of(chunks):
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("stop", ["\n\nUser:", ["nothing", "User"], "r", "fine"])
def test_a_stop_ends_generate_and_stream_alike(stop):
    model = scripted("It is fine\n\nUser: hello")
    answer = model.generate("x", stop=stop)
    chunks = list(model.stream("x", stop=stop))
    first = stop if isinstance(stop, str) else "User"
    assert answer.text == text_of(chunks) == "It is fine\n\nUser: hello".split(first)[0]
    assert answer.finish_reason == chunks[-1].finish_reason == "stop"
    assert answer.tokens == [token for chunk in chunks for token in chunk.tokens]


def test_text_held_for_a_stop_is_returned_at_the_end():
    answer = scripted("the EN").generate("x", stop="END")
    assert (answer.text, answer.finish_reason) == ("the EN", "stop")
    assert scripted("the EN", repeat=True).generate("x", stop="END", max_tokens=len(answer.tokens) - 1).text == "the EN"


# End tokens


def test_the_end_token_is_counted_and_not_printed():
    answer = scripted("Red.").generate("x")
    assert answer.text == "Red." and answer.tokens[-1] == END and answer.usage.generated_tokens == len(answer.tokens)


def test_every_source_of_end_tokens_counts():
    model = scripted(["a", 5, "b"], generation_config={"eos_token_id": [5]})
    assert {5, END} <= model.end_tokens
    answer = model.generate("x")
    assert (answer.text, answer.tokens[-1], answer.finish_reason) == ("a", 5, "stop")
    assert scripted(["a", END, "b"], generation_config={"eos_token_id": 6135}).generate("x").text == "a"


def test_ignore_eos_goes_on_and_prints_no_marker():
    answer = scripted(["a", END, "b"]).generate("x", ignore_eos=True, max_tokens=4)
    assert answer.text == "ab" and answer.tokens[1] == END and answer.finish_reason == "length"


def test_an_end_token_at_once_is_an_empty_answer():
    answer = scripted("").generate("x")
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", [END], "stop")


# Streams


def test_streams_hold_whole_characters_only():
    text = "Tr\u017e se\u0159adil \U0001f99c \u65e5\u672c \U0001f468\u200d\U0001f469\u200d\U0001f467"
    chunks = list(scripted(text).stream("x"))
    assert text_of(chunks) == text and not any("\ufffd" in chunk.text for chunk in chunks)


def test_a_character_cut_by_the_limit_is_flushed():
    model = scripted("\U0001f99c\U0001f99c", repeat=True)
    answer = model.generate("x", max_tokens=1)
    assert answer.text == "\ufffd" == text_of(model.stream("x", max_tokens=1))


@pytest.mark.parametrize("options", [{}, {"max_tokens": 3}, {"stop": "red"}, {"max_tokens": 0}])
def test_exactly_the_last_chunk_has_reason_usage_and_timing(options):
    *first, last = scripted("It was red today.").stream("x", **options)
    assert all(chunk.finish_reason is chunk.usage is chunk.timing is None for chunk in first)
    assert last.finish_reason and last.usage and last.timing
    assert sum(len(chunk.tokens) for chunk in [*first, last]) == last.usage.generated_tokens


def test_closing_a_stream_stops_the_device_and_keeps_the_session():
    model = scripted("word ", repeat=True)
    session = model.prefill([7, 8])
    stream = session.stream()
    for _ in range(3):
        next(stream)
    with pytest.raises(ValueError, match="busy"):
        session.append("more")
    stream.close()
    assert model._native.in_flight == 0 and len(session) == 2 + 3
    assert session.generate(max_tokens=2).usage.prompt_tokens == 5


def test_a_dropped_stream_of_the_model_frees_its_session():
    model = scripted("word ", repeat=True)
    for _ in model.stream("x"):
        break
    assert model._native.in_flight == 0


def test_a_stream_that_was_never_read_does_nothing():
    model = scripted("word")
    session = model.prefill("start")
    session.stream("x").close()
    assert len(session) == len(model.encode("start"))


def test_options_are_checked_before_the_first_chunk():
    model = scripted("x")
    for call in (model.stream, model.generate, model.prefill("a").stream, model.prefill("a").generate):
        with pytest.raises(lily.SamplingError):
            call("x", temperature=-1)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            call([6144])
        with pytest.raises(TypeError, match="unknown option"):
            call("x", temprature=1)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 0, -1, 32, 16.0, True, "4"])
def test_a_quantised_cache_is_refused_with_what_there_is(bits):
    model = scripted("x")
    messages = [{"role": "user", "content": "Hi"}]
    for call in (model.stream, model.generate, model.prefill("a").stream, model.prefill("a").generate):
        with pytest.raises(ValueError, match=f"kv_bits is {bits!r}, expected 16 or None"):
            call("x", kv_bits=bits)
    with pytest.raises(ValueError, match="kv_bits"):
        model.chat(messages, kv_bits=bits)


@pytest.mark.parametrize("bits", [16, None])
def test_the_cache_that_there_is_may_be_asked_for(bits):
    assert scripted("x").generate("x", kv_bits=bits, max_tokens=1).text == "x"


# Limits


def test_without_a_limit_the_context_is_used_up():
    model = scripted("word ", repeat=True, max_context=512)
    answer = model.generate([7] * 40)
    assert len(answer.tokens) == 472 and answer.finish_reason == "length" and answer.usage.total_tokens == 512
    assert len(model.generate([7] * 510, max_tokens=10).tokens) == 2
    assert model.generate([7] * 512, max_tokens=10).finish_reason == "length"


def test_a_prompt_that_does_not_fit_changes_nothing():
    model = scripted("a", max_context=8)
    session = model.prefill([7] * 6)
    with pytest.raises(lily.ContextOverflowError) as caught:
        session.append([7] * 3)
    assert (caught.value.tokens, caught.value.limit) == (9, 8) and session.tokens == [7] * 6


def test_zero_tokens_only_reads():
    session = scripted("a").session()
    answer = session.generate("some words", max_tokens=0)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", [], "length")
    assert answer.usage.prompt_tokens == len(session) and answer.timing.first_token_seconds is None


def test_the_alias_of_max_tokens():
    assert len(scripted("a b c d e").generate("x", max_new_tokens=2).tokens) == 2


# Prompts, sessions, usage


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", ValueError), ([], ValueError), ([1.5], TypeError), ([True], TypeError), (None, TypeError), (7, TypeError),
        (b"text", TypeError), ([-1], ValueError), ([1 << 80], TypeError), (np.zeros((2, 2), int), ValueError),
        ("\ud800", ValueError), ([["a"], "b"], TypeError),
    ],
)  # fmt: skip
def test_bad_prompts(prompt, error):
    with pytest.raises(error):
        scripted("a").generate(prompt)


def test_ids_may_be_of_any_integer_kind():
    model = scripted("a")
    for ids in ([1, 2], (1, 2), np.array([1, 2], np.uint16), np.array([1, 2])):
        assert model.prefill(ids).tokens == [1, 2]


def test_a_list_of_prompts_gives_a_list():
    answers = scripted("Red.").generate(["one", [2, 3], "three"], max_tokens=2)
    assert [len(answer.tokens) for answer in answers] == [2, 2, 2]
    assert len({answer.sampling.seed for answer in answers}) == 3


def test_a_session_knows_its_tokens_and_their_origin():
    model = scripted("Red.")
    session = model.prefill("What?")
    n = len(session)
    answer = session.generate(" Say:")
    assert session.tokens[-len(answer.tokens) :] == answer.tokens
    assert session.origins.tolist() == [0] * (len(session) - len(answer.tokens)) + [1] * len(answer.tokens)
    assert answer.usage.reused_tokens == n and answer.usage.prompt_tokens == len(session) - len(answer.tokens)
    assert session.nbytes > 0 and "tokens" in repr(session)


def test_forks_go_separate_ways():
    session = scripted("Red.").prefill("What?")
    other = session.fork()
    other.generate(max_tokens=1)
    assert len(other) == len(session) + 1
    with session:
        assert session.logits().shape == (6144,)


def test_an_empty_session_needs_a_prompt():
    with pytest.raises(ValueError, match="empty"):
        scripted("a").session().generate()


def test_progress_of_a_prefill():
    seen = []
    scripted("a").prefill([7] * 150, progress=lambda *event: seen.append(event))
    assert seen == [("prefill", 64, 150), ("prefill", 128, 150), ("prefill", 150, 150)]
    with pytest.raises(TypeError, match="progress"):
        scripted("a").prefill("x", progress=3)


# Sampling through the whole path


def test_the_checkpoints_defaults_are_used_and_shown():
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    model = scripted("a", generation_config=config)
    used = model.generate("x").sampling
    assert (
        (used.temperature, used.top_p, used.top_k)
        == (0.6, 0.95, 20)
        == tuple(getattr(model.defaults, name) for name in ("temperature", "top_p", "top_k"))
    )
    assert model.generate("x", temperature=0).sampling.temperature == 0


def spread(ids):
    row = np.zeros(6144, np.float32)
    row[100:120] = 5.0 + np.arange(20) / 100
    return row


def test_seeds():
    model = scripted(spread)

    def draw(**options):
        return tuple(model.generate("x", max_tokens=12, temperature=1, **options).tokens)

    assert len({draw(seed=s) for s in (1, 2, 3)}) > 1 and draw(seed=1) == draw(seed=1)
    assert len({draw() for _ in range(5)}) > 1
    again = model.generate("x", max_tokens=12, temperature=1)
    assert draw(seed=again.sampling.seed) == tuple(again.tokens)


def test_presence_penalty_and_bias_change_the_choice():
    model = scripted(spread)
    assert model.generate("x", max_tokens=3).tokens == [119] * 3
    assert model.generate("x", max_tokens=3, presence_penalty=1.5).tokens == [119, 118, 117]
    assert model.generate("x", max_tokens=2, logit_bias={50: 30}).tokens == [50, 50]


def test_logprobs_align_with_tokens():
    answer = scripted("Red.").generate("x", logprobs=2)
    assert [entry.token for entry in answer.logprobs] == answer.tokens
    for entry in answer.logprobs:
        assert entry.top[0] == (entry.token, entry.logprob) and entry.top[0][1] >= entry.top[1][1]
    assert scripted("Red.").generate("x").logprobs is None
    assert scripted("Red.").generate("x", logprobs=True).logprobs[0].top == ()
    assert all(len(c.logprobs) == len(c.tokens) for c in scripted("Red.").stream("x", logprobs=1))


def allow(*tokens):
    mask = np.zeros(192, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask


def test_a_mask_is_asked_before_each_token_with_the_ids_so_far():
    asked = []

    def mask(ids):
        asked.append(ids)
        return allow(100 + len(ids))

    answer = scripted(spread).generate("x", max_tokens=3, token_mask=mask)
    assert answer.tokens == [100, 101, 102] and asked == [[], [100], [100, 101]]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (lambda ids: np.zeros(192, np.uint32), lily.SamplingError, "allows no token"),
        (lambda ids: np.ones(3, np.uint32), ValueError, r"expected uint32 \[192\]"),
        (lambda ids: np.ones(192, np.int64), ValueError, "expected uint32"),
        (lambda ids: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_bad_mask_ends_the_request_only(mask, error, message):
    model = scripted(spread)
    with pytest.raises(error, match=message):
        model.generate("x", token_mask=mask)
    assert model._native.in_flight == 0 and model.generate("x", max_tokens=1).tokens == [119]


# Failures


def test_a_failed_step_raises_and_the_next_request_works():
    model = scripted("one two three")
    session = model.prefill("x")
    expected = session.fork().generate().text
    fail_at(model, step=2, stage=0)
    with pytest.raises(lily.GPUError) as caught:
        session.generate()
    assert caught.value.stage == "decode" and model._native.in_flight == 0
    assert len(session) == 3 and model.generate("x").text == expected


def test_ctrl_c_passes_through_and_leaves_the_session_usable():
    def interrupt(ids):
        if len(ids) == 2:
            raise KeyboardInterrupt
        return np.full(192, 0xFFFFFFFF, np.uint32)

    model = scripted("one two three")
    session = model.prefill("x")
    with pytest.raises(KeyboardInterrupt):
        session.generate(token_mask=interrupt)
    assert model._native.in_flight == 0 and len(session) == 3 and session.generate(max_tokens=1)


def test_a_closed_model_says_so():
    with scripted("a") as model:
        assert "scripted" in model._repr_html_()
    model.close()
    for call in (lambda: model.generate("x"), model.session, model.memory):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert "closed" in model._repr_html_()


def test_a_model_is_made_by_its_constructors():
    with pytest.raises(TypeError, match="from_pretrained"):
        lily.Model()


# Scores, logits, text, results


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 99])
def test_scores_of_windows(window):
    model = scripted(spread)
    ids = [100, 119, 5, 101, 102]
    score = model.score(ids, window=window)
    row = spread([])
    expected = [row[i] - np.log(np.exp(row).sum()) for i in ids[1:]]
    np.testing.assert_allclose(score.logprobs, expected, rtol=1e-5)
    assert score.logprobs.dtype == np.float32 and score.perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-5)
    assert "over 4 tokens" in str(score)


def test_what_score_refuses():
    with pytest.raises(ValueError, match="two tokens"):
        scripted("a").score([1])
    with pytest.raises(ValueError, match="window"):
        scripted("a").score([1, 2], window=0)
    with pytest.raises(TypeError, match="window"):
        scripted("a").score([1, 2], window=1.5)


def test_logits_of_the_last_or_every_position():
    model = scripted(spread)
    assert model.logits([1, 2]).shape == (6144,) and model.logits([1, 2], last_only=False).shape == (2, 6144)


def test_text_helpers():
    model = scripted("a")
    assert model.decode(model.encode("Z\u00fcrich")) == "Z\u00fcrich"
    messages = [{"role": "user", "content": "Hi"}]
    text = model.apply_chat_template(messages, enable_thinking=False)
    assert text.endswith("<think>\n\n</think>\n\n")
    assert model.apply_chat_template(messages, tokenize=True, enable_thinking=False) == model.encode(text)
    model.template = None
    with pytest.raises(lily.TemplateError, match="no chat template"):
        model.apply_chat_template(messages)


def test_results_print_as_what_they_are():
    answer = scripted("<Red>").generate("x", logprobs=1)
    assert str(answer) == "<Red>" and "&lt;Red&gt;" in answer._repr_html_() and "tokens" in str(answer.timing)
    assert answer.to_dict()["usage"]["total_tokens"] == answer.usage.total_tokens
    assert str(lily.Chunk("a", [1])) == "a"
    assert "no limit" in str(scripted("a").memory()) and "scripted" in repr(scripted("a"))
