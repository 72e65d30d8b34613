"""The other endpoints, with the official clients and by hand."""

from __future__ import annotations

import json

import pytest
from test_server_chat import NEWS, OSLO, TOOL
from wire import USER, events, parse, post

from lily import testing
from lily.template import ChatTemplate
from lily.testing import scripted

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city."}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
ASK = "What is the weather in Oslo?"


# Models, health, metrics, tokenize


def test_models_are_listed_under_every_name(serving):
    model = scripted("Four.")
    model.source = "some-org/Tiny-Hybrid-4bit"
    client = serving(model, aliases=["tiny"])
    listed = client.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["tiny", "Tiny-Hybrid-4bit", "some-org/Tiny-Hybrid-4bit", "default"]
    assert all(entry["context_length"] == 4096 and entry["default_max_tokens"] is None for entry in listed)
    for name in ("tiny", "tiny-hybrid-4bit", "some-org/Tiny-Hybrid-4bit", "default"):
        assert post(client, model=name).json()["model"] == name
        assert client.get(f"/v1/models/{name}").json()["id"] == name
    missing = post(client, model="gpt-4o")
    assert missing.status_code == 404 and "tiny, Tiny-Hybrid-4bit" in missing.json()["error"]["message"]
    assert client.get("/v1/models/gpt-4o").status_code == 404
    assert post(serving("x", any_model=True), model="gpt-4o").json()["model"] == "gpt-4o"


def test_a_directory_is_known_by_its_path_and_its_last_part(serving, tmp_path):
    model = scripted("x")
    model.source = str(tmp_path / "tiny-hybrid-4bit")
    client = serving(model)
    (tmp_path / "tiny-hybrid-4bit").mkdir()
    for name in (model.source, model.source + "/", "tiny-hybrid-4bit", "default"):
        assert post(client, model=name).status_code == 200


def test_health_and_unknown_paths(serving):
    client = serving("x")
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/v1/nothing").status_code == 404 and "/v1/nothing" in client.get("/v1/nothing").json()["error"]["message"]
    assert client.get("/v1/chat/completions").status_code == 405
    client.server.state.scheduler.drain(10)
    assert client.get("/health").status_code == 503
    refused = post(client)
    assert refused.status_code == 503 and refused.headers["retry-after"] and refused.json()["error"]["code"] == "shutting_down"


def test_metrics_count_what_happened(serving):
    client = serving("a b c")
    for _ in range(2):
        usage = post(client).json()["usage"]
    post(client, temperature="hot")
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(lines['lily_requests_total{endpoint="/v1/chat/completions",status="200"}']) == 2
    assert float(lines['lily_requests_total{endpoint="/v1/chat/completions",status="400"}']) == 1
    assert float(lines["lily_prompt_tokens_total"]) == 2 * usage["prompt_tokens"]
    assert float(lines["lily_generated_tokens_total"]) == 2 * usage["completion_tokens"]
    assert float(lines["lily_reused_tokens_total"]) == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert float(lines["lily_time_to_first_token_seconds_count"]) == float(lines["lily_queue_seconds_count"]) == 2
    assert float(lines["lily_queued_requests"]) == float(lines["lily_active_requests"]) == 0
    assert 'lily_memory_bytes{kind="kv"}' in lines and "lily_decode_tokens_per_second_count" in lines


def test_tokenize(serving):
    client = serving("x")
    found = client.post("/v1/tokenize", json={"text": "Hello 🦜", "pieces": True}).json()
    assert found["tokens"] == client.model.encode("Hello 🦜") and found["count"] == len(found["tokens"])
    assert bytes(byte for piece in found["pieces"] for byte in piece).decode() == "Hello 🦜"
    chat = client.post("/v1/tokenize", json={"messages": USER, "enable_thinking": False}).json()
    assert chat["count"] == post(client).json()["usage"]["prompt_tokens"]
    for wrong in ({}, {"text": "x", "messages": USER}, {"text": "x", "tools": []}, {"text": 3}):
        assert client.post("/v1/tokenize", json=wrong).status_code == 400


