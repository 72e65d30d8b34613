"""POST /v1/chat/completions: every field has its effect, or is refused by name."""

from __future__ import annotations

import json
import logging

import pytest
from wire import USER, events, joined, post, whole

import lily
from lily.testing import scripted

fields = pytest.importorskip("lily.server.fields")

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    },
}
NEWS = {"type": "function", "function": {"name": "get_news", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}}
OSLO = "<tool_call>\n<function=get_time>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"


def prompt(client):
    """The text that the newest request became."""
    return client.model.decode(client.model.sessions._newest().tokens)


# With the official client, on the shipped model


def test_a_chat(client, demo):
    question = [{"role": "user", "content": "What is a young dog called?"}]
    answer = client.chat.completions.create(model="default", messages=question, temperature=0)
    same = demo.chat(question, temperature=0)
    assert answer.choices[0].message.content == same.content == "A young dog is called a puppy."
    assert answer.choices[0].message.reasoning_content == same.reasoning and answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(demo.apply_chat_template(question, tokenize=True))
    assert answer.usage.completion_tokens == len(same.tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == same.usage.reasoning_tokens


def test_a_stream(client):
    question = [{"role": "user", "content": "What is a young cat called?"}]
    stream = client.chat.completions.create(
        model="default", messages=question, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "A young cat is called a kitten."
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices and all(chunk.usage is None for chunk in chunks[:-1])


def test_a_round_with_a_tool(client):
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.chat.completions.create(model="default", messages=messages, tools=[weather], temperature=0)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 20 degrees."}]
    second = client.chat.completions.create(model="default", messages=messages, tools=[weather], temperature=0)
    assert "Oslo" in second.choices[0].message.content and second.choices[0].finish_reason == "stop"
    # Nothing of the first turn is read again.
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens


@pytest.mark.parametrize("thinking", [True, False])
def test_json_by_a_schema(client, thinking):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"total": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["total"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Boxes: 4 rows of 9, minus 5?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}},
        temperature=0,
        max_tokens=120,
        extra_body={"enable_thinking": thinking},
    )
    message = answer.choices[0].message
    assert set(json.loads(message.content)) == {"total"} and "{" not in (getattr(message, "reasoning_content", None) or "")


def test_logprobs_belong_to_the_content(client, demo):
    question = [{"role": "user", "content": "What is a young dog called?"}]
    for kwargs in ({}, {"stream": True}):
        answer = client.chat.completions.create(model="default", messages=question, temperature=0, logprobs=True, top_logprobs=2, **kwargs)
        choices = [c.choices[0] for c in answer] if kwargs else [answer.choices[0]]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "A young dog is called a puppy."
        assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in entries)
        assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in entries)
        assert all(sum(2.718281828**top.logprob for top in entry.top_logprobs) <= 1.0001 for entry in entries)
    same = demo.chat(question, temperature=0, logprobs=2)
    assert entries[0].logprob == pytest.approx(next(e.logprob for e in same.logprobs if demo.decode([e.token]) == "A"), abs=1e-3)


def test_a_named_error(client):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError, match="demo, default"):
        client.chat.completions.create(model="gpt-4o", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=USER, temperature="hot")
    assert caught.value.param == "temperature"


# Each field


