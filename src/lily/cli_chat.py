"""`lily chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lily.errors import LilyError
from lily.results import Message
from lily.session import Session

if TYPE_CHECKING:
    from lily.model import Model

HELP = "/reset begins anew, /save FILE and /load FILE keep a conversation, /exit ends; Ctrl-C stops an answer."
_HISTORY_LINES = 1000
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Talk:
    """The messages so far, and how answers are made."""

    def __init__(self, model: Model, system: str | None, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = dict(options)
        self._begin: list[Any] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._begin)

    def run(self) -> None:
        """Until /exit or the end of the input."""
        remember = _line_editing() if sys.stdin.isatty() else None
        if remember is not None:
            _say(HELP)
        while (line := _line()) is not None:
            if remember is not None:
                remember()
            try:
                if line.startswith("/"):
                    if not self.command(*line.split(None, 1)):
                        return
                elif line.strip():
                    self.answer(line)
            except (LilyError, ValueError, OSError) as error:
                _say(f"Error: {' '.join(str(error).split())}")

    def answer(self, line: str) -> None:
        """Ask, and print the answer as it comes. An answer that was stopped stays as far as it came."""
        messages = [*self.messages, {"role": "user", "content": line}]
        content, delta, dim = "", None, False
        try:
            with closing(self._model.stream_chat(messages, **self._options)) as deltas:  # type: ignore[type-var]
                for delta in deltas:
                    dim = _show(delta.reasoning, delta.content, dim)
                    content += delta.content
        except KeyboardInterrupt:
            click.echo(_PLAIN if dim else "")
            _say("stopped")
            if content:
                self.messages = [*messages, {"role": "assistant", "content": content}]
            return
        click.echo(_PLAIN if dim else "")
        if delta is not None and delta.message is not None:
            self.messages = [*messages, delta.message.to_message()]
            _say(status(delta.message))

    def command(self, name: str, argument: str = "") -> bool:
        """One line that begins with a slash; False ends the conversation."""
        argument = argument.strip()
        if name == "/exit":
            return False
        if name == "/reset":
            self.messages = list(self._begin)
        elif name in ("/save", "/load") and argument:
            self.save(Path(argument).expanduser()) if name == "/save" else self.load(Path(argument).expanduser())
        else:
            _say(HELP)
        return True

    def save(self, path: Path) -> None:
        """The messages as JSON and, beside them, the session, so that nothing is read again."""
        temporary = path.with_name(f".{path.name}.part")
        try:
            temporary.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        newest = self._model.sessions._newest()
        if newest is not None:
            newest.save(_session_path(path))
        _say(f"saved {len(self.messages)} messages to {path}")

    def load(self, path: Path) -> None:
        """Messages that `save` wrote; a session of another model is left out, its text is read again."""
        found = json.loads(path.read_text(encoding="utf-8"))
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list):
            raise ValueError(f"{path} holds no conversation")
        if _session_path(path).is_file():
            try:
                self._model.sessions._put(Session.load(self._model, _session_path(path))._native)
            except LilyError as error:
                _say(f"The saved session cannot be used: {error}")
        self.messages = messages
        _say(f"loaded {len(messages)} messages from {path}")


def status(message: Message) -> str:
    """One line about an answer."""
    usage, timing = message.usage, message.timing
    return (
        f"{usage.generated_tokens} tokens at {timing.decode_tokens_per_second:.1f}/s, "
        f"read {timing.read_tokens}, reused {usage.reused_tokens} ({message.finish_reason})"
    )


def _show(reasoning: str, content: str, dim: bool) -> bool:
    """Print a piece; thoughts only on a terminal, dimmed. Returns whether the terminal is dimmed now."""
    if reasoning and sys.stdout.isatty():
        click.echo(("" if dim else _DIM) + reasoning, nl=False)
        dim = True
    if content:
        click.echo((_PLAIN + "\n\n" if dim else "") + content, nl=False)
        dim = False
    sys.stdout.flush()
    return dim


def history_path() -> Path:
    """Where the lines of earlier talks are kept."""
    from platformdirs import user_state_path

    return user_state_path("lily-inference", appauthor=False) / "chat_history"


def _line_editing() -> Callable[[], None]:
    """Editing and the lines of earlier talks, where Python has readline. Returns what keeps the newest line."""
    try:
        import readline
    except ImportError:
        return lambda: None
    path = history_path()
    # A history that cannot be read or written is no reason not to talk.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    known = readline.get_current_history_length()

    def remember() -> None:
        nonlocal known
        if readline.get_current_history_length() > known:  # an empty line is none
            known = readline.get_current_history_length()
            with suppress(OSError):
                readline.write_history_file(path)

    return remember


def _line() -> str | None:
    """The next line; Ctrl-C forgets what was typed, the end of the input is None."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo(err=True)


def _session_path(path: Path) -> Path:
    return path.with_name(path.name + ".lily")


def _say(text: str) -> None:
    click.echo(text, err=True)