# Completions


def test_completions_with_the_official_client(client, demo):
    same = demo.generate("Once upon a time", max_tokens=8, temperature=0)
    answer = client.completions.create(model="default", prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=2)
    assert answer.choices[0].text == same.text and answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == same.text and logprobs.text_offset == [
        same.text.index(t) if i == 0 else sum(map(len, logprobs.tokens[:i])) for i, t in enumerate(logprobs.tokens)
    ]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    stream = client.completions.create(model="default", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == same.text
    ids = client.completions.create(model="default", prompt=demo.encode("Once upon a time"), max_tokens=8, temperature=0, echo=True)
    assert ids.choices[0].text == "Once upon a time" + same.text


def test_several_prompts_and_answers(serving):
    client = serving("a b c d e f")
    body = {"prompt": ["one two", "three"], "n": 2, "max_tokens": 4, "temperature": 50, "seed": 3}
    answer = post(client, "/v1/completions", **body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3] and answer["usage"]["completion_tokens"] == 16
    assert answer["usage"]["prompt_tokens"] == sum(len(client.model.encode(text)) for text in body["prompt"])
    chunks = events(client, "/v1/completions", **body)
    texts = ["".join(c["choices"][0]["text"] for c in chunks[:-1] if c["choices"][0]["index"] == i) for i in range(4)]
    assert texts == [choice["text"] for choice in answer["choices"]] and chunks[-1] == "[DONE]"


def test_the_progress_of_completions(serving):
    client = serving("a b c")
    body = {"prompt": ["jar " * 200, "shelf " * 100], "max_tokens": 3}
    chunks = events(client, "/v1/completions", **body, stream_options={"include_progress": True})
    progress = [chunk["prompt_progress"] for chunk in chunks[:-1] if "prompt_progress" in chunk]
    lengths = [len(client.model.encode(prompt)) for prompt in body["prompt"]]
    assert [entry["total"] for entry in progress if entry["processed"] == entry["total"]] == lengths  # one prompt after the other
    assert all(not chunk["choices"] for chunk in chunks[:-1] if "prompt_progress" in chunk)
    assert not any("prompt_progress" in chunk for chunk in events(client, "/v1/completions", **body)[:-1])


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt[0]"), ({"prompt": ["a", 1]}, "prompt[1]"), ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, 10**9]}, None), ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"), ({"prompt": "a", "logprobs": 50}, "logprobs"), ({}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"), ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all"),
    ],
)  # fmt: skip
def test_what_completions_refuse(serving, body, param):
    response = post(serving("x"), "/v1/completions", **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


# Responses


def test_responses_with_the_official_client(client, demo):
    tool = {"type": "function", **WEATHER, "parameters": SCHEMA, "strict": True}
    first = client.responses.create(model="default", input=ASK, tools=[tool], temperature=0)
    assert [item.type for item in first.output] == ["reasoning", "function_call"] and first.status == "completed"
    assert json.loads(first.output[1].arguments) == {"city": "Oslo"}
    follow = [
        {"role": "user", "content": ASK},
        *first.output,
        {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "Sunny, 20 degrees."},
    ]
    second = client.responses.create(model="default", input=follow, tools=[tool], temperature=0)
    assert "Oslo" in second.output_text
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens  # thoughts and call came back as they were
    with client.responses.stream(model="default", input=follow, tools=[tool], temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == second.output_text


def test_the_form_of_responses_is_a_chat(serving):
    client = serving("Four.")
    body = {
        "instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}],
        "reasoning": {"effort": "none"}, "max_output_tokens": 1, "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    answer = post(client, "/v1/responses", **body).json()
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert answer["usage"]["input_tokens"] == len(client.model.apply_chat_template(messages, tokenize=True, enable_thinking=False))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["content"][0]["logprobs"] and answer["store"] is False and answer["metadata"] == {"a": "b"}


def test_a_response_in_json(serving):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    answer = post(serving("{}"), "/v1/responses", input="2+2?", text={"format": form}, reasoning={"effort": "none"}).json()
    assert answer["output"][0]["content"][0]["text"] == "{}"


def test_a_response_that_fails(serving):
    client = serving("a b c d e")
    testing.fail_at(client.model, 3, 0)
    found = events(client, "/v1/responses", input="2+2?", reasoning={"effort": "none"})
    assert found[-1]["type"] == "response.failed" and "failed as asked" in found[-1]["response"]["error"]["message"]
    assert post(client, "/v1/responses", input="2+2?").status_code == 200


@pytest.mark.parametrize(
    "body, param",
    [
        ({"input": []}, "input"), ({}, "input"), ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"instructions": "x", "input": [{"role": "user", "content": "a"}, {"role": "narrator", "content": "x"}]}, "input[1].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"), ({"input": "a", "background": True}, "background"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"), ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "reasoning": {"summary": "detailed"}}, "reasoning.summary"), ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include[0]"), ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"input": "a", "stream": True, "stream_options": {"include_progress": True}}, "stream_options.include_progress"),
        ({"input": "a", "text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "mode": "x"}}}, "text.format.mode"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f", "x": 1}}, "tool_choice.x"),
        ({"input": "a", "conversation": "c"}, "conversation"), ({"input": "a", "max_tool_calls": 3}, "max_tool_calls"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_responses_refuse(serving, body, param):
    response = post(serving("x"), "/v1/responses", **body)
    error = response.json()["error"]
    if (
        body.get("input")
        and isinstance(body["input"], list)
        and isinstance(body["input"][0], dict)
        and body["input"][0].get("type") == "function_call"
    ):
        assert error["param"].startswith("input[0]")
    else:
        assert error["param"] == param, error
    assert response.status_code == 400


# Messages


@pytest.fixture
def anthropic_client(demo_server, demo):
    anthropic = pytest.importorskip("anthropic")
    demo.sessions.clear()
    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_messages_with_the_official_client(anthropic_client):
    tools = [WEATHER | {"input_schema": SCHEMA}]
    options = {"model": "default", "max_tokens": 80, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    greedy = {"extra_body": {"temperature": 0}}
    messages = [{"role": "user", "content": ASK}]
    first = anthropic_client.messages.create(messages=messages, **options, **greedy)
    assert [block.type for block in first.content] == ["thinking", "tool_use"] and first.stop_reason == "tool_use"
    assert first.content[1].input == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "Sunny, 20 degrees."}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    count = anthropic_client.messages.count_tokens(model="default", messages=messages, tools=tools, thinking=options["thinking"])
    with anthropic_client.messages.stream(messages=messages, **options, **greedy) as stream:
        text = "".join(stream.text_stream)
        second = stream.get_final_message()
    assert "Oslo" in text and second.stop_reason == "end_turn"
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == count.input_tokens
    assert (
        second.usage.cache_read_input_tokens == first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens
    )


def test_a_named_error_of_messages(anthropic_client):
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.NotFoundError, match="demo, default"):
        anthropic_client.messages.create(model="claude-x", max_tokens=5, messages=USER)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] has type 'image'"):
        anthropic_client.messages.create(
            model="default", max_tokens=5, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]
        )


