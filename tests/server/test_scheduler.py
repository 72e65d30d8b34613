"""Many requests, one device: turns, limits and the end."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from wire import USER, post

import lily
from lily import testing
from lily.server.errors import ApiError
from lily.server.scheduler import Job, Scheduler
from lily.stepping import Piece, Reading
from lily.testing import scripted


def reading(name, chunks, log, tokens=0, seconds=0.0):
    def steps():
        for i in range(chunks):
            time.sleep(seconds)
            log.append((name, "read"))
            yield Reading(i + 1, chunks, 0)
        for _ in range(tokens):
            log.append((name, "write"))
            yield Piece(0, None)

    return steps


def run(coroutine):
    return asyncio.run(coroutine)


async def finished(job):
    return [step async for batch in job.batches() for step in batch]


@pytest.fixture
def scheduler():
    found = Scheduler(max_active=4, max_queue=2)
    yield found
    found.close()


def submit_together(scheduler, jobs):
    """Submit before the thread takes its first step."""
    with scheduler._wake:
        scheduler._queue.extend(jobs)
        scheduler._wake.notify()


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(scheduler):
    log = []

    async def both():
        jobs = [Job(reading("long", 20, log, 1), 0), Job(reading("short", 1, log, 1), 0)]
        submit_together(scheduler, jobs)
        await asyncio.gather(*map(finished, jobs))

    run(both())
    assert log.index(("short", "write")) < 6 and log.count(("long", "read")) == 20


def test_prompts_are_read_in_turn(scheduler):
    log = []

    async def three():
        jobs = [Job(reading(name, 4, log), 0) for name in "abc"]
        submit_together(scheduler, jobs)
        await asyncio.gather(*map(finished, jobs))

    run(three())
    assert [name for name, _ in log] == list("abc" * 4)


def test_answers_go_on_while_a_prompt_is_read_and_take_half_of_the_time(scheduler):
    log = []  # (kind, seconds)

    def timed(kind, seconds, step):
        begun = time.perf_counter()
        time.sleep(seconds)
        log.append((kind, time.perf_counter() - begun))
        return step

    def writing():
        yield Reading(1, 1, 0)
        while [kind for kind, _ in log].count("read") < 5:
            yield timed("write", 0.002, Piece(0, None))

    def reading_slowly():
        for i in range(5):
            yield timed("read", 0.03, Reading(i + 1, 5, 0))

    async def both():
        jobs = [Job(writing, 0), Job(reading_slowly, 0)]
        submit_together(scheduler, jobs)
        await asyncio.gather(*map(finished, jobs))

    run(both())
    reads = [i for i, (kind, _) in enumerate(log) if kind == "read"]
    for i, j in zip(reads[:-1], reads[1:], strict=True):
        written = [seconds for _, seconds in log[i + 1 : j]]
        # As long as the chunk took, and at most one step more.
        assert log[i][1] <= sum(written) + 0.01 and sum(written[:-1]) <= log[i][1]


def test_requests_begin_in_the_order_of_their_arrival():
    log = []
    scheduler = Scheduler(max_active=1, max_queue=10)

    async def five():
        jobs = [Job(reading(name, 2, log), 0) for name in "abcde"]
        submit_together(scheduler, jobs)
        await asyncio.gather(*map(finished, jobs))

    run(five())
    scheduler.close()
    assert [name for name, _ in log] == list("aabbccddee")


def test_a_full_queue_refuses(scheduler):
    async def many():
        stop = threading.Event()

        def forever():
            while not stop.is_set():
                time.sleep(0.001)
                yield Piece(0, None)

        jobs = [Job(forever, 0) for _ in range(6)]
        for job in jobs:
            scheduler.submit(job)
            await asyncio.sleep(0.02)
        with pytest.raises(ApiError) as caught:
            scheduler.submit(Job(forever, 0))
        stop.set()
        await asyncio.gather(*map(finished, jobs))
        return caught.value

    error = run(many())
    assert error.status == 429 and int(error.headers["Retry-After"]) >= 1 and error.code == "queue_full"


def test_a_request_waits_for_memory_that_another_holds_and_fails_when_nobody_does():
    free = 10
    held = []

    def room(prompts):
        if sum(prompts) > free - sum(held):
            raise lily.OutOfMemoryError("too much", needed=sum(prompts), available=free - sum(held))

    def holding(tokens):
        def steps():
            held.append(tokens)
            for _ in range(5):
                time.sleep(0.005)
                yield Reading(5, 5, 0)  # all that it needs is held from the first step on
            held.remove(tokens)

        return steps

    scheduler = Scheduler(max_active=4, max_queue=10, room=room)

    async def three():
        jobs = [Job(holding(tokens), tokens) for tokens in (8, 6, 11)]
        for job in jobs:
            scheduler.submit(job)
        return await asyncio.gather(*map(finished, jobs), return_exceptions=True)

    first, second, third = run(three())
    scheduler.close()
    assert len(first) == len(second) == 5
    assert isinstance(third, lily.OutOfMemoryError) and (third.needed, third.available) == (11, 10)


def test_smaller_requests_pass_one_that_waits_for_memory_but_not_for_ever():
    free, held, begun = 10, {}, []

    def room(prompts):
        if sum(prompts) > free - sum(held.values()):
            raise lily.OutOfMemoryError("too much", needed=sum(prompts), available=free - sum(held.values()))

    def holding(name, tokens, steps):
        def run():
            begun.append(name)
            held[name] = tokens
            for _ in range(steps):
                yield Reading(tokens, tokens, 0)
            del held[name]

        return Job(run, tokens)

    scheduler = Scheduler(max_active=4, max_queue=99, room=room)

    async def all_of_them():
        jobs = [holding("long", 4, 200), holding("big", 8, 1), *(holding(i, 3, 2) for i in range(20))]
        submit_together(scheduler, jobs)
        return await asyncio.gather(*map(finished, jobs))

    assert len(run(all_of_them())) == 22
    scheduler.close()
    # "long" holds what "big" needs; eight small ones use what is left, then the others wait behind "big".
    assert begun == ["long", *range(8), "big", *range(8, 20)]


def test_what_those_that_run_have_still_to_read_is_not_given_away():
    free, held, most = 10, [0], []

    def room(prompts):
        if sum(prompts) > free - sum(held):
            raise lily.OutOfMemoryError("too much", needed=sum(prompts), available=free - sum(held))

    def growing(tokens):
        def run():
            for done in range(1, tokens + 1):
                held[0] += 1
                most.append(held[0])
                yield Reading(done, tokens, 0)
            held[0] -= tokens

        return Job(run, tokens)

    scheduler = Scheduler(max_active=4, max_queue=9, room=room)

    async def three():
        jobs = [growing(6), growing(6), growing(4)]
        submit_together(scheduler, jobs)
        return await asyncio.gather(*map(finished, jobs))

    assert [len(steps) for steps in run(three())] == [6, 6, 4]
    scheduler.close()
    assert 6 < max(most) <= free  # 6 and 4 side by side, never 6 and 6


def test_an_error_reaches_its_request_and_no_other(scheduler):
    def broken():
        yield Piece(0, None)
        raise lily.GPUError("no")

    async def both():
        jobs = [Job(broken, 0), Job(reading("a", 3, []), 0)]
        submit_together(scheduler, jobs)
        return await asyncio.gather(*map(finished, jobs), return_exceptions=True)

    bad, good = run(both())
    assert isinstance(bad, lily.GPUError) and len(good) == 3


def test_a_cancelled_job_is_closed_before_its_next_step(scheduler):
    closed = threading.Event()

    def steps():
        try:
            while True:
                time.sleep(0.002)
                yield Piece(0, None)
        finally:
            closed.set()

    async def cancel():
        job = Job(steps, 0)
        scheduler.submit(job)
        async for _ in job.batches():
            break
        scheduler.cancel(job)
        with pytest.raises(lily.CancelledError):
            await finished(job)

    run(cancel())
    assert closed.is_set() and scheduler.active == 0


def test_draining_lets_what_runs_end_and_takes_nothing_new():
    log = []
    scheduler = Scheduler(max_active=1, max_queue=4)

    async def drain():
        jobs = [Job(reading("a", 5, log, seconds=0.01), 0), Job(reading("b", 2, log), 0)]
        submit_together(scheduler, jobs)
        scheduler.drain(10)
        with pytest.raises(ApiError) as caught:
            scheduler.submit(Job(reading("c", 1, log), 0))
        await asyncio.gather(*map(finished, jobs))
        return caught.value

    error = run(drain())
    scheduler._thread.join(2)
    assert error.status == 503 and error.headers["Retry-After"] and len(log) == 7 and not scheduler._thread.is_alive()


def test_draining_cancels_what_does_not_end_in_time():
    scheduler = Scheduler(max_active=1, max_queue=4)

    async def drain():
        jobs = [Job(reading("a", 10_000, [], seconds=0.005), 0), Job(reading("b", 2, []), 0)]
        submit_together(scheduler, jobs)
        scheduler.drain(0.05)
        return await asyncio.gather(*map(finished, jobs), return_exceptions=True)

    assert all(isinstance(error, lily.CancelledError) and "shutting down" in str(error) for error in run(drain()))
    scheduler.close()


def test_an_unread_stream_rests_and_blocks_nobody(scheduler):
    log = []

    def endless():
        while True:
            log.append("step")
            yield Piece(0, None)

    async def both():
        unread = Job(endless, 0)
        scheduler.submit(unread)
        other = Job(reading("other", 3, []), 0)
        await asyncio.sleep(0.1)
        scheduler.submit(other)
        assert len(await finished(other)) == 3
        rested = len(log)
        await asyncio.sleep(0.05)
        assert len(log) == rested < 2000
        async for batch in unread.batches():
            assert len(batch) <= 64
            if len(log) > rested:
                break
        scheduler.cancel(unread)

    run(both())


# Over HTTP


def test_a_short_request_overtakes_a_long_prompt(serving, monkeypatch):
    append = testing.ScriptedSession.append

    def slow(self, ids, *rest):
        time.sleep(0.1)
        return append(self, ids, *rest)

    monkeypatch.setattr(testing.ScriptedSession, "append", slow)
    client = serving("Four.")
    order = []

    def ask(name, messages):
        assert post(client, messages=messages).status_code == 200
        order.append(name)

    thread = threading.Thread(target=ask, args=("long", [{"role": "user", "content": "shelf jars door " * 400}]))
    thread.start()
    while client.server.state.scheduler.active == 0:
        time.sleep(0.005)
    ask("short", USER)
    assert order == ["short"]
    thread.join()


def test_answers_are_those_of_requests_alone(demo_server, demo):
    questions = [
        "What is a young dog called?",
        "What is the capital of France?",
        "Tell me a story about a red ball.",
        "What colour is snow?",
    ]
    messages = [[{"role": "user", "content": question}] for question in questions]
    found = {}

    def ask(i):
        body = {"messages": messages[i % 4], "max_tokens": 10, "temperature": 0.7, "seed": i}
        found[i] = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=120).json()["choices"][0]["message"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        alone = demo.chat(messages[i % 4], max_tokens=10, temperature=0.7, seed=i)
        assert (found[i]["content"], found[i].get("reasoning_content")) == (alone.content, alone.reasoning)


def test_too_many_requests_get_429(serving):
    client = serving(scripted("many words ", repeat=True, max_context=1 << 20), max_active=1, max_queue=0)
    with client.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        refused = post(client)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert post(client, stream=True).status_code == 429


def test_a_prompt_that_no_memory_can_hold_gets_503_with_the_numbers(serving):
    with lily.Model.demo(progress=False, memory_limit=24 << 20) as model:
        client = serving(model)
        refused = post(client, messages=[{"role": "user", "content": "shelf jars door " * 4000}])
        error = refused.json()["error"]
        assert refused.status_code == 503 and error["code"] == "insufficient_memory"
        assert error["needed_bytes"] > error["available_bytes"] >= 0 and "retry-after" in refused.headers
        # Nor does a stream begin that could only say so, whatever runs beside it.
        with client.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True, "ignore_eos": True}) as running:
            next(running.iter_lines())
            streamed = post(client, messages=[{"role": "user", "content": "shelf jars door " * 4000}], stream=True)
        assert streamed.status_code == 503 and streamed.json()["error"]["needed_bytes"] == error["needed_bytes"]
        assert post(client, max_tokens=3).status_code == 200
