"""What `generate`, `stream`, sessions, `score` and `logits` promise, on the shipped model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from checkpoints import only

import lily

STORY = "Tom had a red ball."


@pytest.fixture(scope="module")
def demo():
    with lily.Model.demo(progress=False) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def story(demo):
    return demo.generate(STORY, max_tokens=24, temperature=0)


# Text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 11}, {"temperature": 0.7, "top_k": 5, "seed": 3}])
def test_a_stream_adds_up_to_the_whole_answer(demo, options):
    answer = demo.generate(STORY, max_tokens=24, **options)
    chunks = list(demo.stream(STORY, max_tokens=24, **options))
    assert "".join(chunk.text for chunk in chunks) == answer.text == str(answer)
    assert sum((chunk.tokens for chunk in chunks), []) == answer.tokens
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == answer.finish_reason and chunks[-1].usage == answer.usage
    assert answer.text == demo.decode(answer.tokens, skip_special_tokens=True)


def test_an_answer_ends_at_the_end_token(demo):
    prompt = demo.apply_chat_template([{"role": "user", "content": "What is a young dog called?"}], enable_thinking=False)
    answer = demo.generate(prompt, temperature=0)
    assert answer.text == "A young dog is called a puppy." and answer.finish_reason == "stop"
    assert answer.tokens[-1] in demo.end_tokens and not set(answer.tokens[:-1]) & demo.end_tokens
    further = demo.generate(prompt, temperature=0, ignore_eos=True, max_tokens=len(answer.tokens) + 4)
    assert further.tokens[: len(answer.tokens)] == answer.tokens and len(further.tokens) == len(answer.tokens) + 4


@pytest.mark.parametrize("cut", range(4, 40, 5))
def test_a_stop_string_ends_the_text_before_it(demo, story, cut):
    stop = story.text[cut : cut + 4]
    answer = demo.generate(STORY, max_tokens=24, temperature=0, stop=["never in it", stop])
    assert answer.text == story.text.split(stop)[0] and answer.finish_reason == "stop"
    assert answer.tokens == story.tokens[: len(answer.tokens)] and stop in demo.decode(answer.tokens)
    assert "".join(chunk.text for chunk in demo.stream(STORY, max_tokens=24, temperature=0, stop=stop)) == answer.text


def test_tokens_of_a_session_go_on_past_a_stop_string(demo, story):
    stop = story.text[10:14]
    session = demo.prefill(STORY)
    answer = session.generate(max_tokens=24, temperature=0, stop=stop)
    assert session.tokens == [*demo.encode(STORY), *answer.tokens]
    rest = session.generate(max_tokens=24 - len(answer.tokens), temperature=0)
    assert answer.tokens + rest.tokens == story.tokens


# Limits and counts


def test_no_token_asked_for_reads_only(demo):
    session = demo.session()
    answer = session.generate(STORY, max_tokens=0)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", [], "length")
    assert session.tokens == demo.encode(STORY) and session.origins.tolist() == [0] * len(session)
    assert answer.usage.prompt_tokens == len(session) and answer.usage.generated_tokens == 0
    assert np.array_equal(session.logits(), demo.logits(demo.encode(STORY)))


def test_usage_counts_what_was_reused(demo, story):
    ids = demo.encode(STORY)
    session = demo.prefill(ids[:3])
    answer = session.generate(ids[3:], max_tokens=24, temperature=0)
    assert answer.tokens == story.tokens
    assert (answer.usage.prompt_tokens, answer.usage.reused_tokens, answer.usage.generated_tokens) == (len(ids), 3, 24)
    assert answer.usage.total_tokens == len(ids) + 24
    timing = answer.timing
    assert timing.read_tokens == len(ids) - 3 and timing.generated_tokens == 24
    assert 0 < timing.prefill_seconds <= timing.first_token_seconds and timing.decode_seconds > 0


def test_the_answer_runs_to_the_context_limit_by_default(demo):
    with lily.Model.demo(max_context=64, progress=False) as short:
        answer = short.generate(STORY, temperature=0, ignore_eos=True)
        assert len(answer.tokens) == 64 - len(short.encode(STORY)) and answer.finish_reason == "length"


def test_a_list_of_prompts_gives_each_its_own_answer(demo, story):
    prompts = [STORY, demo.encode("The opposite of hot is"), "Once"]
    answers = demo.generate(prompts, max_tokens=24, temperature=0)
    assert [answer.tokens for answer in answers] == [demo.generate(one, max_tokens=24, temperature=0).tokens for one in prompts]
    assert answers[0].tokens == story.tokens


# Log-probabilities


def softmax_log(logits):
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 2.0, "top_k": 0, "seed": 1, "presence_penalty": 1.0}])
def test_logprobs_are_those_of_the_logits(demo, options):
    """After penalties, before temperature; each step's logits are asked for in a session that takes the same tokens."""
    answer = demo.generate(STORY, max_tokens=8, logprobs=3, ignore_eos=True, **options)
    assert len(answer.logprobs) == len(answer.tokens) == 8
    session = demo.prefill(STORY)
    for n, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        logits = session.logits()
        logits[answer.tokens[:n]] -= options.get("presence_penalty", 0.0)
        wanted = softmax_log(logits)
        assert entry.logprob == pytest.approx(wanted[token], abs=1e-4)
        assert [i for i, _ in entry.top] == np.argsort(-wanted, kind="stable")[:3].tolist()
        assert [p for _, p in entry.top] == pytest.approx(np.sort(wanted)[::-1][:3].tolist(), abs=1e-4)
        assert entry.token == token and entry.logprob <= 0
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        assert sum(np.exp(p) for _, p in entry.top) <= 1 + 1e-6
        session.generate(max_tokens=1, ignore_eos=True, token_mask=lambda _, token=token: only(demo, token))
    assert demo.generate(STORY, max_tokens=2).logprobs is None
    assert all(entry.top == () for entry in demo.generate(STORY, max_tokens=2, logprobs=True).logprobs)


