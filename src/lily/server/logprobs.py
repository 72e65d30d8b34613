"""Log-probabilities in OpenAI's forms."""

from __future__ import annotations

from typing import Any

from lily.results import MessageDelta, TokenLogprob
from lily.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def bounded(logprob: float) -> float:
    """A number that JSON can hold."""
    return max(logprob, _LEAST)


class ContentLogprobs:
    """Those of the tokens that make up the content: not those of thoughts, of the markup of calls, and the end token.

    Tokens wait until the text that they belong to is known to be content; the entries' bytes join to it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[TokenLogprob] = []
        self._begun = False

    def add(self, delta: MessageDelta) -> list[dict[str, Any]]:
        """The entries of the content that `delta` completes."""
        if not delta.thinking:
            self._waiting += [entry for entry in delta.logprobs or [] if not self._tokenizer.is_special(entry.token)]
        if delta.content:
            if not self._begun:
                self._leave_out_blank()
            self._begun = True
            found, self._waiting = [self._entry(entry) for entry in self._waiting], []
            return found
        if delta.tool_calls:
            self._waiting = []
        return []

    def _leave_out_blank(self) -> None:
        """The white space between thoughts and content is in neither."""
        while len(self._waiting) > 1 and not self._tokenizer.token_bytes(self._waiting[0].token).strip():
            self._waiting.pop(0)

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": bounded(logprob), "bytes": list(raw)}
