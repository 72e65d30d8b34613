"""Servers on free ports of this machine, around scripted models or the shipped one."""

from __future__ import annotations

from contextlib import ExitStack

import httpx
import pytest

import lily
from lily.testing import scripted

pytest.importorskip("lily.server")
from lily.server import Background  # noqa: E402


@pytest.fixture
def serving():
    """A function that serves a model, or a script, and returns an HTTP client with the server as `.server`."""
    with ExitStack() as stack:

        def serve(model, **settings):
            if not isinstance(model, lily.Model):
                model = scripted(model)
            server = stack.enter_context(Background(model, **settings))
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, trust_env=False))
            client.server, client.model = server, model
            return client

        yield serve


@pytest.fixture(scope="session")
def demo():
    with lily.Model.demo(progress=False) as model:
        model._native.set_chunk(64)  # more borders for fewer tokens
        yield model


@pytest.fixture(scope="session")
def demo_server(demo):
    with Background(demo) as server:
        yield server


@pytest.fixture
def client(demo_server, demo):
    openai = pytest.importorskip("openai")
    demo.sessions.clear()
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
