"""Requests and event streams, and what they add up to."""

from __future__ import annotations

import json

USER = [{"role": "user", "content": "2+2?"}]


def post(client, path="/v1/chat/completions", **body):
    """A request of the one question, with thoughts off unless asked for."""
    if path == "/v1/chat/completions":
        body = {"messages": USER, "enable_thinking": False} | body
    return client.post(path, json={name: value for name, value in body.items() if value is not ...})


def events(client, path="/v1/chat/completions", **body):
    """The data of every event of a stream, parsed; the last one of a good stream is "[DONE]"."""
    response = post(client, path, stream=True, **body)
    assert response.status_code == 200, response.text
    return parse(response.text)


def parse(text):
    found = []
    for block in text.split("\n\n"):
        data = [line[len("data: ") :] for line in block.split("\n") if line.startswith("data: ")]
        if data:
            found.append(data[0] if data[0] == "[DONE]" else json.loads(data[0]))
    return found


def joined(chunks, index=0):
    """What the chunks of one choice add up to, in the form of a whole message, and its finish reasons."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for chunk in chunks:
        if chunk == "[DONE]" or "error" in chunk:
            continue
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    return message, reasons


def whole(answer, index=0):
    """A whole answer in the same form."""
    choice = answer["choices"][index]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [call["function"] for call in message.get("tool_calls", [])],
    }, [choice["finish_reason"]]
