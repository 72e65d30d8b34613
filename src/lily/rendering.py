"""A conversation as prompt text and token ids, with the places between its turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lily.errors import TemplateError
from lily.messages import Conversation

if TYPE_CHECKING:
    from lily.template import ChatTemplate
    from lily.tokenizer import Tokenizer

_TURN = "<|im_start|>"
# A user turn that stands where no message is: it ends a prefix that alone would be no conversation, and is cut out again.
_STAND_IN = "lily-stand-in-7c4b1e90"
_STAND_IN_HEAD, _STAND_IN_END = f"{_TURN}user\n", "<|im_end|>\n"
_TURNS_MARKED = 8  # as many as a session keeps states of


class Rendering:
    """The prompt of one request: `text`, its token `ids`, and where its turns begin."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        conversation: Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        forced: str = "",
    ) -> None:
        self._template = template
        self._conversation = conversation
        self._messages = conversation.messages
        self._tools = tools or None
        self._variables = dict(variables or {})
        prompt = self._render(self._messages, add_generation_prompt=True)
        #: Whether the answer begins inside the thoughts.
        self.thinking = prompt.rstrip().endswith("<think>")
        if self.thinking and forced:
            raise TemplateError("this template cannot leave the thoughts out, so a call of a tool cannot be required")
        self.text = prompt + forced
        self.text.encode()  # a lone surrogate is a UnicodeEncodeError (a ValueError) here, with its position
        encoding = tokenizer.backend.encode(self.text, add_special_tokens=False)
        self.ids: list[int] = list(encoding.ids)
        self._starts = [start for start, _ in encoding.offsets]

    def marks(self) -> list[int]:
        """Token counts after which a later request may go on: behind system text and tools, before the last user message,
        before each of the newest assistant turns and before the answer. Ascending, each verified to be a prefix."""
        messages = self._messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-_TURNS_MARKED:]
        places = {self._head(), len(messages), *turns}
        if self._last_user() >= 0:
            places.add(self._last_user())
        found = {self._boundary(place) for place in places}
        return sorted(mark for mark in found if mark is not None and mark > 0)

    def message_at(self, token: int) -> int | None:
        """The index in the caller's list of the message that holds a token; None for the tools and the generation prompt."""
        if token >= len(self._starts):
            return None
        turn = self.text.count(_TURN, 0, self._starts[token] + len(_TURN)) - 1
        messages, places = self._messages, self._conversation.places
        owners: list[int | None] = [] if self._head() or not self._tools else [None]
        for i, message in enumerate(messages):
            if i == 0 or message["role"] != "tool" or messages[i - 1]["role"] != "tool":
                owners.append(places[i])
        return owners[turn] if 0 <= turn < len(owners) else None

    def _head(self) -> int:
        return 1 if self._messages and self._messages[0]["role"] == "system" else 0

    def _last_user(self) -> int:
        return max((i for i, message in enumerate(self._messages) if message["role"] == "user"), default=-1)

    def _boundary(self, place: int) -> int | None:
        """The number of tokens before message `place`, or None where the shorter list is no prefix of the prompt."""
        try:
            if place <= max(self._last_user(), self._head()):
                # Up to the last user message a template may render turns differently, so a user message must follow here too.
                text = self._render([*self._messages[:place], {"role": "user", "content": _STAND_IN}])
                text = text[: self._stand_in(text)[0]]
            else:
                text = self._render(self._messages[:place])
        except TemplateError:
            return None
        if not self.text.startswith(text):
            return None
        token = bisect_left(self._starts, len(text))
        return token if token < len(self._starts) and self._starts[token] == len(text) else None

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        options = self._variables | {"tools": self._tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages, **options)
        except TemplateError:
            # Templates of this family refuse a list without a user message, such as one that a client has trimmed.
            if not any(message["role"] in ("assistant", "tool") for message in messages):
                raise
            if any(message["role"] == "user" and not _is_tool_response(message["content"]) for message in messages):
                raise
            head = 1 if messages[0]["role"] == "system" else 0
            text = self._template.render([*messages[:head], {"role": "user", "content": _STAND_IN}, *messages[head:]], **options)
        start, end = self._stand_in(text)
        return text[:start] + text[end:]

    def _stand_in(self, text: str) -> tuple[int, int]:
        """Where the stand-in's turn begins and ends."""
        turn = _STAND_IN_HEAD + _STAND_IN + _STAND_IN_END
        if text.count(_STAND_IN) != 1 or turn not in text:
            raise TemplateError("the chat template refused a conversation without a user message")
        start = text.index(turn)
        return start, start + len(turn)


def _is_tool_response(content: str) -> bool:
    text = content.strip()
    return text.startswith("<tool_response>") and text.endswith("</tool_response>")
