"""`lily serve` as a process: signals, and what it says without its libraries."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from wire import joined, parse

BODY = {"messages": [{"role": "user", "content": "Tell me a story"}], "stream": True, "ignore_eos": True}


@contextmanager
def process(*options):
    """A running server: the process and a client."""
    command = [sys.executable, "-m", "lily", "serve", "--port", "0", "--max-context", "8192", *options]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"LILY_THREADS": "1"})
    try:
        url = None
        for line in running.stderr:
            if found := re.search(r"at (http://\S+:\d+) ", line):
                url = found[1]
            if "startup complete" in line:
                break
        assert url is not None
        threading.Thread(target=running.stderr.read, daemon=True).start()  # so that the pipe never fills
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield running, client
    finally:
        running.kill()
        running.wait()


def test_sigterm_lets_running_answers_end():
    with process() as (running, client):
        with client.stream("POST", "/v1/chat/completions", json={**BODY, "max_tokens": 60}) as response:
            pieces = response.iter_text()
            text = next(pieces)
            running.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{client.base_url}/health", trust_env=False)
            text += "".join(pieces)
        assert joined(parse(text))[1] == ["length"] and parse(text)[-1] == "[DONE]"
        assert running.wait(15) == 0


@pytest.mark.parametrize("drain", [None, "0.5"])
def test_a_server_stops_soon_with_a_stream_open(drain):
    """Ctrl-C within five seconds; SIGTERM when the time to drain is over."""
    with process(*(["--drain-seconds", drain] if drain else [])) as (running, client):
        with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
            pieces = response.iter_text()
            text = next(pieces)
            begun = time.monotonic()
            running.send_signal(signal.SIGTERM if drain else signal.SIGINT)
            text += "".join(pieces)
            assert running.wait(10) == 0
        assert time.monotonic() - begun < 5
        found = parse(text)
        assert "shutting down" in found[-2]["error"]["message"] and found[-1] == "[DONE]"


def test_a_second_ctrl_c_ends_it_at_once():
    with process() as (running, client):
        with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
            pieces = response.iter_text()
            next(pieces)
            begun = time.monotonic()
            running.send_signal(signal.SIGINT)
            time.sleep(0.2)
            running.send_signal(signal.SIGINT)
            running.wait(10)
            assert time.monotonic() - begun < 2


def test_without_its_libraries_the_server_says_what_to_install(monkeypatch):
    import lily.server

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else real(name, *rest))
    with pytest.raises(ImportError, match=r"uvicorn.*pip install 'lily-inference\[server\]'"):
        importlib.reload(lily.server)


def test_importing_lily_imports_no_server():
    code = "import lily, lily.cli, sys; assert not {'starlette', 'uvicorn', 'msgspec'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
