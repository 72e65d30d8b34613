"""Answers in a given form, as token masks: one of several texts, or JSON by llguidance (the extra `structured`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lily.errors import MessageError

if TYPE_CHECKING:
    import numpy as np

    from lily.model import Model

    Mask = Callable[[list[int]], np.ndarray[Any, Any]]

_THINK_END = "</think>"
_AFTER_THOUGHTS = "\n\n"


def both(first: Mask | None, second: Mask | None) -> Mask | None:
    """The tokens that both masks allow."""
    if first is None or second is None:
        return first or second
    return lambda ids: first(ids) & second(ids)


def choice_mask(texts: Sequence[str], model: Model) -> Mask:
    """Begin with one of `texts`, then go on freely."""
    paths = [model.encode(text) for text in texts]
    return lambda ids: _along(paths, ids, model.config.vocab_size)


def format_mask(response_format: Any, model: Model, *, thinking: bool, calls: Sequence[str] = ()) -> Mask | None:
    """The mask of an OpenAI `response_format`; with `thinking` it begins where the thoughts end.

    `calls` are the texts with which a call of a tool may begin in the place of the JSON.
    """
    schema = _schema(response_format)
    return None if schema is None else _JsonMask(schema, model, thinking, [model.encode(text) for text in calls])


def _schema(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(f"response_format is {type(given).__name__}, expected an object such as {{'type': 'json_object'}}")
    kind = given.get("type")
    _only_keys(given, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise MessageError(f"is {kind!r}, expected 'text', 'json_object' or 'json_schema'", path="response_format.type")
    outer = given.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, Mapping) else None
    if not isinstance(outer, Mapping) or not isinstance(schema, Mapping):
        raise MessageError("is missing, expected a JSON schema", path="response_format.json_schema.schema")
    _only_keys(outer, ("name", "description", "schema", "strict"), "response_format.json_schema")
    return dict(schema)


def _only_keys(given: Mapping[str, Any], keys: Sequence[str], path: str) -> None:
    for key, value in given.items():
        if key not in keys and value is not None:
            raise MessageError(f"is unknown here, expected {' and '.join(keys)}", path=f"{path}.{key}")


class _JsonMask:
    """Free until the thoughts are closed, then the blank line of the template, then the grammar, or a call and what follows it."""

    def __init__(self, schema: dict[str, Any], model: Model, thinking: bool, calls: list[list[int]]) -> None:
        self._library = _llguidance()
        self._size = model.config.vocab_size
        self._model = model
        # Without a word about it the grammar allows white space anywhere, and small models get lost in it.
        spaced = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
        grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps(spaced | schema))
        problem = self._library.LLMatcher.validate_grammar(grammar, _tokens(model, self._library))
        if problem:
            raise MessageError(f"cannot be used: {problem}", path="response_format.json_schema.schema")
        self._matcher = self._library.LLMatcher(_tokens(model, self._library), grammar)
        self._forced = model.encode(_AFTER_THOUGHTS) if thinking else []
        self._open = thinking
        self._text = b""
        self._seen = 0
        self._behind = 0  # tokens behind the thoughts
        self._calls = calls
        self._answer: list[int] = []  # behind the blank line; no JSON begins like a call, so the first token decides

    def __call__(self, ids: list[int]) -> np.ndarray[Any, Any]:
        for token in ids[self._seen :]:
            self._take(token)
        self._seen = len(ids)
        if self._open:
            return _all(self._size)
        if self._behind < len(self._forced):
            return _only({self._forced[self._behind]}, self._size)
        if self._calling:
            return _along(self._calls, self._answer, self._size)
        import numpy as np

        words = np.zeros((1, -(-self._size // 32)), np.int32)
        self._library.numpy.fill_next_token_bitmask(self._matcher, words)
        allowed = words[0].view(np.uint32)
        if not self._answer:
            allowed = allowed | _only({path[0] for path in self._calls}, self._size)
        return _only(self._model.end_tokens, self._size) if self._matcher.is_stopped() else allowed

    @property
    def _calling(self) -> bool:
        return any(self._answer[:1] == path[:1] for path in self._calls)

    def _take(self, token: int) -> None:
        if self._open:
            self._text = (self._text + self._model.tokenizer.token_bytes(token))[-2 * len(_THINK_END) :]
            self._open = _THINK_END.encode() not in self._text
        elif self._behind < len(self._forced):
            self._behind += 1
        elif token not in self._model.end_tokens:
            self._answer.append(token)
            if not self._calling:
                self._matcher.consume_token(token)


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.numpy
    except ImportError as error:
        raise ImportError("response_format needs llguidance: pip install 'lily-inference[structured]'") from error
    return llguidance


def _tokens(model: Model, library: Any) -> Any:
    """The model's vocabulary in the library's form, made once."""
    known = model._grammar_tokens
    if known is None:
        ends = sorted(model.end_tokens)
        known = model._grammar_tokens = library.LLTokenizer(model.tokenizer.backend.to_str(), model.config.vocab_size, ends)
    return known


def _along(paths: Sequence[list[int]], ids: list[int], size: int) -> np.ndarray[Any, Any]:
    """The tokens that go on along one of the paths; all of them behind the end of a path."""
    going_on = {path[len(ids)] for path in paths if path[: len(ids)] == ids and len(path) > len(ids)}
    return _only(going_on, size) if going_on else _all(size)


def _all(size: int) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.full(-(-size // 32), 0xFFFFFFFF, np.uint32)


def _only(ids: Any, size: int) -> np.ndarray[Any, Any]:
    import numpy as np

    words = np.zeros(-(-size // 32), np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words
