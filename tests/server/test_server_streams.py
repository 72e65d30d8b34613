"""Streams: the whole answer in pieces, whatever the pieces; ends that clients can rely on; and clients that go away."""

from __future__ import annotations

import json
import socket
import threading
import time
from random import Random
from types import SimpleNamespace

import httpx
import pytest
from test_server_chat import NEWS, OSLO, TOOL
from wire import USER, events, joined, parse, post, whole

from lily import testing
from lily.generation import Run
from lily.results import Chunk, Timing, Usage
from lily.server.chat_completions import ChatReply
from lily.server.messages_reply import MessagesReply
from lily.server.responses_reply import ResponsesReply
from lily.stepping import ChatSteps, Piece, Reading
from lily.testing import scripted

NASTY = '<tool_call>\n<function=get_time>\n<parameter=city>\nprint("</parameter>")\n# see </tool_call> and <function=x>\n</parameter>\n</function>\n</tool_call>'
ANSWERS = {
    "text": "It is 4, of course.",
    "characters": "Trž seřadil 🦜 日本 👨‍👩‍👧",
    "thoughts": "Two and <two>.\n</think>\n\nIt is 4.",
    "a call": f"Hm.\n</think>\n\n{OSLO}",
    "two calls with words between": f"Hm.\n</think>\n\n{OSLO}\nNow the second:\n{OSLO.replace('Oslo', 'Lima')}",
    "a call with tags in its argument": f"</think>\n\n{NASTY}",
    "markup that is no call": "</think>\n\nIn this form <function=get_time> opens a call and </tool_call> ends it.",
    "a call in the thoughts": f"{OSLO}\n</think>\n\nNo.",
}


QUESTION = [{"role": "user", "content": "2+2?"}]
USAGE, TIMING = Usage(10, 0, 5), Timing(0.1, 0.1, 0.1, 10, 5)


