"""`lily chat`: answers on stdout, everything else on stderr, and a conversation that can be stopped, saved and taken up again."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

import lily
from lily import cli
from lily.cli_chat import Talk
from lily.testing import scripted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(monkeypatch, capsys):
    def chat(text, *args, script="Two and two.\n</think>\n\nIt is 4.", model=None):
        model = model or scripted(script)
        monkeypatch.setattr(lily.Model, "demo", lambda **options: model)
        monkeypatch.setattr(model, "close", lambda: None)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as caught:
            cli.main(["chat", *args])
        assert caught.value.code == 0
        return capsys.readouterr()

    return chat


def test_answers_go_to_stdout_and_a_status_line_to_stderr(chat):
    out, err = chat("2+2?\n")
    assert out == "It is 4.\n"
    assert "tokens at" in err and "reused 0 (stop)" in err


def test_each_turn_goes_on_from_the_last(chat):
    out, err = chat("2+2?\n\nAnd 3+1?\n", "--no-thinking", script="It is 4.")
    assert out == "It is 4.\n" * 2
    assert "reused 0" in err.splitlines()[0] and "reused 0" not in err.splitlines()[1]


def test_reset_forgets_all_but_the_system_text():
    talk = Talk(scripted("Yes."), "Be brief.", {"thinking": False})
    talk.answer("Hello?")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    assert talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    assert not talk.command("/exit")


def test_an_unknown_command_and_an_error_do_not_end_the_talk(chat):
    out, err = chat("/foo\n/load /no/such/file\n/save\n2+2?\n/exit\nnever read\n")
    assert out == "It is 4.\n"
    assert err.count("/reset begins anew") == 2 and "No such file" in err


def test_a_saved_talk_goes_on_without_reading_it_again(chat, tmp_path, capsys):
    path = tmp_path / "talk.json"
    with lily.Model.demo(progress=False) as model:
        chat(f"What is a young dog called?\n/save {path}\n", "--no-thinking", "--temperature", "0", model=model)
        saved = json.loads(path.read_text())["messages"]
        assert [m["content"] for m in saved] == ["What is a young dog called?", "A young dog is called a puppy."]
        model.sessions.clear()
        out, err = chat(f"/load {path}\nWhat colour is the sky?\n", "--no-thinking", "--temperature", "0", model=model)
    assert "loaded 2 messages" in err and "reused 0" not in err and out.count("\n") == 1


def test_a_session_of_another_model_is_read_again(chat, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}))
    (tmp_path / "talk.json.lily").write_bytes(b"not a session")
    out, err = chat(f"/load {path}\nMore?\n", script="Good.\n</think>\n\nYes.")
    assert out == "Yes.\n" and "cannot be used" in err and "loaded 2 messages" in err


def test_a_file_that_holds_no_talk_is_refused(chat, tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert "holds no conversation" in chat(f"/load {path}\n").err


def test_ctrl_c_stops_the_answer_and_keeps_it(monkeypatch, capsys):
    model = scripted("many words " * 20, repeat=True)
    stream = model.stream_chat

    def interrupted(*args, **options):
        for i, delta in enumerate(stream(*args, **options)):
            if i == 4:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(model, "stream_chat", interrupted)
    talk = Talk(model, None, {"thinking": False})
    talk.answer("Go.")
    out, err = capsys.readouterr()
    assert out.strip() and "stopped" in err
    assert talk.messages[-1]["role"] == "assistant" and talk.messages[-1]["content"].startswith("many")
    assert model._native.in_flight == 0


def test_ctrl_c_at_the_prompt_forgets_the_line(monkeypatch):
    talk = Talk(scripted("x"), None, {})
    lines = iter([KeyboardInterrupt, "/exit"])

    def line(prompt=""):
        following = next(lines)
        if following is KeyboardInterrupt:
            raise KeyboardInterrupt
        return following

    monkeypatch.setattr("builtins.input", line)
    talk.run()


def test_thoughts_are_dimmed_on_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    Talk(scripted("Two and two.\n</think>\n\nIt is 4."), None, {}).answer("2+2?")
    assert screen.getvalue() == "\x1b[2mTwo and two.\x1b[0m\n\nIt is 4.\n"


# A real terminal


class Screen:
    """`lily chat` in a pseudo-terminal, with an answer that never ends; its history lies under `home`."""

    SCRIPT = """
import lily, lily.testing
from lily import cli
model = lily.testing.scripted("Hm.\\n</think>\\n\\n" + "many words " * 4000, max_context=40000)
lily.Model.demo = lambda **options: model
cli.main(["chat"])
"""

    def __init__(self, home):
        self.terminal, child = pty.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(home), "HOME": str(home), "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT], stdin=child, stdout=child, stderr=child, env=environment, preexec_fn=_own_terminal
        )
        os.close(child)
        self.shown = ""

    def wait_for(self, pattern: str) -> str:
        """What was shown up to and with a match; the rest is looked at next time."""
        end = time.monotonic() + 60
        while not (found := re.search(pattern, self.shown, re.S)):
            assert time.monotonic() < end, f"{pattern!r} never came: {self.shown[-500:]!r}"
            if select.select([self.terminal], [], [], 1)[0]:
                self.shown += os.read(self.terminal, 65536).decode(errors="replace")
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def leave(self) -> int:
        self.type("/exit\n")
        code = self.process.wait(30)
        os.close(self.terminal)
        return code


def _own_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no pseudo-terminals here")
def test_ctrl_c_stops_the_answer_only_and_lines_are_remembered_by_the_next_talk(tmp_path):
    pytest.importorskip("readline")
    first = Screen(tmp_path)
    first.wait_for("Ctrl-C stops an answer")
    first.type("Say something.\n")
    thoughts = first.wait_for("many words many words")
    assert "\x1b[2mHm." in thoughts  # thoughts are dimmed
    first.type("\x03")
    first.wait_for("stopped.*> ")
    first.type("/reset\n")
    first.wait_for("> ")
    assert first.leave() == 0

    second = Screen(tmp_path)
    second.wait_for("Ctrl-C stops an answer.*> ")
    second.type("\x1b[A\x1b[A\x1b[A")  # up: /exit, /reset, the question
    second.wait_for("Say something\\.")
    second.type("\x15")
    assert second.leave() == 0
    history = next(tmp_path.rglob("chat_history"))
    assert "Say something." in history.read_text() and history.stat().st_mode & 0o777 == 0o600
