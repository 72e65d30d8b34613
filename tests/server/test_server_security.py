"""Who may call, and what a request cannot reach."""

from __future__ import annotations

import logging
import socket

import httpx
import pytest
from wire import USER, post

from lily.testing import scripted


def test_it_listens_on_this_machine_only_unless_told_otherwise(serving):
    assert serving("x").server.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("host, status", [("127.0.0.1:80", 200), ("localhost", 200), ("[::1]:8000", 200), ("192.168.1.5", 200), ("evil.example", 403), ("", 403), ("localhost.evil.example:80", 403)])  # fmt: skip
def test_names_that_a_page_could_have_made_up_are_refused(serving, host, status):
    response = serving("x").get("/v1/models", headers={"Host": host})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "host_not_allowed" and "--allowed-host" in response.json()["error"]["message"]


def test_names_can_be_allowed(serving):
    assert serving("x", allowed_hosts=["models.lan"]).get("/health", headers={"Host": "models.lan:8000"}).status_code == 200


def test_pages_of_other_sites_are_refused(serving):
    client = serving("x")
    for origin, status in (("https://evil.example", 403), (client.server.url, 200), ("null", 403)):
        assert client.post("/v1/tokenize", json={"text": "x"}, headers={"Origin": origin}).status_code == status
    assert "access-control-allow-origin" not in client.get("/health").headers


def test_cors_for_listed_origins(serving):
    client = serving("x", cors_origins=["https://app.example"])
    ask = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,authorization",
    }
    allowed = client.options("/v1/chat/completions", headers=ask)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert client.post("/v1/tokenize", json={"text": "x"}, headers={"Origin": "https://app.example"}).status_code == 200
    assert client.post("/v1/tokenize", json={"text": "x"}, headers={"Origin": "https://evil.example"}).status_code == 403


def test_the_key(serving, monkeypatch):
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr("lily.server.security.hmac.compare_digest", lambda a, b: compared.append(1) or real(a, b))
    client = serving("Four.", api_key="secret-key-1")
    assert client.get("/v1/models").status_code == 401 and client.get("/metrics").status_code == 401
    for headers, status in (
        ({"Authorization": "Bearer secret-key-1"}, 200), ({"x-api-key": "secret-key-1"}, 200), ({"Authorization": "bearer secret-key-1"}, 200),
        ({"Authorization": "Bearer wrong"}, 401), ({"x-api-key": "secret-key-12"}, 401), ({"Authorization": "Basic secret-key-1"}, 401),
        ({"Authorization": b"Bearer \xff"}, 401),
    ):  # fmt: skip
        response = client.get("/v1/models", headers=headers)
        assert response.status_code == status
    assert response.json()["error"]["type"] == "authentication_error" and len(compared) == 9
    assert client.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
    assert client.get("/health").status_code == 200
    assert "secret-key-1" not in repr(client.server.settings)


@pytest.mark.parametrize("settings", [{"port": 70000}, {"api_key": "short"}, {"max_active": 0}, {"cors_origins": "x"}, {"host": ""}, {"drain_seconds": 0}, {"max_depth": 10**6}])  # fmt: skip
def test_bad_settings_are_refused_by_name(settings):
    import lily

    with pytest.raises(ValueError, match=next(iter(settings))):
        lily.serve(scripted("x"), **settings)


def test_a_taken_port_is_an_error_that_names_it():
    import lily

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            lily.serve(scripted("x"), port=port)


def test_nothing_in_a_request_reaches_a_file_or_the_network(serving, monkeypatch, tmp_path):
    client = serving("x")
    secret = tmp_path / "secret"
    secret.write_text("gone fishing")
    opened, connected = [], []
    real_open = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: opened.append(str(path)) or real_open(path, *a, **k))
    real_connect = socket.socket.connect

    def connect(self, address):
        connected.append(address)
        return real_connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    attack = (
        "{% include '"
        + str(secret)
        + "' %}{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    )
    image = {"type": "image_url", "image_url": {"url": f"file://{secret}"}}
    bodies = [
        {"model": str(secret)}, {"model": "https://127.0.0.1:1/x"}, {"messages": [{"role": "user", "content": attack}]},
        {"messages": [{"role": "user", "content": [image]}]}, {"chat_template_kwargs": {"documents": [attack], "x": attack}},
        {"chat_template_kwargs": {"strftime_now": attack, "raise_exception": "x"}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": attack, "parameters": {"$ref": f"file://{secret}"}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": f"file://{secret}"}}}},
    ]  # fmt: skip
    for body in bodies:
        response = post(client, **body)
        assert response.status_code < 500 and "gone fishing" not in response.text and "uid=" not in response.text, body
    assert not [path for path in opened if "secret" in path]
    assert all(address[1] == int(client.server.url.rsplit(":", 1)[1]) for address in connected if isinstance(address, tuple))


def test_logs_hold_no_prompt_unless_asked(serving, caplog):
    with caplog.at_level(logging.DEBUG):
        quiet = serving("Four.")
        post(quiet, messages=[{"role": "user", "content": "my private words"}])
        post(quiet, messages=[{"role": "user", "content": "my private words", "wrong": 1}])
        # An answer with private words where the grammar of a call has no place for them: in a parameter's tag that never ends.
        misplaced = "<tool_call>\n<function=get_time>\n<parameter=my private words\n</function>\n</tool_call>"
        post(serving(misplaced), tools=[{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}])
        assert "were dropped" in caplog.text
        assert "private words" not in caplog.text and "wrote" in caplog.text
        post(serving("Four.", log_prompts=True), messages=[{"role": "user", "content": "my private words"}])
        assert "private words" in caplog.text


def test_a_slow_or_broken_sender_holds_nobody_up(serving):
    client = serving("Four.")
    address = client.server.url.removeprefix("http://").split(":")
    connections = []
    for _ in range(20):
        connection = socket.create_connection((address[0], int(address[1])))
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        connections.append(connection)
    assert post(client).status_code == 200
    for connection in connections:
        connection.close()
    assert httpx.get(f"{client.server.url}/health", trust_env=False).status_code == 200
    assert post(client, messages=USER).status_code == 200