def test_streams_carry_the_logprobs_of_their_tokens(demo):
    answer = demo.generate(STORY, max_tokens=8, temperature=0, logprobs=2)
    chunks = list(demo.stream(STORY, max_tokens=8, temperature=0, logprobs=2))
    assert sum((chunk.logprobs for chunk in chunks), []) == answer.logprobs
    assert [len(chunk.tokens) for chunk in chunks] == [len(chunk.logprobs) for chunk in chunks]


# Choosing tokens


def test_the_checkpoints_defaults_are_used_unless_overridden(demo):
    defaults = json.loads((lily.model.DEMO / "generation_config.json").read_text())
    answer = demo.generate(STORY, max_tokens=4, seed=5)
    for name in ("temperature", "top_k", "top_p"):
        assert getattr(answer.sampling, name) == defaults[name]
    explicit = {name: defaults[name] for name in ("temperature", "top_k", "top_p")}
    assert answer.tokens == demo.generate(STORY, max_tokens=4, seed=5, **explicit).tokens
    settings = lily.Sampling(temperature=0.0, seed=5)
    assert demo.generate(STORY, max_tokens=4, sampling=settings, top_k=7).sampling.top_k == 7
    assert demo.generate(STORY, max_tokens=4, sampling=settings).sampling.temperature == 0


def test_a_checkpoint_that_says_nothing_is_greedy(demo, tmp_path):
    for path in lily.model.DEMO.iterdir():
        if path.name != "generation_config.json":
            shutil.copyfile(path, tmp_path / path.name)
    with lily.Model.from_pretrained(tmp_path, progress=False) as plain:
        assert plain.generate(STORY, max_tokens=8).tokens == demo.generate(STORY, max_tokens=8, temperature=0).tokens