def cuts(text):
    """The text in two pieces at every place, in single characters, and cut at random."""
    random = Random(7)
    yield [text]
    yield list(text)
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]
    for _ in range(200):
        places = sorted(random.sample(range(1, len(text)), random.randint(2, min(9, len(text) - 1))))
        yield [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


def replies(text, make, **options):
    """For every cut of the answer's text: the reply that it was given to, and the events that it made."""
    model = scripted("")
    chat = ChatSteps(model, QUESTION, {"tools": [TOOL, NEWS], "enable_thinking": "</think>" in text, **options})._chat
    run = Run(model, model._native.session(), None, chat._request)
    for pieces in cuts(text):
        reply = make(model)
        chunks = [*(Chunk(piece, [5]) for piece in pieces), Chunk("", [6], None, "stop", USAGE, TIMING)]
        sent = [reply.opening(), reply.add(Reading(0, 10, 0))]
        sent += [reply.add(Piece(0, delta)) for delta in chat.split(iter(chunks), run, None)]
        yield reply, b"".join([*sent, reply.closing()]).decode()


def chat_reply(model):
    server = SimpleNamespace(model=model)
    return ChatReply(server, "m", 1, logprobs=False, usage=True, progress=False)


def without_ids(value):
    """The value without what is drawn at random for each answer, and without counts, which follow the pieces here."""
    if isinstance(value, dict):
        return {
            name: without_ids(entry)
            for name, entry in value.items()
            if name not in ("id", "call_id", "item_id", "created_at", "created", "usage")
        }
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_whole_answer_at_every_cut(name):
    expected = None
    for reply, text in replies(ANSWERS[name], chat_reply):
        answer = whole(reply.whole())
        expected = expected or answer
        chunks = parse(text)
        assert joined(chunks) == answer == expected
        assert chunks[-1] == "[DONE]" and chunks[-2]["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("name", ANSWERS)
def test_events_of_responses_add_up_to_the_response_at_every_cut(name):
    expected = None
    for reply, text in replies(ANSWERS[name], lambda model: ResponsesReply(None, {"model": "m"})):
        answer = reply.whole()
        expected = expected or without_ids(answer)
        assert without_ids(answer) == expected
        found = parse(text)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert found[-1] == {"type": "response.completed", "sequence_number": len(found) - 1, "response": answer}
        for i, item in enumerate(answer["output"]):
            own = [event for event in found if event.get("output_index") == i]
            assert [own[0]["type"], own[-1]["type"]] == ["response.output_item.added", "response.output_item.done"]
            assert own[-1]["item"] == item and own[0]["item"]["id"] == item["id"]
            text_of = item.get("arguments") if item["type"] == "function_call" else item["content"][0]["text"]
            assert "".join(event["delta"] for event in own if event["type"].endswith(".delta")) == text_of


@pytest.mark.parametrize("name", ANSWERS)
def test_events_of_messages_add_up_to_the_message_at_every_cut(name):
    expected = None
    for reply, text in replies(ANSWERS[name], lambda model: MessagesReply("m")):
        answer = reply.whole()
        expected = expected or without_ids(answer)
        assert without_ids(answer) == expected
        found = parse(text)
        blocks, open_block = [], None
        for event in found[1:-2]:
            if event["type"] == "content_block_start":
                assert open_block is None and event["index"] == len(blocks)
                open_block = dict(event["content_block"], json="")
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                for field in ("text", "thinking"):
                    open_block[field] = open_block.get(field, "") + delta[field] if field in delta else open_block.get(field)
                open_block["json"] += delta.get("partial_json", "")
            else:
                assert event["type"] == "content_block_stop" and event["index"] == len(blocks)
                arguments = open_block.pop("json")
                if arguments:
                    open_block["input"] = json.loads(arguments)
                blocks.append({field: value for field, value in open_block.items() if value is not None})
                open_block = None
        assert blocks == answer["content"] and open_block is None
        assert [event["type"] for event in (found[0], *found[-2:])] == ["message_start", "message_delta", "message_stop"]
        assert found[-2]["delta"]["stop_reason"] == answer["stop_reason"]


@pytest.mark.parametrize("name", ANSWERS)
def test_over_http_token_by_token(serving, name):
    text = ANSWERS[name]
    client = serving(scripted(text))
    body = {"enable_thinking": "</think>" in text, "tools": [TOOL, NEWS], "logprobs": True}
    expected = whole(post(client, **body).json())
    for pieces in ([text], list(text)):
        client.model._native.logits = scripted(pieces)._native.logits
        client.model.sessions.clear()
        chunks = events(client, **body)
        assert joined(chunks) == expected and len(joined(chunks)[1]) == 1
        assert all("\ufffd" not in (c["choices"][0]["delta"].get("content") or "") for c in chunks[:-1])
        entries = [e for c in chunks[:-1] for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
        if "call" not in name:
            assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == expected[0]["content"]


def test_the_answers_above_are_what_they_should_be():
    for name, content, cities, reason in (
        ("characters", ANSWERS["characters"], [], "stop"),
        ("two calls with words between", "Now the second:", ["Oslo", "Lima"], "tool_calls"),
        ("a call with tags in its argument", "", ['print("</parameter>")\n# see </tool_call> and <function=x>'], "tool_calls"),
        ("markup that is no call", ANSWERS["markup that is no call"].split("\n\n")[1], [], "stop"),
        ("a call in the thoughts", "No.", [], "stop"),
    ):
        reply, _ = next(replies(ANSWERS[name], chat_reply))
        message, reasons = whole(reply.whole())
        assert (message["content"], reasons) == (content, [reason])
        assert [json.loads(call["arguments"])["city"] for call in message["tool_calls"]] == cities


@pytest.mark.parametrize("stop", ["END", "</think>", "two"])
def test_stops_act_alike_in_both_modes(serving, stop):
    text = "One two.\n</think>\n\nIt is EN 4 END and more"
    client = serving(scripted(text))
    expected = whole(post(client, enable_thinking=True, stop=stop).json())
    assert stop not in expected[0]["content"] + expected[0]["reasoning_content"] and expected[1] == ["stop"]
    for at in (1, 4, 5, 8, 14, 17, 30, 31):
        client.model._native.logits = scripted([text[:at], text[at:]])._native.logits
        assert joined(events(client, enable_thinking=True, stop=stop)) == expected


def test_a_cut_call_is_marked_in_both_modes(serving):
    text = f"{OSLO}\n<tool_call>\n<function=get_time>\n<parameter=city>\nLi"
    client = serving(scripted(text))
    limit = len(client.model.encode(text))
    answer = post(client, tools=[TOOL], max_tokens=limit).json()["choices"][0]
    assert answer["finish_reason"] == "length" and len(answer["message"]["tool_calls"]) == 1
    assert answer["unfinished_tool_call"].endswith("Li")
    last = events(client, tools=[TOOL], max_tokens=limit)[-2]["choices"][0]
    assert (last["finish_reason"], last["unfinished_tool_call"]) == ("length", answer["unfinished_tool_call"])


# The end


@pytest.mark.parametrize("end", ["stop", "length", "tool_calls", "error"])
@pytest.mark.parametrize("usage", [True, False])
def test_the_last_events(serving, end, usage):
    client = serving(OSLO if end == "tool_calls" else "a b c d e")
    if end == "error":
        testing.fail_at(client.model, 3, 0)
    found = events(client, tools=[TOOL], stream_options={"include_usage": usage}, **({"max_tokens": 3} if end == "length" else {}))
    assert found[-1] == "[DONE]" and found.count("[DONE]") == 1
    if end == "error":
        assert found[-2]["error"]["type"] == "server_error" and joined(found)[1] == []
        assert sum("error" in event for event in found[:-1]) == 1
    else:
        assert joined(found)[1] == [end]
        assert ("usage" in found[-2] and found[-2]["choices"] == []) is usage
        assert found[-3 if usage else -2]["choices"][0]["finish_reason"] == end
    assert post(client, max_tokens=2).status_code == 200


def test_the_official_client_raises_what_ends_a_stream(serving):
    openai = pytest.importorskip("openai")
    client = serving("a b c d e")
    testing.fail_at(client.model, 3, 0)
    with openai.OpenAI(base_url=f"{client.server.url}/v1", api_key="none", max_retries=0) as official:
        stream = official.chat.completions.create(model="default", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="failed as asked"):
            list(stream)


# While a prompt is read


@pytest.fixture
def slow_reading(monkeypatch):
    """Each chunk of a scripted prompt takes this long; the list says how many were read."""
    read = []
    append = testing.ScriptedSession.append

    def slow(self, ids, *rest):
        time.sleep(slow.seconds)
        read.append(len(ids))
        return append(self, ids, *rest)

    slow.seconds = 0.05
    monkeypatch.setattr(testing.ScriptedSession, "append", slow)
    slow.read = read
    return slow


def test_headers_come_at_once_and_comments_keep_the_connection(serving, slow_reading):
    slow_reading.seconds = 1.0
    client = serving("Four.", keep_alive_seconds=0.25)
    with client.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True, "enable_thinking": False}) as response:
        read_before_headers = list(slow_reading.read)
        text = response.read().decode()
    assert read_before_headers == [] and slow_reading.read != [] and response.headers["content-type"].startswith("text/event-stream")
    assert text[: text.index('"content":"F')].count(": keep-alive\n\n") >= 2
    assert joined(parse(text)) == ({"content": "Four.", "reasoning_content": "", "tool_calls": []}, ["stop"])


def test_progress_when_asked_for(serving):
    client = serving("Four.")
    messages = [{"role": "user", "content": "jar " * 200}]
    plain = events(client, messages=messages)
    assert not any("prompt_progress" in chunk for chunk in plain[:-1])
    client.model.sessions.clear()
    chunks = events(client, messages=messages, stream_options={"include_progress": True})
    progress = [chunk["prompt_progress"] for chunk in chunks[:-1] if "prompt_progress" in chunk]
    done = [entry["processed"] for entry in progress]
    assert len(done) > 2 and done == sorted(done) and done[0] == 0 and done[-1] == progress[0]["total"]
    assert joined(chunks) == joined(plain)


# Leaving


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def idle(client):
    state = client.server.state
    return state.scheduler.active == 0 and state.scheduler.queued == 0 and client.model._native.in_flight == 0


def test_leaving_a_stream_stops_the_device_within_a_token(serving):
    client = serving(scripted("many words ", repeat=True, max_context=1 << 20))
    with client.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True, "enable_thinking": False}) as response:
        lines = response.iter_lines()
        for _ in range(12):
            next(lines)
        assert client.server.state.scheduler.active == 1
    until(lambda: idle(client), 1.0)
    assert post(client, max_tokens=3).json()["choices"][0]["message"]["content"] == "many words"
    assert "lily_cancelled_requests_total 1.0" in client.get("/metrics").text


