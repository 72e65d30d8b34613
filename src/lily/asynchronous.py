"""`async` forms of generate, stream and chat: the work runs in threads, the event loop stays free."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from lily.chat_options import ChatOptions, takes_chat_options
from lily.errors import CancelledError
from lily.generation import collect
from lily.request import takes_options
from lily.results import Chunk, Generation, MessageDelta

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lily.progress import Report
    from lily.prompts import Prompt
    from lily.request import Options

T = TypeVar("T")
_END: Any = object()


class AsyncMethods:
    """What `Model` offers to programs with an event loop."""

    @takes_options
    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[Chunk]:
        """`stream` for `async for`. Leaving the loop with `aclose`, or cancelling the task, stops the device.

        >>> import asyncio, lily
        >>> async def tokens():
        ...     return [chunk.tokens async for chunk in lily.Model.demo().astream("Once", max_tokens=3, temperature=0)]
        >>> len(asyncio.run(tokens()))
        3
        """
        ids, request = self._ids(prompt), self._request(options)  # type: ignore[attr-defined]
        return pulled(lambda cancel: self._stream(ids, request, cancel))  # type: ignore[attr-defined]

    @takes_options
    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """`generate` for `await`, of one prompt. Cancelling the task stops the device.

        >>> import asyncio, lily
        >>> asyncio.run(lily.Model.demo().agenerate("The cat", max_tokens=4)).usage.generated_tokens
        4
        """
        ids, request = self._ids(prompt), self._request(options)  # type: ignore[attr-defined]
        async with aclosing(pulled(lambda cancel: self._stream(ids, request, cancel))) as stream:  # type: ignore[attr-defined]
            chunks = [chunk async for chunk in stream]
        return collect((chunk for chunk in chunks), request)

    @takes_chat_options
    def astream_chat(self, messages: Sequence[Any], **options: Unpack[ChatOptions]) -> AsyncIterator[MessageDelta]:
        """`stream_chat` for `async for`. Cancelling the task stops the device; what was read is kept.

        >>> import asyncio, lily
        >>> async def answer():
        ...     question = [{"role": "user", "content": "What is a young dog called?"}]
        ...     async for delta in lily.Model.demo().astream_chat(question, thinking=False, temperature=0):
        ...         pass
        ...     return delta.message.content
        >>> asyncio.run(answer())
        'A young dog is called a puppy.'
        """
        from lily.chat import _Chat

        request = _Chat(self, messages, options)  # type: ignore[arg-type]
        return pulled(request.deltas)


async def pulled(start: Callable[[Report], Generator[T, None, None]]) -> Any:
    """The items of a generator, each made in a thread. `start` gets a progress function that raises once this is left.

    The generator is closed before this returns, also when it was cancelled in the middle of an item.
    """
    import asyncio  # here: it takes a fifth of the time that importing lily.model takes

    left = threading.Event()
    running = threading.Lock()  # a generator cannot be closed while it runs

    def cancel(stage: str, done: int, total: int) -> None:
        if left.is_set():
            raise CancelledError(f"cancelled after {done} of {total} tokens of the prompt")

    items = start(cancel)

    def pull() -> Any:
        with running:
            return _END if left.is_set() else next(items, _END)

    def close() -> None:
        left.set()
        with running:
            items.close()

    try:
        while (item := await asyncio.to_thread(pull)) is not _END:
            yield item
    finally:
        left.set()
        await asyncio.shield(asyncio.to_thread(close))
