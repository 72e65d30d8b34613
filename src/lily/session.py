"""A session: tokens that a model has read or generated, ready to go on from."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lily.generation import Run, collect
from lily.progress import Progress, reporting
from lily.request import takes_options
from lily.results import Chunk, Generation, Reuse, Rewind

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from lily.model import Model
    from lily.prompts import Prompt
    from lily.request import Options, Request


class Session:
    """What a model has read and generated so far. Made by `Model.session()` or `Model.prefill()`.

    Results depend on the tokens and on which were read and which generated, never on how the text was cut into appends.
    One request runs on a session at a time; a second raises `ValueError`. Sessions of one model may run side by side.

    >>> import lily
    >>> model = lily.Model.demo()
    >>> session = model.session()
    >>> session.append("Once upon a time")
    >>> a, b = session.fork(), session.fork()
    >>> a.generate(max_tokens=8, temperature=0).tokens == b.generate(max_tokens=8, temperature=0).tokens
    True
    """

    def __init__(self, model: Model, native: Any) -> None:
        self._model = model
        self._native = native
        self._report = Reuse(native.length, 0)
        model._sessions.add(self)

    def append(self, prompt: Prompt, *, progress: Progress = None) -> None:
        """Read text or token ids, in chunks.

        Raises `ContextOverflowError` before any work when they do not fit, `ValueError` for bad ids or an empty prompt.
        Ctrl-C keeps the whole chunks already read.

        >>> import lily
        >>> session = lily.Model.demo().session()
        >>> session.append([1, 2, 3])
        >>> session.tokens
        [1, 2, 3]
        """
        ids = self._model._ids(prompt)
        with reporting(progress) as report, self._reporting(len(self)):
            self._native.append(ids, report)

    @takes_options
    def generate(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Generation:
        """Read `prompt` (None: go on from here), then generate to the end. The options are those of `Model.generate`.

        >>> import lily
        >>> session = lily.Model.demo().prefill("Tom had a red ball.")
        >>> session.generate(" Tom", max_tokens=4, temperature=0).usage.reused_tokens > 0
        True
        """
        request = self._model._request(options)
        return collect(self._chunks(prompt, request), request)

    @takes_options
    def stream(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Iterator[Chunk]:
        """Like `generate`, as chunks. Closing the iterator, or Ctrl-C, stops the device and keeps what was generated.

        >>> import lily
        >>> session = lily.Model.demo().session()
        >>> for chunk in session.stream("Once upon", max_tokens=3, temperature=0):
        ...     piece = chunk.text
        >>> chunk.finish_reason
        'length'
        """
        return self._chunks(prompt, self._model._request(options))

    def _chunks(self, prompt: Prompt | None, request: Request) -> Generator[Chunk, None, None]:
        ids = None if prompt is None else self._model._ids(prompt)
        if ids is None and self._native.length == 0:
            raise ValueError("the session is empty, give a prompt to start from")
        return self._reported(Run(self._model, self._native, ids, request))

    def _reported(self, run: Run) -> Generator[Chunk, None, None]:
        before = len(self)
        with closing(run.chunks()) as chunks:
            try:
                yield from chunks
            finally:
                self._report = Reuse(before, run.read_tokens)

    @contextmanager
    def _reporting(self, before: int) -> Iterator[None]:
        """Whatever was read, also when the reading was cut short, is in the report."""
        try:
            yield
        finally:
            with suppress(ValueError):  # closed meanwhile
                self._report = Reuse(before, len(self) - before)

    def report(self) -> Reuse:
        """What the last request on this session reused and read, in tokens; a rewind counts what it computed again as read.

        The report of a chat request is in its answer (`Message.reuse`), with the first token and message that differed.

        >>> import lily
        >>> session = lily.Model.demo().prefill([5, 6, 7])
        >>> session.append([8, 9])
        >>> session.report()
        Reuse(reused=3, read=2, differs_at=None, message=None)
        """
        return self._report

    def logits(self) -> np.ndarray[Any, Any]:
        """Raw logits of the next token, float32 `[vocab]`. Raises `ValueError` when the session is empty.

        >>> import lily
        >>> lily.Model.demo().prefill("The").logits().shape
        (6144,)
        """
        return self._native.logits()

    @property
    def tokens(self) -> list[int]:
        """Every token, read or generated, in order.

        >>> import lily
        >>> len(lily.Model.demo().session().tokens)
        0
        """
        return self._native.tokens.tolist()

    @property
    def origins(self) -> np.ndarray[Any, Any]:
        """uint8 `[n]`: 0 for a token that was read, 1 for one that was generated.

        >>> import lily
        >>> lily.Model.demo().prefill([5, 6]).origins.tolist()
        [0, 0]
        """
        return self._native.origins

    @property
    def nbytes(self) -> int:
        """Bytes of state that this session holds or shares.

        >>> import lily
        >>> lily.Model.demo().prefill("The").nbytes > 0
        True
        """
        return self._native.nbytes

    def rewind(self, n: int, *, progress: Progress = None) -> Rewind:
        """Go back to the first `n` tokens.

        The recurrent layers cannot be cut back, so the newest snapshot at or before `n` is restored (one is kept every 1,024
        tokens that were read, fewer further back, and at the end of each prompt) and the rest is computed again as it was: read
        tokens are read, generated ones are decoded. The result equals, bit for bit, a session that never went further.
        On an error or Ctrl-C the session stays as it was. Raises `ValueError` when `n` is not between 0 and the length.

        >>> import lily
        >>> session = lily.Model.demo().prefill("The")
        >>> before = len(session)
        >>> _ = session.generate(max_tokens=4)
        >>> _ = session.rewind(before)
        >>> len(session) == before
        True
        """
        if not 0 <= n <= len(self):
            raise ValueError(f"rewind({n}) on a session of {len(self)} tokens, expected 0 to {len(self)}")
        with reporting(progress) as report:
            result = Rewind(*self._native.rewind(n, report))
        self._report = Reuse(result.kept, result.reread)
        return result

    def fork(self) -> Session:
        """A second session with the same past; nothing is copied.

        >>> import lily
        >>> session = lily.Model.demo().prefill("The")
        >>> session.fork().tokens == session.tokens
        True
        """
        return Session(self._model, self._native.fork())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session to one safetensors file, atomically: an older file of that name survives any failure.

        The file is bound to this checkpoint, device and arithmetic; `Session.load` refuses it elsewhere.

        >>> import lily, pathlib, tempfile
        >>> model = lily.Model.demo()
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "story.lily"
        >>> model.prefill("Once upon a time").save(path)
        >>> lily.Session.load(model, path).tokens == model.encode("Once upon a time")
        True
        """
        from lily import session_file

        session_file.save(self._model, self._native, path)

    @classmethod
    def load(cls, model: Model, path: str | os.PathLike[str]) -> Session:
        """A session from a file that `save` wrote. It goes on exactly as the saved one would have.

        Raises `SessionMismatchError`, naming the field, when another checkpoint, device or arithmetic computed it, or when
        the file is cut or altered; `OSError` when it cannot be read; `OutOfMemoryError`.

        >>> import lily, pathlib, tempfile
        >>> model = lily.Model.demo()
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "story.lily"
        >>> model.prefill("The cat").save(path)
        >>> len(lily.Session.load(model, path)) > 0
        True
        """
        from lily import session_file

        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: no such saved session")
        return cls(model, session_file.load(model, path))

    def close(self) -> None:
        """Give the session's memory back; forks keep what they share. Later calls raise `ValueError`.

        >>> import lily
        >>> lily.Model.demo().session().close()
        """
        self._native.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._native.length

    def __repr__(self) -> str:
        try:
            return f"Session({len(self)} tokens, {self.nbytes / (1 << 20):.1f} MiB)"
        except ValueError:
            return "Session(closed)"