def test_leaving_without_a_stream_stops_the_device_too(serving):
    client = serving(scripted("many words ", repeat=True, max_context=1 << 20))
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json={"messages": USER, "enable_thinking": False}, timeout=0.3)
    until(lambda: idle(client), 2.0)


def test_leaving_while_a_prompt_is_read_keeps_what_was_read(serving, slow_reading):
    client = serving("Four.")
    messages = [{"role": "user", "content": "shelf jars " * 800}]
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json={"messages": messages, "enable_thinking": False}, timeout=0.6)
    until(lambda: idle(client))
    read = sum(slow_reading.read)
    slow_reading.seconds = 0
    usage = post(client, messages=messages).json()["usage"]
    assert 0 < read < usage["prompt_tokens"] and usage["prompt_tokens_details"]["cached_tokens"] == read


def test_leaving_before_the_turn_comes_costs_nothing(serving):
    client = serving(scripted("many words ", repeat=True, max_context=1 << 20), max_active=1)
    with client.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json={"messages": USER}, timeout=0.3)
        until(lambda: client.server.state.scheduler.queued == 0, 2.0)
    until(lambda: idle(client))


def test_many_clients_that_leave_at_random_leave_a_server_that_works(serving, demo_server, demo):
    random = Random(4)

    def leave():
        with socket.create_connection(demo_server.url.removeprefix("http://").split(":")) as connection:
            body = b'{"messages": [{"role": "user", "content": "Tell me a story"}], "stream": true, "max_tokens": 200}'
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            time.sleep(random.random() * 0.3)

    threads = [threading.Thread(target=leave) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = demo_server.state.scheduler
    until(lambda: state.active == 0 and state.queued == 0 and demo._native.in_flight == 0, 20)
    answer = httpx.post(
        f"{demo_server.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "What is a young dog called?"}], "temperature": 0},
        timeout=60,
    )
    assert answer.json()["choices"][0]["message"]["content"] == "A young dog is called a puppy."