def test_a_mask_rules_out_everything_else(demo):
    allowed = {demo.encode(word)[0] for word in (" a", " red", " ball", " Tom")}
    mask = np.zeros(demo.config.vocab_size // 32, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    seen = []

    def remember(ids):
        seen.append(list(ids))
        return mask

    answer = demo.generate(STORY, max_tokens=12, temperature=1.0, top_k=0, seed=2, token_mask=remember)
    assert set(answer.tokens) <= allowed and len(set(answer.tokens)) > 1
    assert seen[:12] == [answer.tokens[:n] for n in range(12)]


def test_a_bias_forces_and_forbids(demo, story):
    token = demo.encode(" ball")[0]
    assert demo.generate(STORY, max_tokens=3, temperature=0, logit_bias={token: 100}).tokens == [token] * 3
    assert demo.generate(STORY, max_tokens=1, temperature=0, logit_bias={story.tokens[0]: -100}).tokens != story.tokens[:1]


def test_penalties_follow_their_definitions(demo):
    """Greedy choices recomputed from the logits of each step."""
    vocabulary = demo.config.vocab_size
    for options in ({"repetition_penalty": 1.3}, {"presence_penalty": 6.0}, {"frequency_penalty": 4.0}):
        prompt = demo.encode(STORY)
        answer = demo.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True, **options)
        session = demo.prefill(prompt)
        for n, token in enumerate(answer.tokens):
            logits = session.logits().astype(np.float64)
            output = np.bincount(answer.tokens[:n], minlength=vocabulary)
            known = np.bincount(prompt, minlength=vocabulary) + output > 0
            factor = options.get("repetition_penalty", 1.0)
            logits = np.where(known, np.where(logits > 0, logits / factor, logits * factor), logits)
            logits -= options.get("presence_penalty", 0.0) * (output > 0) + options.get("frequency_penalty", 0.0) * output
            assert logits[token] >= logits.max() - 1e-4
            session.generate(max_tokens=1, ignore_eos=True, token_mask=lambda _, token=token: only(demo, token))
        assert answer.tokens != demo.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True).tokens


def test_draws_follow_the_distribution(demo):
    """800 draws of one token: frequencies against probabilities, and nothing outside the filters."""
    ids = demo.encode(STORY)
    p = np.exp(softmax_log(demo.logits(ids)))
    best = np.argsort(-p, kind="stable")[:4]
    wanted = p[best] / p[best].sum()
    trunk = demo.prefill(ids)
    drawn = [trunk.fork().generate(max_tokens=1, temperature=1.0, top_k=4, top_p=1.0, seed=n).tokens[0] for n in range(800)]
    assert set(drawn) <= set(best.tolist())
    found = np.array([drawn.count(token) for token in best]) / 800
    assert abs(found - wanted).max() < 4 * 0.5 / np.sqrt(800)


# Sessions, logits, scores


def test_a_pending_token_is_read_by_whatever_comes_next(demo, story):
    ids = demo.encode(STORY)
    session = demo.prefill(ids)
    session.generate(max_tokens=4, temperature=0)
    assert session._native.pending and session.origins.tolist() == [0] * len(ids) + [1] * 4
    once = session.logits()
    assert not session._native.pending and len(session) == len(ids) + 4
    assert np.array_equal(session.logits(), once)
    assert int(once.argmax()) == story.tokens[4]
    more = demo.encode(" The end.")
    session.append(more)
    other = demo.prefill(ids)
    other.generate(max_tokens=4, temperature=0)
    other.append(more)
    assert np.array_equal(session.logits(), other.logits())
    assert session.origins.tolist() == [0] * len(ids) + [1] * 4 + [0] * len(more)


def test_generating_in_pieces_is_generating_at_once(demo, story):
    session = demo.prefill(STORY)
    tokens = []
    for count in (1, 2, 5, 16):
        tokens += session.generate(max_tokens=count, temperature=0).tokens
        if count == 5:
            session.logits()
    assert tokens == story.tokens


