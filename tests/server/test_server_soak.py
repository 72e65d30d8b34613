"""A server under load, for minutes; the figures are printed and written down in docs/server/measured.md. Run by .ci/soak.

SOAK_MINUTES is the length of the one with many clients (default: 5) and of the fuzzing (never below 10).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from wire import USER, parse

import lily
from lily.server import Background
from lily.stepping import ChatSteps, Piece
from lily.testing import scripted

pytestmark = pytest.mark.soak
MINUTES = os.environ.get("SOAK_MINUTES")
QUESTIONS = [
    "What is a young dog called?", "What is the capital of France?", "Tom has a red ball. What colour is Tom's ball?", "What is 3 plus 4?",
    "Tell me a story about a red ball.", "Tell me a story about a cat.",
]  # fmt: skip


def say(text):
    print(text, file=sys.stderr, flush=True)


def resident_bytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


@pytest.fixture
def process():
    """`lily serve` in a process of its own, so that its memory is its own: the process id and the URL."""
    command = [sys.executable, "-m", "lily", "serve", "--port", "0"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = None
    for line in running.stderr:
        if found := re.search(r"at (http://\S+:\d+) ", line):
            url = found[1]
        if "startup complete" in line:
            break
    threading.Thread(target=running.stderr.read, daemon=True).start()
    yield running.pid, url
    running.terminate()
    assert running.wait(60) == 0


def bodies(model, seed):
    """Requests of mixed lengths, and the answer that each must get: the same request alone, in this process."""
    rng = random.Random(seed)
    found = []
    for i in range(24):
        filler = " ".join(f"Shelf {rng.randrange(1000)} holds {rng.randrange(100)} jars." for _ in range(rng.choice([0, 0, 3, 20, 60])))
        messages = [{"role": "system", "content": filler}, {"role": "user", "content": rng.choice(QUESTIONS)}]
        body = {"messages": messages, "max_tokens": rng.choice([8, 24, 64]), "temperature": rng.choice([0, 0.7]), "seed": i}
        alone = model.chat(messages, **{name: body[name] for name in ("max_tokens", "temperature", "seed")})
        found.append((body, (alone.content, alone.reasoning or "")))
    return found


def test_sixty_four_clients(process):
    pid, url = process
    minutes = float(MINUTES or 5)
    with lily.Model.demo(progress=False) as model:
        expected = bodies(model, 1)
    counts = {"answers": 0, "tokens": 0}
    memory = []

    async def client(number, end):
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
            while time.monotonic() < end:
                body, answer = rng.choice(expected)
                streamed = {"stream": True, "stream_options": {"include_usage": True}}
                response = await http.post("/v1/chat/completions", json=body | (streamed if rng.random() < 0.7 else {}))
                assert response.status_code == 200, response.text
                if response.headers["content-type"].startswith("text/event-stream"):
                    chunks = parse(response.text)
                    assert chunks[-1] == "[DONE]" and "usage" in chunks[-2], chunks[-2:]
                    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
                    found = tuple("".join(d.get(name) or "" for d in deltas) for name in ("content", "reasoning_content"))
                    usage = chunks[-2]["usage"]
                else:
                    message = response.json()["choices"][0]["message"]
                    found, usage = (message["content"], message.get("reasoning_content", "")), response.json()["usage"]
                assert found == answer  # whatever ran beside it, not one foreign character
                counts["answers"] += 1
                counts["tokens"] += usage["completion_tokens"]

    async def watch(begun, end):
        while time.monotonic() < end:
            await asyncio.sleep(2)
            memory.append((time.monotonic() - begun, resident_bytes(pid)))

    async def everybody():
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
            for body, _ in expected:  # fills the store
                await http.post("/v1/chat/completions", json=body)
        begun = time.monotonic()
        end = begun + 60 * minutes
        await asyncio.gather(watch(begun, end), *(client(i, end) for i in range(64)))

    asyncio.run(everybody())
    settled = [size for at, size in memory if at > 12 * minutes]  # a fifth of the time to fill its stores
    spread = max(settled) / statistics.median(settled[: max(1, len(settled) // 4)]) - 1
    say(f"64 clients, {minutes:g} min: {counts}, resident {settled[0] >> 20} to {max(settled) >> 20} MiB, {100 * spread:+.1f} %")
    assert counts["answers"] > 64 and spread < 0.05
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    assert "lily_active_requests 0.0" in text and "lily_queued_requests 0.0" in text and "lily_failed_answers_total{" not in text


def test_a_thousand_aborted_requests():
    with lily.Model.demo(progress=False) as model, Background(model) as server:
        rng = random.Random(3)
        body = {
            "messages": [{"role": "user", "content": "Tell me a story about a cat."}],
            "stream": True,
            "max_tokens": 400,
            "ignore_eos": True,
        }

        async def abort(http):
            more = {"messages": [{"role": "user", "content": f"Tell me a story about {rng.randrange(10**6)} cats."}]}
            try:
                async with http.stream("POST", "/v1/chat/completions", json=body | (more if rng.random() < 0.5 else {})) as response:
                    after = rng.choice([0, 0, 1, 3, 10])
                    async for _ in response.aiter_text():
                        after -= 1
                        if after < 0:
                            break
            except httpx.TransportError:
                pass

        async def many(count):
            async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as http:
                for _ in range(count // 50):
                    await asyncio.gather(*(abort(http) for _ in range(50)))
                    while server.state.scheduler.active or server.state.scheduler.queued:
                        await asyncio.sleep(0.01)

        def left():
            model.sessions.clear()
            memory = model.memory()
            return memory.kv, memory.states, memory.requests, len(model._sessions), model._native.in_flight

        asyncio.run(many(1000))  # fills the pools, which keep what they have for the next request
        before, resident = left(), resident_bytes(os.getpid())
        threads = threading.active_count()
        asyncio.run(many(1000))
        after = left()
        growth = resident_bytes(os.getpid()) / resident - 1
        say(
            f"1,000 aborted requests: (K/V, states, requests, sessions, in flight) {before} before, {after} after; resident {100 * growth:+.1f} %"
        )
        assert after == before and after[3:] == (0, 0) and growth < 0.05
        assert threading.active_count() <= threads + 2
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0},
            timeout=60,
        )
        assert answer.json()["choices"][0]["message"]["content"] == "A young dog is called a puppy."


ENDPOINTS = {
    "/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest", "/v1/responses": "ResponsesRequest",
    "/v1/messages": "MessagesRequest", "/v1/messages/count_tokens": "MessagesRequest", "/v1/tokenize": "TokenizeRequest",
}  # fmt: skip


GOOD = {
    "/v1/chat/completions": {"messages": USER}, "/v1/completions": {"prompt": "2+2?"}, "/v1/responses": {"input": "2+2?"},
    "/v1/messages": {"messages": USER, "max_tokens": 5}, "/v1/messages/count_tokens": {"messages": USER}, "/v1/tokenize": {"text": "2+2?"},
}  # fmt: skip


def strategy_of(schema, definitions, anything):
    """Values of a JSON schema, of the words that msgspec writes."""
    from hypothesis import strategies as st

    if "$ref" in schema:
        return strategy_of(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions, anything)
    if "anyOf" in schema:
        return st.one_of([strategy_of(one, definitions, anything) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {name: strategy_of(one, definitions, anything) for name, one in schema["properties"].items()}
        needed = set(schema.get("required", ()))
        return st.fixed_dictionaries(
            {n: f for n, f in fields.items() if n in needed}, optional={n: f for n, f in fields.items() if n not in needed}
        )
    if kind == "object":
        return st.dictionaries(
            st.text(max_size=8), strategy_of(schema.get("additionalProperties") or {}, definitions, anything), max_size=3
        )
    if kind == "array":
        return st.lists(strategy_of(schema.get("items") or {}, definitions, anything), max_size=4)
    simple = {
        "null": st.none(), "boolean": st.booleans(), "string": st.text(max_size=20), "integer": st.integers(low, high) | st.integers(low or 0, high or 30),
        "number": st.floats(low, high, allow_nan=False, allow_infinity=False) | st.floats(0, 1),
    }  # fmt: skip
    return simple[kind] if kind else anything


def test_no_body_of_the_schema_gives_a_500():
    import msgspec
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    from lily.server import schema

    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
        max_leaves=12,
    )
    words = st.sampled_from(["user", "assistant", "system", "tool", "developer", "text", "input_text", "function", "tool_use", "tool_result", "image", "message", "thinking", "json_schema", "json_object", "get_time", "auto", "any", "enabled", "disabled"])  # fmt: skip
    keys = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "tool_call_id", "parameters", "input_schema", "input", "id", "tool_use_id", "thinking", "call_id", "output", "schema", "properties", "required", "strict", "json_schema", "effort", "budget_tokens", "edits", "enable_thinking"])  # fmt: skip
    shaped = st.recursive(
        words | st.text(max_size=20) | st.none() | st.integers(-5, 70000),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=25,
    )
    part = st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "output_text"]), "text": st.text(max_size=10)})
    content = st.text(max_size=30) | st.lists(part, max_size=3) | st.none() | shaped
    messages = st.lists(
        st.fixed_dictionaries({"role": words, "content": content}, optional={"tool_calls": shaped, "reasoning_content": shaped}), max_size=4
    )
    calls = {}
    for path, name in ENDPOINTS.items():
        made = msgspec.json.schema(getattr(schema, name))
        calls[path] = strategy_of(made, made["$defs"], shaped | anything)

    seen: dict[int, int] = {}
    end = time.monotonic() + 60 * max(10, float(MINUTES or 10))
    with (
        Background(scripted("a b c</think>\n\nd", max_context=96)) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
    ):

        @given(st.data())
        @settings(
            max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
        )  # a failure shows its body as it is
        def one_round(data):
            path = data.draw(st.sampled_from(sorted(ENDPOINTS)))
            body = data.draw(calls[path])
            if data.draw(st.booleans()):  # a good request with two fields of the right type
                names = data.draw(st.lists(st.sampled_from(sorted(body)), max_size=2)) if body else []
                body = GOOD[path] | {name: body[name] for name in names}
            elif data.draw(st.booleans()):
                body["messages" if "responses" not in path else "input"] = data.draw(messages)
            else:
                for name in data.draw(st.lists(st.sampled_from(sorted(getattr(schema, ENDPOINTS[path]).__struct_fields__)), max_size=3)):
                    body[name] = data.draw(shaped | anything)
            body.pop("model", None)
            content = json.dumps(body)
            if data.draw(st.integers(0, 9)) == 0:
                at = data.draw(st.integers(0, len(content)))
                content = content[:at] + data.draw(st.text(max_size=3)) + content[at + 1 :]
            response = http.post(path, content=content.encode("utf-8", "surrogatepass"), headers={"content-type": "application/json"})
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            assert response.status_code in (200, 400), (path, content, response.text)
            assert '"internal_error"' not in response.text and '"server_error"' not in response.text, (path, content, response.text)
            if response.status_code == 400:
                assert response.json()["error"]["message"], content

        while time.monotonic() < end:
            one_round()
        assert http.get("/health").json()["active_requests"] == 0
    say(f"fuzzed, answers by status: {dict(sorted(seen.items()))}")
    assert seen[200] > 20 and seen[400] > 20


CLIENT = """
import http.client, json, sys
host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3]
connection = http.client.HTTPConnection(host, port, timeout=600)
connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
sys.stdout.write(str(connection.getresponse().read().count(b"data: ")))
"""


def stream_elsewhere(server, body):
    """A client in a process of its own; returns the number of events."""
    host, port = server.url.removeprefix("http://").split(":")
    return int(
        subprocess.run([sys.executable, "-c", CLIENT, host, port, json.dumps(body)], capture_output=True, text=True, check=True).stdout
    )


def thread_seconds(thread):
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def test_the_cost_of_a_streamed_token():
    """CPU of the whole process for a stream, less that of the same steps without a server; and of the event loop alone."""
    tokens = 3000
    model = scripted(" words", repeat=True, max_context=tokens + 500)  # an event for each token
    options = {"enable_thinking": False, "max_tokens": tokens}
    body = {"messages": USER, "stream": True, **options}
    differences = []
    with Background(model) as server:
        stream_elsewhere(server, body | {"max_tokens": 20})
        for _ in range(9):
            model.sessions.clear()
            begun = time.process_time()
            steps = sum(isinstance(step, Piece) for step in ChatSteps(model, USER, options).steps())
            alone = time.process_time() - begun
            assert steps == tokens
            model.sessions.clear()
            begun = time.process_time()
            events = stream_elsewhere(server, body)
            differences.append((time.process_time() - begun - alone) / tokens * 1e6)
            assert events >= tokens * 0.99
    with lily.Model.demo(progress=False) as model, Background(model) as server:
        stream_elsewhere(server, body | {"max_tokens": 20})
        begun = thread_seconds(server._thread)
        stream_elsewhere(server, body | {"ignore_eos": True, "max_tokens": 1000})
        loop = (thread_seconds(server._thread) - begun) / 1000 * 1e6
    cost = statistics.median(differences)
    say(
        f"server cost of a streamed token: {cost:.0f} us of CPU ({min(differences):.0f} to {max(differences):.0f}), event loop with the shipped model {loop:.0f} us"
    )
    assert cost <= 200 and loop <= 200


@pytest.mark.parametrize("words", [10, 2000])
def test_headers_come_at_once(words):
    with (
        lily.Model.demo(progress=False) as model,
        Background(model) as server,
        httpx.Client(base_url=server.url, timeout=600, trust_env=False) as http,
    ):
        times = []
        for i in range(20):
            body = {"messages": [{"role": "user", "content": f"{i} " + "jars " * words}], "stream": True, "max_tokens": 1}
            begun = time.perf_counter()
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                times.append(1000 * (time.perf_counter() - begun))
                if words < 100:
                    response.read()
            model.sessions.clear()
            while server.state.scheduler.active:
                time.sleep(0.01)
        say(f"headers of a stream with {words} words: median {statistics.median(times):.1f} ms, worst of 20 {max(times):.1f} ms")
        assert statistics.median(times) < 50