def test_the_form_of_messages_is_a_chat(serving):
    client = serving("Four. END")
    body = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "messages": USER, "max_tokens": 20,
        "stop_sequences": ["END", "FIN"], "metadata": {"user_id": "x"}, "top_k": 1,
    }  # fmt: skip
    answer = post(client, "/v1/messages", **body).json()
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert answer["usage"]["input_tokens"] == len(client.model.apply_chat_template(messages, tokenize=True, enable_thinking=False))
    assert (answer["content"], answer["stop_reason"], answer["stop_sequence"]) == (
        [{"type": "text", "text": "Four. "}],
        "stop_sequence",
        "END",
    )
    cut = post(client, "/v1/messages", messages=USER, max_tokens=1).json()
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 1


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}, None])
def test_the_effort_of_messages_reaches_the_template(serving, thinking):
    client = serving("Four.")
    client.model.template = ChatTemplate("{{ reasoning_effort }} {{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}")
    body = {"messages": USER, "max_tokens": 5, "thinking": thinking, "output_config": {"effort": "low"}}
    assert post(client, "/v1/messages", **body).status_code == 200
    assert client.model.decode(client.model.sessions._newest().tokens).startswith("low 2+2?")


def test_tool_choice_of_messages(serving):
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in (TOOL, NEWS)]
    forced = post(
        serving("</function>\n</tool_call>"),
        "/v1/messages",
        messages=USER,
        max_tokens=50,
        tools=tools,
        tool_choice={"type": "tool", "name": "get_news"},
    ).json()
    assert [(block["name"], block["input"]) for block in forced["content"]] == [("get_news", {})] and forced["stop_reason"] == "tool_use"
    two = serving(f"{OSLO}\n{OSLO}")
    one = post(
        two, "/v1/messages", messages=USER, max_tokens=99, tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    ).json()
    assert len(one["content"]) == 1
    none = post(two, "/v1/messages", messages=USER, max_tokens=99, tools=tools, tool_choice={"type": "none"}).json()
    assert [block["type"] for block in none["content"]] == ["text"]


