"""The engine under trouble and load: faults, Ctrl-C, dropped streams, limits, threads; counts against the plan."""

from __future__ import annotations

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import DENSE, DEVICES, GREEDY, MOE, assert_same, everything, load, model, prompt

import lily
from lily._engine import native
from lily.testing import fail_at

IDS = prompt(MOE, 64)


@pytest.fixture(scope="module")
def usual():
    """What a greedy request gives when nothing goes wrong."""
    return model(MOE).generate(IDS, max_tokens=24, **GREEDY).tokens


def normal_again(loaded, usual):
    """The next request is right and nothing of the last one is left on the device."""
    until = time.monotonic() + 1
    while loaded._native.in_flight and time.monotonic() < until:
        time.sleep(0.002)
    assert loaded._native.in_flight == 0
    assert loaded.generate(IDS, max_tokens=24, **GREEDY).tokens == usual


# Faults


@pytest.fixture
def faulty():
    """A model of one's own: a fault that was asked for and did not happen goes with it."""
    with load(MOE) as loaded:
        yield loaded


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(("submission", "stage"), [(n, stage) for n in range(8) for stage in (0, 1)] + [(8, 12), (9, 2), (10, 21)])
def test_a_failed_step_leaves_the_session_where_the_last_token_left_it(faulty, submission, stage, pending):
    """Submission 2n is the forward part of step n, 2n + 1 its sampling; step n + 1 is in flight when n is read."""
    loaded = faulty
    trunk = loaded.prefill(IDS)
    if pending:
        trunk.generate(max_tokens=1, **GREEDY)
    session, undisturbed, whole = trunk.fork(), trunk.fork(), trunk.fork()
    tokens = whole.generate(max_tokens=12, **GREEDY).tokens
    fail_at(loaded, submission, stage)
    got = []
    with pytest.raises(lily.GPUError) as caught:
        for chunk in session.stream(max_tokens=12, **GREEDY):
            got += chunk.tokens
    assert caught.value.stage == stage and "fault" in caught.value.log
    assert loaded._native.in_flight == 0
    assert got == tokens[: submission // 2]
    undisturbed.generate(max_tokens=submission // 2, **GREEDY)
    assert_same(everything(session), everything(undisturbed))
    assert session.generate(max_tokens=12 - len(got), **GREEDY).tokens == tokens[len(got) :]


@pytest.mark.parametrize("chunk", range(5))
@pytest.mark.parametrize("stage", [0, 7])
def test_a_failed_chunk_keeps_those_before_it(faulty, chunk, stage):
    ids = prompt(MOE, 300)
    faulty._native.set_chunk(64)
    session = faulty.session()
    fail_at(faulty, chunk, stage)
    with pytest.raises(lily.GPUError) as caught:
        session.append(ids)
    assert caught.value.stage == stage
    assert session.tokens == ids[: 64 * chunk].tolist()
    if chunk:
        assert_same(everything(session.fork()), everything(faulty.prefill(ids[: 64 * chunk])))
    session.append(ids[64 * chunk :])
    assert_same(everything(session), everything(faulty.prefill(ids)))


@pytest.mark.parametrize("call", ["generate", "logits", "score", "prefill"])
def test_a_request_after_a_failed_one_is_right(faulty, call, usual):
    fail_at(faulty, 0, 0)
    with pytest.raises(lily.GPUError):
        getattr(faulty, call)(IDS)
    normal_again(faulty, usual)


# Ctrl-C


@pytest.fixture
def ctrl_c():
    """Sends SIGINT after a delay, and knows when."""
    import os
    import signal

    sent: list[float] = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timers = []

    def after(seconds):
        timers.append(threading.Timer(seconds, send))
        timers[-1].start()
        return sent

    yield after
    for timer in timers:
        timer.cancel()


@pytest.mark.parametrize("rows", [64, 4096])
def test_ctrl_c_in_a_long_prefill_comes_within_a_second(rows, ctrl_c):
    """Between chunks and in the middle of one; the chunks already read stay."""
    with lily.Model.demo(progress=False) as loaded:
        loaded._native.set_chunk(rows)
        ids = np.random.default_rng(0).integers(0, 6000, 30_000)
        session = loaded.session()
        sent = ctrl_c(0.3)
        with pytest.raises(KeyboardInterrupt):
            session.append(ids)
        assert time.monotonic() - sent[0] < 1
        kept = len(session)
        assert kept % rows == 0 and kept < len(ids) and loaded._native.in_flight == 0
        session.append([1, 2, 3])
        assert session.tokens == [*ids[:kept].tolist(), 1, 2, 3]
        if kept <= 2048:
            assert_same(everything(session), everything(loaded.prefill([*ids[:kept].tolist(), 1, 2, 3])))


def test_ctrl_c_in_a_generation_keeps_what_was_generated(ctrl_c, usual):
    loaded = model(MOE)
    session = loaded.prefill(IDS)
    sent = ctrl_c(0.2)
    with pytest.raises(KeyboardInterrupt):
        session.generate(**GREEDY)
    assert time.monotonic() - sent[0] < 1
    got = session.tokens[len(IDS) :]
    assert len(got) < 4032 and got[:24] == usual[: len(got)]
    same = loaded.prefill(IDS)
    same.generate(max_tokens=len(got), **GREEDY)
    assert_same(everything(session), everything(same))
    normal_again(loaded, usual)


def test_an_exception_of_a_progress_function_ends_the_prefill():
    with load(MOE) as loaded:
        loaded._native.set_chunk(64)
        session = loaded.session()

        def report(stage, done, total):
            if done == 128:
                raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            session.append(prompt(MOE, 300), progress=report)
        assert session.tokens == prompt(MOE, 300)[:128].tolist()
        session.append(prompt(MOE, 300)[128:])
        assert_same(everything(session), everything(loaded.prefill(prompt(MOE, 300))))


# Dropped streams


@pytest.mark.parametrize("drop", ["close", "del"])
def test_a_dropped_stream_stops_the_device(drop, usual):
    loaded = model(MOE)
    stream = loaded.stream(IDS, max_tokens=2000, **GREEDY)
    for _ in range(5):
        next(stream)
    if drop == "close":
        stream.close()
    del stream
    gc.collect()
    normal_again(loaded, usual)


def test_fifty_requests_cancelled_at_random_steps(usual):
    loaded = model(MOE)
    choose = random.Random(3)
    for _ in range(50):
        session = loaded.prefill(IDS)
        stream = session.stream(max_tokens=24, **GREEDY)
        steps = choose.randrange(24)
        got = [token for _ in range(steps) for token in next(stream).tokens]
        stream.close()
        assert got == usual[:steps] and session.tokens == [*IDS.tolist(), *got]
        assert session.generate(max_tokens=24 - steps, **GREEDY).tokens == usual[steps:]
    normal_again(loaded, usual)


# Limits


def test_the_context_is_used_to_its_end_and_no_further():
    with load(MOE, max_context=512) as loaded:
        session = loaded.prefill(prompt(MOE, 64)[:40])
        before = native().testing.counters(loaded._native)["submissions"]
        answer = session.generate(**GREEDY)
        assert (answer.usage.generated_tokens, answer.finish_reason, len(session)) == (472, "length", 512)
        # one head, 471 steps, 472 samples: nothing was submitted for a token 513
        assert native().testing.counters(loaded._native)["submissions"] - before == 2 * 472
        assert session.generate(**GREEDY).tokens == []
        with pytest.raises(lily.ContextOverflowError) as caught:
            session.append([1])
        assert (caught.value.tokens, caught.value.limit) == (513, 512)
        assert session.logits().shape == (512,) and len(session) == 512


@pytest.mark.parametrize(("length", "room"), [(510, 2), (511, 1), (512, 0)])
def test_prompts_near_the_context_limit(length, room):
    with load(MOE, max_context=512) as loaded:
        answer = loaded.generate([7] * length, **GREEDY)
        assert (len(answer.tokens), answer.finish_reason) == (room, "length")
        assert loaded.logits([7] * length).shape == (512,)
        with pytest.raises(lily.ContextOverflowError) as caught:
            loaded.generate([7] * 513)
        assert (caught.value.tokens, caught.value.limit) == (513, 512)


def test_a_model_beyond_the_memory_limit_is_refused_with_numbers():
    with pytest.raises(lily.OutOfMemoryError) as caught:
        load(MOE, memory_limit=1_000_000)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert error.needed > 3_900_000 and error.available == 1_000_000 and "memory_limit" in error.hint
    load(MOE, memory_limit=error.needed).close()


def test_where_memory_is_short_a_prompt_is_read_in_smaller_chunks():
    ids = np.random.default_rng(3).integers(0, 500, 1500).tolist()
    with load(DENSE) as loaded:
        usual = loaded.prefill(ids)
        memory = loaded.memory()
        with load(DENSE, memory_limit=memory.total - memory.workspace * 3 // 4) as small:
            session = small.prefill(ids)
            assert small.memory().workspace <= memory.workspace // 2
            assert small._native.chunk == loaded._native.chunk == 2048
            assert_same(everything(session), everything(usual))
            assert (small.score(ids[:900]).logprobs == loaded.score(ids[:900]).logprobs).all()


def test_a_request_beyond_the_memory_limit_leaves_the_model_usable():
    """Room for keys and values of 2,048 tokens: the next growth step takes more than all spare states together."""
    ids = [7] * 3000
    with load(DENSE) as loaded:
        loaded._native.set_chunk(512)
        loaded.prefill(ids[:2000]).generate(max_tokens=8, **GREEDY)
        limit = loaded.memory().total + 200_000
        answer = loaded.generate(ids[:2000], max_tokens=60, **GREEDY).tokens
        with load(DENSE, memory_limit=limit) as small:
            small._native.set_chunk(512)
            session = small.prefill(ids[:600])
            with pytest.raises(lily.OutOfMemoryError) as caught:
                session.append(ids[600:])
            assert caught.value.needed > caught.value.available and caught.value.hint
            assert small.memory().total <= limit
            assert 600 <= len(session) <= 2048
            assert_same(everything(session), everything(loaded.prefill(ids[: len(session)])))
            session.close()
            session = small.prefill(ids[:2000])
            with pytest.raises(lily.OutOfMemoryError):
                session.generate(max_tokens=60, **GREEDY)
            got = session.tokens[2000:]
            assert 47 <= len(got) <= 49 and got == answer[: len(got)]
            session.close()
            assert small.generate(ids[:64], max_tokens=8, **GREEDY).tokens == loaded.generate(ids[:64], max_tokens=8, **GREEDY).tokens


def test_closing_sessions_and_models_gives_memory_back():
    loaded = load(MOE)
    loaded.generate(IDS, max_tokens=4, **GREEDY)
    idle = loaded.memory()
    sessions = [loaded.prefill(IDS) for _ in range(8)]
    assert loaded.memory().states > idle.states
    for session in sessions:
        session.close()
    # at most four spare states stay in the pool
    assert loaded.memory().states <= idle.states + 4 * idle.state_bytes and loaded.memory().requests == idle.requests
    loaded.close()
    loaded.close()
    for call in (loaded.memory, loaded.session, lambda: loaded.generate("x"), lambda: loaded.logits([1])):
        with pytest.raises(ValueError, match="closed"):
            call()


# Threads, neighbours


def test_a_model_works_from_any_thread(usual):
    loaded = model(MOE)

    def ask(_=None):
        return loaded.generate(IDS, max_tokens=24, **GREEDY).tokens

    with ThreadPoolExecutor(4) as pool:
        assert all(tokens == usual for tokens in pool.map(ask, range(20)))
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    assert found == [usual]


@pytest.mark.parametrize("device", DEVICES)
def test_two_models_in_one_process(device):
    moe, dense = load(MOE, device), load(DENSE, device)
    ids = {MOE: prompt(MOE, 64), DENSE: prompt(DENSE, 64)}
    alone = {name: m.generate(ids[name], max_tokens=12, **GREEDY).tokens for name, m in ((MOE, moe), (DENSE, dense))}
    streams = moe.stream(ids[MOE], max_tokens=12, **GREEDY), dense.stream(ids[DENSE], max_tokens=12, **GREEDY)
    together = [(a.tokens, b.tokens) for a, b in zip(*streams, strict=True)]
    assert [sum(tokens, []) for tokens in zip(*together, strict=True)] == [alone[MOE], alone[DENSE]]
    moe.close()
    assert dense.generate(ids[DENSE], max_tokens=12, **GREEDY).tokens == alone[DENSE]
    dense.close()


@pytest.mark.parametrize("name", [MOE, DENSE])
def test_requests_of_any_lengths_give_the_same_together_as_alone(name):
    """As a list, and as streams of which a fourth joins while three decode and a fifth is never read further."""
    loaded = model(name)
    prompts = [prompt(name, 300)[:n] for n in (7, 131, 64, 23)]
    alone = [loaded.generate(ids, max_tokens=32, **GREEDY).tokens for ids in prompts]
    assert [answer.tokens for answer in loaded.generate(prompts, max_tokens=32, **GREEDY)] == alone
    unread = loaded.stream(prompts[0], max_tokens=500, **GREEDY)
    next(unread)
    streams = [loaded.stream(ids, max_tokens=32, **GREEDY) for ids in prompts[:3]]
    found = [[], [], [], []]
    for step in range(12 + 32):
        if step == 12:
            streams.append(loaded.stream(prompts[3], max_tokens=32, **GREEDY))
        for tokens, stream in zip(found, streams, strict=False):
            tokens += next(stream).tokens if len(tokens) < 32 else []
    assert found == alone and len({tuple(tokens) for tokens in alone}) == 4
    assert len(next(unread).tokens) == 1
    unread.close()


def test_a_busy_session_refuses_a_second_call():
    session = model(MOE).prefill(IDS)
    stream = session.stream(max_tokens=8, **GREEDY)
    first = next(stream)
    for call in (lambda: session.append([1]), lambda: session.generate(max_tokens=1), session.logits, session.fork):
        with pytest.raises(ValueError, match="busy"):
            call()
    rest = [token for chunk in stream for token in chunk.tokens]
    assert session.tokens == [*IDS.tolist(), *first.tokens, *rest] and len(rest) == 7
    assert session.logits().shape == (512,)


def test_seeds_give_repeatable_and_fresh_streams():
    loaded = model(MOE)

    def ask(seed=None):
        return tuple(loaded.generate(IDS, max_tokens=16, temperature=1.0, top_k=0, top_p=1.0, ignore_eos=True, seed=seed).tokens)

    assert len({ask(1), ask(2), ask(3)}) > 1
    assert ask(1) == ask(1)
    assert len({ask() for _ in range(5)}) > 1
    alone = ask(1)
    others = [loaded.stream(IDS, max_tokens=64, temperature=1.0, seed=seed, ignore_eos=True) for seed in (7, 8, None)]
    mine = loaded.stream(IDS, max_tokens=16, temperature=1.0, top_k=0, top_p=1.0, ignore_eos=True, seed=1)
    found = []
    for chunk in mine:
        found += chunk.tokens
        for other in others:
            next(other)
    assert tuple(found) == alone
    for other in others:
        other.close()
