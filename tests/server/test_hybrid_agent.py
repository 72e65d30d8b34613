"""The example with two models: the cloud one, played by a second server, never sees what the files hold."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from lily.testing import scripted

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/hybrid_agent.py"
SECRET = "Invoice 17 to Rose Ltd is unpaid: 431 euros."


def call(tool, **arguments):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"</think>\n\n<tool_call>\n<function={tool}>\n{body}</function>\n</tool_call>"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/march-private.txt").write_text(SECRET)
    (tmp_path / "outside.txt").write_text("out of reach")
    return tmp_path / "files"


def recorded(server):
    """Every request that the server gets from here on: method, target and headers in a line, then the body."""
    config = server._server.config
    app, requests = config.loaded_app, []

    async def recording(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        number = len(requests)
        requests.append(f"{scope['method']} {scope['raw_path']} {scope['query_string']} {scope['headers']}\n")

        async def received():
            message = await receive()
            requests[number] += message.get("body", b"").decode()
            return message

        await app(scope, received, send)

    config.loaded_app = recording
    return requests


def test_only_the_question_leaves_the_machine(folder, serving, monkeypatch, capsys):
    pytest.importorskip("openai")
    cloud = serving("</think>\n\n1. List the files.\n2. Read the invoices.")
    turns = iter([call("list_files"), call("read_file", name="march-private.txt"), "</think>\n\nInvoice 17 is unpaid."])
    local = scripted("")
    ask = local.chat

    seen = []

    def next_turn(messages, **options):
        seen.append(str(messages))
        local._native.logits = scripted(next(turns))._native.logits
        return ask(messages, **options)

    local.chat = next_turn
    example = runpy.run_path(str(EXAMPLE))
    monkeypatch.setattr(example["lily"].Model, "demo", lambda: local)
    received = recorded(cloud.server)
    example["main"]([str(folder), "Which invoice is unpaid?", "--cloud-url", f"{cloud.server.url}/v1", "--cloud-model", "default"])
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("Invoice 17 is unpaid.")
    assert received and not any(secret in request for request in received for secret in ("march-private", "Rose", "431"))
    sent = [message["content"] for request in received for message in json.loads(request.partition("\n")[2])["messages"]]
    shown = [line.split(": ", 2)[2] for line in printed.splitlines() if line.startswith("leaves this machine")]
    assert len(shown) == 2 and sent == shown and "Which invoice is unpaid?" in sent
    assert "stays here: read_file(name='march-private.txt')" in printed
    assert SECRET in seen[-1] and "1. List the files." in seen[-1]


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/passwd", "", "missing.txt", "march\0private.txt", "\0"])
def test_the_tools_do_not_leave_their_folder(folder, name):
    _, read_file = runpy.run_path(str(EXAMPLE))["file_tools"](folder)
    assert read_file(name).startswith("There is no file")
