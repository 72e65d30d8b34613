"""The store: every request begins from the longest usable prefix, and results are those of a run without a store."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import tiny

import lily
from lily import testing
from lily.messages import normalise
from lily.rendering import Rendering
from lily.template import ChatTemplate
from lily.testing import scripted

INTERVAL = 1024


@pytest.fixture(scope="module")
def loaded():
    with lily.Model.demo(progress=False) as model:
        yield model


@pytest.fixture
def model(loaded):
    loaded.sessions.clear()
    template, budget = loaded.template, loaded.sessions.budget
    yield loaded
    loaded.template, loaded.sessions.budget = template, budget


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def shelves(count: int, changed: int = -1) -> str:
    return " ".join(f"shelf {i} holds {'nine' if i == changed else i % 7} jars." for i in range(count))


def rendered(model, messages, **variables) -> Rendering:
    return Rendering(model.template, model.tokenizer, normalise(messages), variables=variables)


def ids(model, messages, **variables) -> list[int]:
    return rendered(model, messages, **variables).ids


def same_as_cold(model, tokens) -> None:
    """The newest stored session equals one that read its tokens at once."""
    warm = model.sessions._newest()
    assert warm.tokens == tokens and not warm.origins.any()
    first, second = testing.state(warm), testing.state(model.prefill(tokens))
    assert all(np.array_equal(first[name], second[name]) for name in second)


def test_a_growing_chat_reads_only_what_is_new(model):
    p = [{"role": "system", "content": shelves(60)}, user("What is on shelf 7?")]
    first = model.chat(p, thinking=False, temperature=0, max_tokens=12)
    assert first.usage.reused_tokens == 0
    q = [*p, first, user("And shelf 8?")]
    for reuse_generated in (True, False):
        second = model.chat(q, thinking=False, temperature=0, max_tokens=0, reuse_generated=reuse_generated)
        new = len(ids(model, q, enable_thinking=False)) - len(ids(model, p, enable_thinking=False))
        assert second.reuse.read <= new + 64
        assert second.usage.reused_tokens >= len(ids(model, p, enable_thinking=False)) - 64
        same_as_cold(model, ids(model, q, enable_thinking=False))


def stable(model) -> None:
    """A template that keeps thoughts, so that generated tokens stay a prefix."""
    model.template = ChatTemplate(model.template.source.replace("loop.index0 > last.user", "true"), model.template.tokens)


def test_generated_tokens_are_taken_over_where_the_template_keeps_them(model):
    stable(model)
    p = [{"role": "system", "content": "Be brief."}, user("What is a young dog called?")]
    first = model.chat(p, thinking=False, temperature=0)
    q = [*p, first, user("And what is a young cat called?")]
    second = model.chat(q, thinking=False, temperature=0)
    assert second.usage.reused_tokens == first.usage.prompt_tokens + first.usage.generated_tokens
    cold = [len(ids(model, m, enable_thinking=False)) for m in (p, q)]
    assert second.reuse.read == cold[1] - cold[0] - first.usage.generated_tokens
    assert second.content == "A young cat is called a kitten."


def test_without_reuse_of_generated_tokens_a_chat_equals_a_cold_run(model):
    stable(model)
    p = [user("What is a young dog called?")]
    first = model.chat(p, thinking=False, temperature=0)
    q = [*p, first, user("And what is a young cat called?")]
    warm = model.chat(q, thinking=False, temperature=0, logprobs=1, reuse_generated=False)
    assert first.usage.prompt_tokens - 64 <= warm.usage.reused_tokens <= first.usage.prompt_tokens
    cold = model.generate(ids(model, q, enable_thinking=False), temperature=0, logprobs=1)
    assert warm.tokens == cold.tokens and warm.logprobs == cold.logprobs


def test_a_change_in_a_long_prompt_rereads_one_interval(model):
    first, second = ([user(shelves(170, changed))] for changed in (-1, 150))
    model.chat(first, max_tokens=0)
    tokens = [ids(model, m) for m in (first, second)]
    changed = next(i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b)
    reply = model.chat(second, max_tokens=0)
    assert reply.reuse.read <= len(tokens[1]) - changed + INTERVAL and reply.usage.reused_tokens >= INTERVAL
    assert (reply.reuse.differs_at, reply.reuse.message) == (changed, 0)
    same_as_cold(model, tokens[1])


def test_an_old_tool_chain_costs_one_chain_only(model):
    def get_time(city: str):
        """The time in a city."""

    messages = [{"role": "system", "content": shelves(40)}, user("Hello."), assistant("Hello."), user("Times of six cities?")]
    before = len(messages)
    for city in ("Oslo", "Lima", "Rome", "Bern", "Kiev", "Cork"):
        model.chat(messages, tools=[get_time], max_tokens=0)
        call = {"id": city, "type": "function", "function": {"name": "get_time", "arguments": {"city": city}}}
        messages += [
            {**assistant(""), "reasoning_content": f"Ask {city}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": city, "content": "12:05"},
        ]
    chain = model.chat(messages, tools=[get_time], max_tokens=0)
    assert chain.reuse.read < 64  # inside a chain nothing is read again
    messages += [assistant("All at noon."), user("Name a bird.")]
    reply = model.chat(messages, tools=[get_time], max_tokens=0)
    tools = [tool.declaration for tool in lily.tools.declared([get_time])]
    first_turn = Rendering(model.template, model.tokenizer, normalise(messages), tools=tools)._turns[before]
    assert reply.usage.reused_tokens >= first_turn
    assert reply.reuse.message == before


def test_a_cancelled_reading_keeps_what_it_passed(model):
    class Gone(Exception):
        pass

    def leave(stage, done, total):
        if done >= 0.6 * total:
            raise Gone

    messages = [user(shelves(200))]
    with pytest.raises(Gone):
        model.chat(messages, max_tokens=0, progress=leave)
    reply = model.chat(messages, max_tokens=0)
    assert reply.usage.reused_tokens >= 0.5 * reply.usage.prompt_tokens
    same_as_cold(model, ids(model, messages))


def test_cold_and_warm_runs_are_equal_in_every_bit(model):
    prompt = shelves(160)
    short, whole = [user(prompt[: len(prompt) * 2 // 3])], [user(prompt)]

    def run():
        reply = model.chat(whole, temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
        return reply.tokens, reply.logprobs, reply.usage.reused_tokens

    cold = run()
    exact = run()
    model.sessions.clear()
    model.chat(short, max_tokens=3)
    part = run()
    assert cold[:2] == exact[:2] == part[:2]
    assert cold[2] == 0 and exact[2] >= len(ids(model, whole)) - 3 and 0 < part[2] < exact[2]


def test_volatile_header_lines_do_not_spoil_reuse(model):
    def system(value):
        return [{"role": "system", "content": f"x-client-billing-header: cch={value};\nYou help with gardens. {shelves(20)}"}, user("Hi")]

    model.chat(system("a1b2c"), max_tokens=0)
    assert model.chat(system("d4e5f"), max_tokens=0).reuse.read <= 8
    model.sessions.clear()
    model.chat(system("a1b2c"), max_tokens=0, drop_volatile=False)
    kept = model.chat(system("d4e5f"), max_tokens=0, drop_volatile=False)
    assert kept.usage.reused_tokens == 0 and kept.reuse.message == 0 and kept.reuse.differs_at > 0


def test_another_question_shares_the_system_text(model):
    system = {"role": "system", "content": shelves(60)}
    model.chat([system, user("What is on shelf 7?")], max_tokens=2)
    reply = model.chat([system, user("Name a bird.")], max_tokens=0)
    assert reply.usage.reused_tokens >= len(ids(model, [system, user("x")])) - 16
    same_as_cold(model, ids(model, [system, user("Name a bird.")]))


def test_stored_sessions_are_never_moved(model):
    model.chat(
        [user(shelves(20)), assistant("Yes."), user("What is a young dog called?")],
        thinking=False,
        temperature=0,
        max_tokens=80,
        ignore_eos=True,
    )
    entry = model.sessions._newest()
    tokens, before = entry.tokens, testing.state(entry)
    model.chat([user(shelves(20)), assistant("Yes."), user("Name a bird.")], thinking=False, max_tokens=3)
    assert len(model.sessions) == 2 and entry.tokens == tokens
    after = testing.state(entry)
    assert all(np.array_equal(after[name], before[name]) for name in before)


# The budget


def test_the_budget_holds_at_every_step(model):
    model.chat([user(shelves(30, 0))], max_tokens=0)
    size = model.sessions.nbytes
    model.sessions.budget = budget = 3 * size
    for i in range(1, 8):
        model.chat([user(f"{i} {shelves(30, i)}")], max_tokens=1)
        assert model.sessions.nbytes <= budget
        assert 1 <= len(model.sessions) <= 3
    model.sessions.budget = size // 2
    assert len(model.sessions) == 0 and model.sessions.nbytes == 0
    assert model.chat([user(shelves(30))], max_tokens=1).usage.generated_tokens == 1  # works without storing


def test_the_least_recently_used_goes_first():
    model = scripted("x", repeat=True)
    texts = [f"{name} {shelves(20)}" for name in ("apples", "bananas", "plums")]
    for text in [*texts, texts[0]]:
        model.chat([user(text)], max_tokens=1)
    assert len(model.sessions) == 3
    model.sessions.budget = model.sessions.nbytes - 1
    read = [model.chat([user(text)], max_tokens=0).reuse.read for text in texts[:2]]
    assert read[0] == 0 and read[1] > 200


def test_a_chat_of_many_turns_stays_within_few_entries(model):
    messages: list = [{"role": "system", "content": "Be brief."}]
    for i in range(12):
        messages += [user(f"Say {i}."), assistant(f"It is {i}.")]
        model.chat(messages[:-1], thinking=False, max_tokens=0)
    assert len(model.sessions) <= 4
    last = model.chat([*messages, user("Bye.")], thinking=False, max_tokens=0)
    assert last.reuse.read < 64


def test_memory_that_runs_short_is_taken_from_the_store():
    with lily.Model.demo(progress=False, memory_limit=48 << 20) as model:
        model.sessions.budget = 1 << 40
        for i in range(8):
            model.chat([user(f"{i} {shelves(40, i)}")], max_tokens=1)
        assert 0 < len(model.sessions) < 8


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_bad_budget_is_refused(bad, error):
    with pytest.raises(error, match="budget"):
        scripted("x").sessions.budget = bad


def test_closing_the_model_closes_the_store():
    model = lily.Model.demo(progress=False)
    model.chat([user("Hi")], max_tokens=1)
    entry = model.sessions._newest()
    model.close()
    with pytest.raises(ValueError, match="closed"):
        _ = entry.tokens


def test_threads_may_share_the_store(model):
    from concurrent.futures import ThreadPoolExecutor

    questions = [[user(f"What is {i} plus 2?")] for i in (1, 2, 3)] * 2
    alone = [model.chat(q, thinking=False, temperature=0, max_tokens=8).tokens for q in questions]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda q: model.chat(q, thinking=False, temperature=0, max_tokens=8).tokens, questions))
    assert together == alone


# Accounts


def test_a_session_that_is_shared_is_counted_once(model):
    p = [{"role": "system", "content": shelves(30)}, user("What is on shelf 7?")]
    model.chat(p, max_tokens=1)
    alone = model.sessions.nbytes
    model.chat([p[0], user(f"Name a bird. {shelves(12)}")], max_tokens=1)
    model.chat([p[0], user(f"Name a fish. {shelves(12)}")], max_tokens=1)
    assert len(model.sessions) == 2
    assert model.sessions.nbytes < 2 * alone
    assert model.sessions.nbytes == model._native.held_bytes([entry.native for entry in model.sessions._entries])


def test_snapshots_are_shown_apart_and_every_byte_once():
    with lily.Model.demo(progress=False) as model:
        empty = model.memory()
        assert empty.total == empty.weights
        session = model.prefill(np.arange(2100) % 6000)
        forks = [session.fork() for _ in range(3)]
        memory = model.memory()
        assert len(session._native.snapshots) == 3  # the newest is the state that the session stands at
        assert memory.snapshots == 2 * memory.state_bytes
        for fork in forks:
            fork.append([1, 2, 3])
        assert model.memory().snapshots == 2 * memory.state_bytes  # one still stands there
        session.append([1])
        assert model.memory().snapshots == 3 * memory.state_bytes
        parts = ("weights", "kv", "states", "snapshots", "workspace", "requests")
        assert model.memory().total == sum(getattr(model.memory(), part) for part in parts)
        for one in (session, *forks):
            one.close()
        model._native.trim()
        after = model.memory()
        assert (after.snapshots, after.kv) == (0, 0) and after.states <= after.state_bytes


def test_a_fork_costs_no_state_and_no_keys_until_it_diverges(model):
    import time

    session = model.prefill(np.arange(600) % 6000)
    before, seconds, forks = model.memory(), [], []
    for _ in range(50):
        start = time.perf_counter()
        forks.append(session.fork())
        seconds.append(time.perf_counter() - start)
    after = model.memory()
    assert np.median(seconds) < 1e-3
    assert (after.kv, after.states, after.snapshots) == (before.kv, before.states, before.snapshots)
    assert after.requests - before.requests <= 50 * 1024
    forks[0].append([7])
    assert model.memory().total > after.total or model.memory().states == after.states  # a state of its own, maybe a spare one


def test_a_chat_of_200_turns_reads_little_and_stays_within_the_budget(tmp_path):
    with lily.Model.from_pretrained(tiny(tmp_path, context=16384), progress=False) as model:
        model.sessions.budget = budget = 8 << 20
        messages: list = [{"role": "system", "content": "Be brief."}]
        previous = 0
        for turn in range(200):
            messages.append(user(f"q{turn}"))
            reply = model.chat(messages, thinking=False, temperature=0, max_tokens=2, ignore_eos=True, reuse_generated=False)
            tokens = reply.usage.prompt_tokens
            assert reply.reuse.read <= tokens - previous + 64, turn
            assert model.sessions.nbytes <= budget and len(model.sessions) <= 4
            memory = model.memory()
            assert memory.snapshots <= budget
            previous = tokens
            messages.append(assistant("yes"))
        # Snapshots: the newest eight marked ones, and of the regular ones a number that grows with the logarithm.
        assert len(model.sessions._entries[-1].snapshots) <= 8 + 4 * 3
        model.chat(messages[:-1], thinking=False, max_tokens=0, reuse_generated=False)
        warm = model.sessions._newest()
        rewound = warm.fork()
        rewound.rewind(tokens)
        cold = model.prefill(rendered(model, messages[:-1], enable_thinking=False).ids)
        first, second = testing.state(rewound), testing.state(cold)
        assert rewound.tokens == cold.tokens and all(np.array_equal(first[name], second[name]) for name in second)


def test_the_log_names_the_token_and_the_message_from_which_more_is_read_again(model, caplog):
    caplog.set_level("INFO", "lily.store")
    model.chat([user(shelves(30))], max_tokens=0)
    reply = model.chat([user(shelves(30, 20))], max_tokens=0)
    assert reply.reuse.differs_at and f"token {reply.reuse.differs_at}, in message 0" in caplog.text


@pytest.mark.soak
def test_forty_prompts_of_4000_tokens_never_exceed_64_megabytes():
    with lily.Model.demo(progress=False) as model:
        model.sessions.budget = 64 << 20
        for i in range(40):
            model.chat([user(f"{i} {shelves(480, i)}")], max_tokens=1)
            assert model.sessions.nbytes <= 64 << 20
            assert model.memory().snapshots <= 64 << 20
