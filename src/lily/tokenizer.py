"""Text to ids and back, from tokenizer.json alone; byte-exact, whole characters only while streaming."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lily.config import read_json
from lily.errors import CheckpointError

# The end of a chat turn in every Qwen template, whatever the configuration lists.
_TURN_END = "<|im_end|>"


class Tokenizer:
    """The byte-level BPE tokenizer of a checkpoint.

    `eos_token` is the tokenizer's own end token, as text or None. Special tokens are those that tokenizer.json marks
    so: `<|im_end|>` is one, `<think>` and `<tool_call>` are not.

    >>> import lily
    >>> tokenizer = lily.Model.demo().tokenizer
    >>> tokenizer.decode(tokenizer.encode("Zürich 🙂"))
    'Zürich 🙂'
    """

    def __init__(self, backend: Any, config: Mapping[str, Any] | None = None) -> None:
        if "ByteLevel" not in str(backend.decoder):
            raise CheckpointError("tokenizer.json: expected a byte-level decoder", found=str(backend.decoder)[:80])
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.backend = backend
        self.config = dict(config or {})
        self.eos_token = token_text(self.config.get("eos_token"))
        self._literal = {token: entry.content.encode() for token, entry in added.items()}
        self._special = {token for token, entry in added.items() if entry.special}
        self._bytes: dict[int, bytes] = {}
        self._size = max([backend.get_vocab_size(with_added_tokens=True) - 1, *self._literal], default=-1) + 1

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and, when it is there, tokenizer_config.json. Raises `CheckpointError`."""
        import tokenizers

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; Lily needs the tokenizer in this form", expected="tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception, or a panic that is none
            raise CheckpointError(f"{path}: cannot be read as a tokenizer ({error})") from error
        extra = directory / "tokenizer_config.json"
        return cls(backend, read_json(extra) if extra.is_file() else None)

    def __len__(self) -> int:
        """One more than the largest id that has a string; the model's vocabulary may be larger."""
        return self._size

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, eos_token={self.eos_token!r})"

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids; nothing is added around it."""
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}, expected str")
        text.encode()  # a lone surrogate is a UnicodeEncodeError (a ValueError) here, with its position
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Ids without a string print nothing, bytes that are no UTF-8 print U+FFFD."""
        skip = self._special if skip_special_tokens else ()
        return b"".join(self.token_bytes(int(i)) for i in ids if int(i) not in skip).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for an id without a string."""
        if token in self._literal:
            return self._literal[token]
        known = self._bytes.get(token)
        if known is None:
            if token < 0:
                raise ValueError(f"token id {token} is negative")
            known = self._bytes[token] = _to_bytes(self.backend.id_to_token(token) if token < self._size else None)
        return known

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's string, such as `"<|im_end|>"`, or None."""
        return self.backend.token_to_id(token)

    def is_special(self, token: int) -> bool:
        """Whether the token is marked special, and so left out of generated text."""
        return token in self._special

    def end_tokens(self, *sources: Mapping[str, Any]) -> frozenset[int]:
        """The ids that end an answer: each source's `eos_token_id`, the tokenizer's own, the end of a chat turn."""
        ends = {end for source in sources for end in _eos_ids(source)}
        for text in (self.eos_token, _TURN_END):
            token = self.token_to_id(text) if text is not None else None
            if token is not None:
                ends.add(token)
        return frozenset(ends)


class Detokenizer:
    """Turns tokens into text one at a time, emitting whole characters only.

    >>> import lily
    >>> from lily.tokenizer import Detokenizer
    >>> tokenizer = lily.Model.demo().tokenizer
    >>> stream = Detokenizer(tokenizer)
    >>> "".join(stream.push(token) for token in tokenizer.encode("日本 🦜")) + stream.finish()
    '日本 🦜'
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Judges completeness from the bytes, so an invalid byte is passed on at once as U+FFFD and holds nothing up.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this token completes; often none."""
        if self._skip and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


def token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json, written as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(source: Mapping[str, Any]) -> list[int]:
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            what = f"eos_token_id is {str(value)[:80]}, expected an id or a list of ids"
            raise CheckpointError(what, found=value, tensor="eos_token_id")
    return ids


def _byte_table() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_table()


def _to_bytes(token: str | None) -> bytes:
    if token is None:
        return b""
    values = [_BYTES.get(char) for char in token]
    return token.encode() if None in values else bytes(values)  # type: ignore[arg-type]