def test_the_fields_of_sampling_reach_the_device(serving):
    client = serving("a b c d e f g h")
    token = client.model.encode(" b")[0]
    assert post(client, max_tokens=3).json()["choices"][0]["message"]["content"] == "a b c"
    banned = post(client, max_tokens=3, logit_bias={str(token): -100}).json()["choices"][0]["message"]["content"]
    assert banned.startswith("a") and " b" not in banned
    texts = [post(client, temperature=50, seed=seed, max_tokens=6).json()["choices"][0]["message"]["content"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    fresh = {post(client, temperature=50, max_tokens=6).json()["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(fresh) > 1
    forbidden = scripted("a a a a", repeat=True)
    client = serving(forbidden)
    assert post(client, max_tokens=4, presence_penalty=30).json()["choices"][0]["message"]["content"] != "a a a a"
    assert post(client, max_tokens=4, temperature=50, top_k=1).json()["choices"][0]["message"]["content"] == "a a a a"


def test_what_a_request_leaves_open_is_the_servers_then_the_checkpoints(serving):
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    client = serving(scripted("a b", generation_config=config), sampling=lily.Sampling(temperature=0.5))
    ask = {"input": "2+2?", "reasoning": {"effort": "none"}}
    for given, used in (({}, (0.5, 0.95)), ({"temperature": 0}, (0, 0.95)), ({"top_p": 0.5}, (0.5, 0.5))):
        answer = post(client, "/v1/responses", **ask, **given).json()
        assert (answer["temperature"], answer["top_p"]) == used
    listed = client.get("/v1/models").json()["data"][0]["sampling"]
    assert listed == {"temperature": 0.5, "top_p": 0.95, "top_k": 20}


def test_both_limits_work_and_the_new_one_wins(serving):
    client = serving("a b c d e f g h i j k l")
    for limits, count in (({"max_tokens": 5}, 5), ({"max_completion_tokens": 4}, 4), ({"max_completion_tokens": 3, "max_tokens": 9}, 3)):
        answer = post(client, **limits).json()
        assert answer["usage"]["completion_tokens"] == count and answer["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_the_context_is_the_limit(serving):
    client = serving(scripted("never ", repeat=True, max_context=512))
    answer = post(client).json()
    assert answer["usage"]["total_tokens"] == 512 and answer["choices"][0]["finish_reason"] == "length"


def test_stops(serving):
    client = serving("fine\n\nUser: x END")
    answer = post(client, stop=["\n\nUser:", "END"]).json()
    assert answer["choices"][0]["message"]["content"] == "fine" and answer["choices"][0]["finish_reason"] == "stop"
    assert post(client, stop="x").json()["choices"][0]["message"]["content"] == "fine\n\nUser: "


def test_several_answers(serving):
    client = serving("a b c d e f g h")
    answer = post(client, n=3, temperature=50, seed=5, max_tokens=6).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 18
    assert texts[1] == post(client, temperature=50, seed=6, max_tokens=6).json()["choices"][0]["message"]["content"]
    streamed = events(client, n=3, temperature=50, seed=5, max_tokens=6)
    assert [joined(streamed, i) for i in range(3)] == [whole(answer, i) for i in range(3)]


@pytest.mark.parametrize(
    "switch",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_every_way_of_leaving_the_thoughts_out(serving, switch):
    client = serving("Four.")
    answer = post(client, **{"enable_thinking": ..., **switch}).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Four.", "refusal": None}
    assert "<think>\n\n</think>\n\nFour." in prompt(client)


def test_cut_thoughts_are_no_content(serving):
    client = serving("Let me add 2 and")
    for answer in (
        whole(post(client, enable_thinking=..., max_tokens=5).json()),
        joined(events(client, enable_thinking=..., max_tokens=5)),
    ):
        assert answer[0]["content"] == "" and answer[0]["reasoning_content"] and answer[1] == ["length"]


@pytest.mark.parametrize(
    "choice, expected",
    [
        ("none", []),
        ("auto", ["get_time"]),
        ("required", ["get_time"]),
        ({"type": "function", "function": {"name": "get_time"}}, ["get_time"]),
    ],
)
def test_tool_choice(serving, choice, expected):
    # A forced call begins in the prompt, so the script begins behind it.
    begun = {"required": "get_time>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"}.get(
        choice if isinstance(choice, str) else "", OSLO if isinstance(choice, str) else OSLO.split("get_time>\n")[1]
    )
    client = serving(begun)
    message = post(client, tools=[TOOL, NEWS], tool_choice=choice).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == expected
    assert ("<tools>" in prompt(client)) is (choice != "none")
    if choice == "none":
        assert message["content"] == OSLO


def test_one_call_without_parallel_calls(serving):
    client = serving(f"{OSLO}\n{OSLO.replace('Oslo', 'Lima')}")
    for parallel, cities in ((None, ["Oslo", "Lima"]), (True, ["Oslo", "Lima"]), (False, ["Oslo"])):
        given = {} if parallel is None else {"parallel_tool_calls": parallel}
        answer = post(client, tools=[TOOL], **given).json()
        calls = answer["choices"][0]["message"]["tool_calls"]
        assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == cities
        assert len({call["id"] for call in calls}) == len(calls) and answer["choices"][0]["finish_reason"] == "tool_calls"


def test_the_prompt_is_counted_and_reused(serving):
    client = serving("Four.")
    for stream in (False, True):
        client.model.sessions.clear()
        usages = []
        for _ in range(2):
            if stream:
                usages.append(events(client, stream_options={"include_usage": True})[-2]["usage"])
            else:
                usages.append(post(client).json()["usage"])
        ids = client.model.apply_chat_template(USER, tokenize=True, enable_thinking=False)
        assert [usage["prompt_tokens"] for usage in usages] == [len(ids)] * 2
        assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 0 < usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert events(client, stream_options={})[-1] == "[DONE]"


def test_fields_that_change_nothing_are_accepted(serving):
    client = serving("Four.")
    same = {"user": "u", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k", "service_tier": "auto", "safety_identifier": "s"}
    assert post(client, **same, temperature=None, unknown=None).json()["choices"][0]["message"]["content"] == "Four."


def test_a_trimmed_conversation_is_answered(serving):
    client = serving("Five past twelve.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12:05"}]},
    ]
    assert post(client, messages=messages, tools=[TOOL]).status_code == 200
    assert "12:05" in prompt(client)


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "system", "content": "x", "reasoning_content": "y"}, *USER]}, "messages[0].reasoning_content"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c1"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [CALL | {"function": {**CALL["function"], "strict": True}}]}]},
        "messages[1].tool_calls[0].function.strict",
    ),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": "x"}, "presence_penalty"),
    ({"seed": -1}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 100}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"stop": 3}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]}, "tools[0].function.description"),
    ({"tools": [TOOL], "tool_choice": "get_tme"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "function": {"name": "get_time"}}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_time"}, "mode": "auto"}}, "tool_choice.mode"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_time", "x": 1}}}, "tool_choice.function.x"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": "get_time"}}, "tool_choice.function"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mode": "x"}}}, "response_format.json_schema.mode"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"preserve_thinkin": True}}, "chat_template_kwargs.preserve_thinkin"),
    ({"stream_options": {"include_all": True}}, "stream_options.include_all"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"functions": [{}]}, "functions"),
    ({"verbosity": "low"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"frequency_penalti": 1}, "frequency_penalti"),
]