def test_generated_and_read_tokens_agree_closely(demo, story):
    """Decode steps and prefill are two arithmetics of the same model."""
    session = demo.prefill(STORY)
    session.generate(max_tokens=24, temperature=0)
    read = demo.logits(demo.encode(STORY) + story.tokens)
    assert np.sqrt(np.square(session.logits() - read).mean() / np.square(read).mean()) < 0.04


@pytest.mark.parametrize("window", [None, 1, 7, 64, 130, 1000])
def test_scores_are_the_log_probabilities_of_the_next_ids(demo, window):
    ids = np.random.default_rng(3).integers(0, 6000, 130)
    score = demo.score(ids, window=window)
    size = window or len(ids)
    wanted = []
    for start in range(0, len(ids) - 1, size):
        piece = ids[start : start + size + 1]
        rows = demo.logits(piece, last_only=False)
        wanted += [softmax_log(row)[token] for row, token in zip(rows, piece[1:], strict=False)]
    assert score.logprobs.dtype == np.float32 and score.logprobs.shape == (129,)
    assert score.logprobs == pytest.approx(np.array(wanted), abs=1e-4)
    assert score.perplexity == pytest.approx(np.exp(-np.mean(wanted)), rel=1e-5)


def test_logits_forms(demo):
    ids = demo.encode(STORY)
    rows = demo.logits(ids, last_only=False)
    assert rows.shape == (len(ids), demo.config.vocab_size) and rows.dtype == np.float32
    assert np.array_equal(demo.logits(STORY), rows[-1])
    assert np.array_equal(demo.prefill(ids).logits(), rows[-1])


def test_a_closed_model_and_a_closed_session_refuse_politely():
    with lily.Model.demo(progress=False) as loaded:
        with loaded.session() as session:
            session.append([1, 2])
        with pytest.raises(ValueError, match="closed"):
            session.logits()
    for call in (lambda: loaded.generate("x"), lambda: next(iter(loaded.stream("x"))), loaded.session, lambda: loaded.score([1, 2])):
        with pytest.raises(ValueError, match="closed"):
            call()
    loaded.close()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m: m.generate(""), ValueError),
        (lambda m: m.generate([6144]), ValueError),
        (lambda m: m.generate([-1]), ValueError),
        (lambda m: m.generate(5), TypeError),
        (lambda m: m.generate("x", temperature=-1), lily.SamplingError),
        (lambda m: m.generate("x", logprobs=99), lily.SamplingError),
        (lambda m: m.generate("x", top_n=3), TypeError),
        (lambda m: m.generate([1] * 40_000), lily.ContextOverflowError),
        (lambda m: m.generate("x", token_mask=lambda ids: np.zeros(1, np.uint32)), ValueError),
        (lambda m: m.session().generate(), ValueError),
        (lambda m: m.session().logits(), ValueError),
        (lambda m: m.score([1]), ValueError),
        (lambda m: lily.Model.demo(device="tpu"), lily.DeviceError),
        (lambda m: lily.Model.demo(max_context=1 << 20), ValueError),
    ],
)  # fmt: skip
def test_errors_are_typed_and_leave_the_model_usable(demo, story, call, error):
    with pytest.raises(error):
        call(demo)
    assert demo.generate(STORY, max_tokens=4, temperature=0).tokens == story.tokens[:4]


def test_the_progress_of_a_prefill_counts_to_its_end(demo):
    calls = []
    demo.prefill([7] * 1200, progress=lambda *state: calls.append(state))
    assert calls[0] == ("prefill", 0, 1200) and calls[-1] == ("prefill", 1200, 1200)
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})


def test_generating_reports_the_prompt_as_loading_did():
    seen = []
    with lily.Model.demo(progress=lambda stage, done, total: seen.append((stage, done, total))) as model:
        assert {stage for stage, _, _ in seen} == {"load"}
        seen.clear()
        model.generate([5] * 600, max_tokens=1)
    assert seen[0] == ("prefill", 0, 600) and seen[-1] == ("prefill", 600, 600)
