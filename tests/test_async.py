"""Programs with an event loop: the loop stays free, cancelling stops the device, and answers are those of the other calls."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import lily
from lily.asynchronous import pulled
from lily.testing import scripted

QUESTION = [{"role": "user", "content": "2+2?"}]


def long_model():
    return scripted("many words " * 10, repeat=True)


def test_the_answers_are_those_of_the_other_calls():
    async def all_three():
        model = scripted("Two and two.\n</think>\n\nIt is 4.")
        chunks = [chunk async for chunk in model.astream("2+2?")]
        answer = await model.agenerate("2+2?")
        deltas = [delta async for delta in model.astream_chat(QUESTION)]
        return chunks, answer, deltas

    chunks, answer, deltas = asyncio.run(all_three())
    same = scripted("Two and two.\n</think>\n\nIt is 4.")
    assert "".join(chunk.text for chunk in chunks) == answer.text == same.generate("2+2?").text
    assert answer.usage == same.generate("2+2?").usage and chunks[-1].finish_reason == "stop"
    message = same.chat(QUESTION)
    assert (
        (deltas[-1].message.content, deltas[-1].message.reasoning) == (message.content, message.reasoning) == ("It is 4.", "Two and two.")
    )


def test_wrong_arguments_raise_where_they_are_given():
    model = scripted("x")
    with pytest.raises(TypeError, match="unknown option"):
        model.astream("x", temprature=1)
    with pytest.raises(lily.MessageError):
        model.astream_chat([{"role": "narrator", "content": "x"}])


def test_requests_run_side_by_side_on_a_real_model():
    async def together(model):
        return await asyncio.gather(
            *(model.agenerate(text, max_tokens=6, temperature=0) for text in ("The cat", "Once upon a time", "The cat"))
        )

    with lily.Model.demo(progress=False) as model:
        answers = asyncio.run(together(model))
        alone = [model.generate(text, max_tokens=6, temperature=0) for text in ("The cat", "Once upon a time", "The cat")]
    assert [a.tokens for a in answers] == [a.tokens for a in alone]


def test_leaving_the_loop_stops_the_device():
    async def leave(model):
        stream = model.astream_chat(QUESTION)
        async for _ in stream:
            break
        await stream.aclose()

    model = long_model()
    asyncio.run(leave(model))
    assert model._native.in_flight == 0 and len(model.sessions) == 1


@pytest.mark.parametrize("call", ["astream", "agenerate", "astream_chat"])
def test_cancelling_the_task_stops_the_device(call):
    async def cancel(model):
        async def run():
            if call == "agenerate":
                await model.agenerate("x", max_tokens=4000)
            else:
                async for _ in getattr(model, call)("x" if call == "astream" else QUESTION):
                    pass

        task = asyncio.create_task(run())
        while not model._native.in_flight and not task.done():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    model = long_model()
    asyncio.run(cancel(model))
    assert model._native.in_flight == 0
    assert model.generate("x", max_tokens=2).usage.generated_tokens == 2


def test_cancelling_ends_the_reading_of_a_prompt_and_keeps_what_was_read():
    question = [{"role": "user", "content": "shelf jars " * 500}]
    begun = threading.Event()

    def slow(stage, done, total):
        begun.set()
        time.sleep(0.01)

    async def cancel(model):
        async def run():
            async for _ in model.astream_chat(question, progress=slow):
                pass

        task = asyncio.create_task(run())
        assert await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    model = long_model()
    asyncio.run(cancel(model))
    kept = len(model.sessions._newest())
    total = model.chat(question, max_tokens=0).usage
    assert 0 < kept < total.prompt_tokens and total.reused_tokens == kept


def test_the_event_loop_stays_free():
    def slow(cancel):
        for i in range(5):
            time.sleep(0.02)
            yield i

    async def count():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.002)

        ticking = asyncio.create_task(tick())
        items = [item async for item in pulled(slow)]
        ticking.cancel()
        return items, ticks

    items, ticks = asyncio.run(count())
    assert items == [0, 1, 2, 3, 4] and ticks > 5


def test_errors_come_through():
    def broken(cancel):
        yield 1
        raise lily.GPUError("no", stage="x")

    async def run():
        return [item async for item in pulled(broken)]

    with pytest.raises(lily.GPUError, match="no"):
        asyncio.run(run())