@pytest.mark.parametrize("body, param", REFUSED, ids=[f"{i}-{param}" for i, (_, param) in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_name(serving, body, param):
    client = serving("x")
    content = json.dumps({"messages": USER, "enable_thinking": False} | body)
    for stream in (False, True):
        sent = json.dumps(json.loads(content) | {"stream": stream})
        response = client.post("/v1/chat/completions", content=sent, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"] == param and error["message"]
    assert len(client.model.sessions) == 0  # no work was done


@pytest.mark.parametrize(
    "path, body",
    [("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "2+2?"}), ("/v1/responses", {"input": "2+2?"})],
)
def test_options_of_a_stream_need_a_stream(serving, path, body):
    client = serving("x")
    for given in ({}, {"stream": False}):
        refused = post(client, path, **body, **given, stream_options={"include_obfuscation": False})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_options"
    assert post(client, path, **body, stream=True, stream_options={"include_obfuscation": False}).status_code == 200


def test_what_official_clients_add_to_messages_is_noted_once(serving, caplog):
    client = serving("Four.")
    fields._seen.clear()
    function = CALL["function"] | {"parsed_arguments": {"city": "Oslo"}}
    messages = [
        {"role": "user", "name": "rose", "content": "What time is it in Oslo?", "tool_calls": [], "reasoning_content": None},
        {"role": "assistant", "content": "", "parsed": {"a": 1}, "refusal": None, "tool_calls": [CALL | {"function": function}]},
        {"role": "tool", "tool_call_id": "c1", "name": "get_time", "content": "12:05"},
    ]
    with caplog.at_level(logging.INFO, "lily.server"):
        for _ in range(2):
            assert post(client, messages=messages, tools=[TOOL]).status_code == 200
    noted = [record.args[0] for record in caplog.records if "no effect" in record.message]
    assert sorted(noted) == ["messages[].name", "messages[].parsed", "messages[].tool_calls[].function.parsed_arguments"]


@pytest.mark.parametrize(
    "content, status, words",
    [
        (b"{", 400, "no JSON"),
        (b"", 400, "no JSON"),
        (b"\xff", 400, "no JSON"),
        (b"[]", 400, "a list"),
        (b'{"model": "default"}', 400, "messages is missing"),
        (b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "64 deep"),
        (b"[" * 100_000, 400, ""),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 5000 + b'"}]}', 413, "limit is 4096"),
        (b'{"temperature": 1e999, "messages": []}', 400, ""),
        (b'{"temperature": NaN, "messages": []}', 400, "no JSON"),
    ],
)
def test_bodies_that_are_no_request(serving, content, status, words):
    client = serving("x", max_body_bytes=4096 if status == 413 else 1 << 20)
    response = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status and words in response.json()["error"]["message"]
    assert post(client).status_code == 200


def test_a_body_without_a_length_is_limited_too(serving):
    client = serving("x", max_body_bytes=4096)
    response = client.post("/v1/chat/completions", content=iter([b" " * 3000] * 3), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_a_form_is_no_request(serving):
    response = serving("x").post("/v1/chat/completions", data={"messages": "x"})
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(serving):
    client = serving(scripted("x", max_context=64))
    error = post(client, messages=[{"role": "user", "content": "jar " * 200}]).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["limit"] == 64 < error["tokens"]


def test_a_failing_step_fails_one_request(serving):
    from lily import testing

    client = serving("It is 4.")
    testing.fail_at(client.model, 2, 0)
    response = post(client)
    assert response.status_code == 500 and response.json()["error"]["code"] == "device_error"
    assert post(client).json()["choices"][0]["message"]["content"] == "It is 4."
    assert client.model._native.in_flight == 0
