"""Chat: messages rendered by the checkpoint's template, read through the store, answers split as they arrive."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lily.chat_options import ChatOptions, check_variables, split_options, takes_chat_options, thinking_variables
from lily.errors import MessageError, TemplateError
from lily.generation import Run
from lily.messages import normalise
from lily.progress import reporting
from lily.reasoning import Pieces, ReplyParser
from lily.rendering import Rendering
from lily.request import Request
from lily.results import Chunk, Message, MessageDelta, TokenLogprob
from lily.store import Lease, Reuse, SessionStore
from lily.structured import both, choice_mask, format_mask
from lily.tools import chosen, declared, forced_choices, forced_opening

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lily.model import Model
    from lily.progress import Report


class ChatMethods:
    """What `Model` offers for conversations."""

    _store: SessionStore | None = None
    _grammar_tokens: Any = None  # the vocabulary as llguidance has it

    @property
    def sessions(self) -> SessionStore:
        """The store of sessions that `chat` goes on from.

        >>> import lily
        >>> len(lily.Model.demo().sessions)
        0
        """
        if self._store is None:
            self._store = SessionStore(self)  # type: ignore[arg-type]
        return self._store

    @takes_chat_options
    def chat(self, messages: Sequence[Any], **options: Unpack[ChatOptions]) -> Message:
        """The answer to a conversation. What was read for an earlier call is not read again.

        - `messages`: objects with `role` (system, developer, user, assistant, tool) and `content`, in OpenAI's form;
          earlier answers may stand among them as they were returned.
        - `tools`: Python functions (declared by signature and docstring) or OpenAI objects. Calls are returned, not run.
        - `tool_choice`: "auto"; "none" neither shows the tools nor looks for calls; "required", or a tool's name (or
          OpenAI's object), makes the answer begin with a call, without thoughts.
        - `parallel_tool_calls`: False ends the answer behind its first call.
        - `thinking`: False leaves the thoughts out; `enable_thinking`, `reasoning_effort` ("none", "minimal", ...) and
          `chat_template_kwargs`, which wins, say the same. None: as the template has it.
        - `response_format`: `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {"schema": ...}}`; the
          content, behind the thoughts, is then such JSON, or with tools the answer begins with a call instead. Needs
          `lily-inference[structured]`.
        - `reuse_generated`: False reads earlier answers again instead of going on from their generated tokens; the result
          equals a run without any store in every bit.
        - `drop_volatile`: drop known header lines of clients that change with every request from the system text.
        - `chat_template_kwargs`: other variables of the template; one that it does not read is refused.
        - `progress` and the options of `generate`. Stop strings act on the whole text, thoughts included.

        Raises `MessageError` with the place of what cannot be used, `TemplateError`, and what `generate` raises.

        >>> import lily
        >>> def get_weather(city: str):
        ...     "The weather of a city."
        >>> question = [{"role": "user", "content": "What is the weather in Oslo?"}]
        >>> reply = lily.Model.demo().chat(question, tools=[get_weather], temperature=0)
        >>> reply.tool_calls[0].name, reply.tool_calls[0].arguments, reply.finish_reason
        ('get_weather', {'city': 'Oslo'}, 'tool_calls')
        """
        message = None
        with closing(_Chat(self, messages, options).deltas()) as deltas:  # type: ignore[arg-type]
            for delta in deltas:
                message = delta.message
        assert message is not None
        return message

    @takes_chat_options
    def stream_chat(self, messages: Sequence[Any], **options: Unpack[ChatOptions]) -> Iterator[MessageDelta]:
        """Like `chat`, one delta for each token. Closing the iterator, or Ctrl-C, stops the device; what was read is kept.

        >>> import lily
        >>> question = [{"role": "user", "content": "What is a young dog called?"}]
        >>> for delta in lily.Model.demo().stream_chat(question, thinking=False, temperature=0):
        ...     print(delta.content, end="")
        A young dog is called a puppy.
        """
        return _Chat(self, messages, options).deltas()  # type: ignore[arg-type]


class _Chat:
    """One checked request."""

    def __init__(self, model: Model, messages: Sequence[Any], options: Mapping[str, Any]) -> None:
        if model.template is None:
            raise TemplateError(f"{model.source or 'this checkpoint'} has no chat template; use generate with a text")
        self._model = model
        given, rest = split_options(options)
        request = model._request(rest)
        conversation = normalise(messages, drop_volatile=given["drop_volatile"])
        self._tools, required = chosen(given["tool_choice"], declared(given["tools"]))
        variables = thinking_variables(given)
        check_variables(variables, model.template.variables)
        if required:
            if variables.setdefault("enable_thinking", False):
                raise MessageError("requires a call, which leaves no place for thoughts; leave thinking out", path="tool_choice")
        self._forced = forced_opening(required)
        self._rendering = Rendering(
            model.template, model.tokenizer, conversation,
            tools=[tool.declaration for tool in self._tools], variables=variables, forced=self._forced,
        )  # fmt: skip
        self._required = required
        self._format = given["response_format"]
        self._parallel = given["parallel_tool_calls"]
        if self._parallel not in (True, False):
            raise TypeError(f"parallel_tool_calls is {self._parallel!r}, expected True or False")
        self._open_request = request
        self._request = self.request()
        self._reuse_generated = bool(given["reuse_generated"])
        self._progress = given["progress"]

    def request(self, index: int = 0) -> Request:
        """The settings of answer number `index`: its own seed, and its own mask, which follows the text of one answer."""
        request = self._open_request
        names = [tool.name for tool in self._tools]
        calls = [forced_opening(names) + choice for choice in forced_choices(names, self._tools)]
        mask = format_mask(self._format, self._model, thinking=self._rendering.thinking, calls=calls)
        if self._required:  # leaves no place for content
            mask = choice_mask(forced_choices(self._required, self._tools), self._model)
        return replace(request.with_seed_of(index), token_mask=both(request.token_mask, mask))

    def deltas(self, cancel: Report | None = None) -> Generator[MessageDelta, None, None]:
        """The answer in pieces; `cancel` is a progress function that raises to end the reading of the prompt."""
        lease = self._model.sessions._lease(self._rendering, reuse_generated=self._reuse_generated)
        try:
            run = _ChatRun(self._model, lease, self._request)
            with (
                reporting(self._progress) as report,
                closing(run.chunks(_joined(report, cancel))) as chunks,
            ):
                yield from self.split(chunks, run, lease.reuse)
        finally:
            lease.keep()

    def split(self, chunks: Iterator[Chunk], run: Run, reuse: Reuse) -> Iterator[MessageDelta]:
        """The chunks of `run` as deltas."""
        parser = ReplyParser(self._tools, thinking=self._rendering.thinking)
        parser.push(self._forced)
        thoughts = 0
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for chunk in chunks:
            thinking = parser.thinking
            thoughts += len(chunk.tokens) if thinking else 0
            tokens += chunk.tokens
            logprobs += chunk.logprobs or []
            pieces = parser.push(chunk.text)
            if chunk.finish_reason is None:
                yield MessageDelta(
                    pieces.content, pieces.reasoning, pieces.calls, chunk.tokens, chunk.logprobs, thinking=thinking, order=pieces.order
                )
                if not self._parallel and parser.settled:
                    run.finish()
                continue
            pieces = _sum(pieces, parser.finish())
            assert chunk.usage is not None and chunk.timing is not None
            reason = "tool_calls" if chunk.finish_reason == "stop" and parser.calls else chunk.finish_reason
            message = Message(
                content=parser.content, reasoning=parser.reasoning or None, tool_calls=parser.calls, finish_reason=reason,
                usage=replace(chunk.usage, reasoning_tokens=thoughts), timing=chunk.timing, tokens=tokens,
                logprobs=logprobs if self._request.logprobs >= 0 else None, unfinished_call=parser.unfinished,
                reuse=reuse, sampling=run.request.sampling, stop_string=chunk.stop_string,
            )  # fmt: skip
            yield MessageDelta(
                pieces.content, pieces.reasoning, pieces.calls, chunk.tokens, chunk.logprobs,
                reason, message.usage, message.timing, message, thinking, pieces.order,
            )  # fmt: skip


class _ChatRun(Run):
    """A run whose prompt is read through the store."""

    def __init__(self, model: Model, lease: Lease, request: Request) -> None:
        super().__init__(model, lease.native, None, request)
        self._lease = lease

    def _read(self, report: Report | None) -> None:
        self._lease.read(report)


def _joined(report: Report | None, cancel: Report | None) -> Report | None:
    if report is None or cancel is None:
        return report or cancel

    def joined(stage: str, done: int, total: int) -> None:
        cancel(stage, done, total)
        report(stage, done, total)

    return joined


def _sum(first: Pieces, second: Pieces) -> Pieces:
    return Pieces(
        first.content + second.content, first.reasoning + second.reasoning, first.calls + second.calls, first.order + second.order
    )
