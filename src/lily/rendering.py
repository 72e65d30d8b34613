"""A conversation as prompt text and token ids, with the places between its turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lily.errors import TemplateError
from lily.messages import Conversation

if TYPE_CHECKING:
    from lily.template import ChatTemplate
    from lily.tokenizer import Tokenizer

_TURN = "<|im_start|>"
# A user turn that stands where no message is, for templates that refuse a conversation without one; it is cut out again.
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
        self.ids: list[int] = list(tokenizer.backend.encode(self.text, add_special_tokens=False).ids)
        start = tokenizer.backend.token_to_id(_TURN)
        self._turns = [] if start is None else [i for i, token in enumerate(self.ids) if token == start]
        # Templates put results of tools that follow each other in one turn, or in several. Where neither fits, as when a text spells
        # the mark of a turn, nothing is known about whose turn is whose.
        fitting = [owners for joined in (True, False) if len(owners := self._owners(joined)) + 1 == len(self._turns)]
        self._owned = fitting[0] if fitting else []

    def marks(self) -> list[int]:
        """Token counts after which a later request may go on: behind system text and tools, before the last user message,
        before each of the newest assistant turns and before the answer. Ascending.

        They are found among the ids of the prompt itself: a shorter list of messages may be rendered differently.
        """
        turns = self._turns
        if self._owned:
            messages = self._messages
            roles = [None if owner is None else messages[owner]["role"] for owner in self._owned]
            answers = [i for i, role in enumerate(roles) if role == "assistant"][-_TURNS_MARKED:]
            users = [i for i, role in enumerate(roles) if role == "user"][-1:]
            head = [1] if roles[0] in (None, "system") else []
            turns = [self._turns[i] for i in sorted({*head, *users, *answers, len(self._owned)})]
        elif len(turns) > _TURNS_MARKED:
            turns = [turns[1], *turns[1 - _TURNS_MARKED :]]
        return [mark for mark in turns if mark > 0]

    def message_at(self, token: int) -> int | None:
        """The index in the caller's list of the message that holds a token; None for the tools, the beginning of the answer,
        and where it is not known."""
        turn = bisect_right(self._turns, token) - 1
        owner = self._owned[turn] if 0 <= turn < len(self._owned) else None
        return None if owner is None else self._conversation.places[owner]

    def _owners(self, results_joined: bool) -> list[int | None]:
        """For each turn before the answer, the message that it begins with; None for a turn of tools alone."""
        messages = self._messages
        head = bool(messages) and messages[0]["role"] == "system"
        owners: list[int | None] = [None] if self._tools and not head else []
        for i, message in enumerate(messages):
            if not results_joined or i == 0 or message["role"] != "tool" or messages[i - 1]["role"] != "tool":
                owners.append(i)
        return owners

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