def test_a_cut_call_of_messages_is_left_out(serving):
    tools = [{"name": "get_time", "input_schema": TOOL["function"]["parameters"]}]
    text = f"{OSLO}\n<tool_call>\n<function=get_time>\n<parameter=city>\nLi"
    client = serving(text)
    answer = post(client, "/v1/messages", messages=USER, tools=tools, max_tokens=len(client.model.encode(text))).json()
    assert answer["stop_reason"] == "max_tokens" and [block["input"] for block in answer["content"]] == [{"city": "Oslo"}]


def test_a_stream_of_messages_that_fails(serving):
    client = serving("a b c d e")
    testing.fail_at(client.model, 3, 0)
    found = events(client, "/v1/messages", messages=USER, max_tokens=20)
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"


def test_a_volatile_header_of_a_client_does_not_spoil_the_reuse(serving):
    client = serving("Four.")
    for code, cached in (("a1b2c", False), ("d4e5f", True)):
        system = f"x-anthropic-billing-header: cc_version=0.0.1; cch={code};\nYou help with gardens. " + "Plants need water. " * 40
        usage = post(client, "/v1/messages", system=system, messages=USER, max_tokens=5).json()["usage"]
        assert (usage["cache_read_input_tokens"] > 0) is cached


@pytest.mark.parametrize(
    "body, words",
    [
        ({"max_tokens": None}, "max_tokens is missing"), ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"), ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"), ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"), ({"container": "x"}, "container"), ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "trigger": {}}]}}, "context_management.edits[0].trigger"),
        ({"context_management": {"compact": True}}, "context_management.compact"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"), ({"tool_choice": {"type": "none", "name": "f"}}, "tool_choice.name"),
        ({"output_format": {}}, "output_format"), ({"output_config": {"format": {}}}, "output_config.format"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "output_format and output_config.format"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"), ({"output_format": {"type": "xml"}}, "output_format"),
        ({"system": [{"type": "image"}]}, "system[0]"), ({"temperature": 2}, "temperature"), ({"wrong": 1}, "wrong"),
    ],
)  # fmt: skip
def test_what_messages_refuse(serving, body, words):
    client = serving("x")
    response = post(client, "/v1/messages", **{"messages": USER, "max_tokens": 5, **body})
    assert response.status_code == 400 and response.json()["type"] == "error" and words in response.json()["error"]["message"], (
        response.text
    )


def test_every_endpoint_parses_as_events(serving):
    client = serving("Four.")
    for path, body in (("/v1/responses", {"input": "2+2?"}), ("/v1/messages", {"messages": USER, "max_tokens": 5})):
        text = client.post(path, json={**body, "stream": True}).text
        named = [block.split("\n")[0] for block in text.strip().split("\n\n")]
        assert named == [f"event: {event['type']}" for event in parse(text)]
