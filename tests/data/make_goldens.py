"""Writes demo/goldens.json: greedy answers of the shipped model, with the smallest margin between the best two tokens of a step.

    python tests/data/make_goldens.py

The answers are the engine's own, so they guard against change, not against error. Prompts were chosen so that every margin
exceeds 0.5 logits, far more than what a device or a build may differ by.
"""

from __future__ import annotations

import json
from pathlib import Path

import lily

HERE = Path(__file__).parent / "demo"
# The start of a held-out text, and how many of its characters are the prompt.
CUTS = (
    ("There was once a child called Dora", 430),
    ("bee or a lion", 511),
    ("All summer the turtle", 248),
)
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
        },
    },
}


def margin(answer: lily.Generation) -> float:
    """The smallest difference of the two best logits over the steps."""
    assert answer.logprobs is not None
    return min(entry.top[0][1] - entry.top[1][1] for entry in answer.logprobs)


def main() -> None:
    model = lily.Model.demo(device="cpu:float32", progress=False)
    lines = (HERE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [entry["text"] for entry in map(json.loads, lines) if entry["domain"] == "synthetic"]

    def answer(prompt: str, tokens: int) -> dict[str, object]:
        found = model.generate(prompt, max_tokens=tokens, temperature=0, logprobs=2)
        return {"max_tokens": tokens, "text": found.text, "finish_reason": found.finish_reason, "margin": round(margin(found), 2)}

    prompts = [next(text for text in texts if phrase in text)[:cut] for phrase, cut in CUTS]
    goldens = {
        "note": "Greedy answers of the engine itself: a regression test. Made by make_goldens.py.",
        "texts": [{"prompt": prompt, **answer(prompt, 16)} for prompt in prompts],
        "tool": {"messages": QUESTION, "tools": [TOOL], **answer(model.apply_chat_template(QUESTION, tools=[TOOL]), 64)},
    }
    (HERE / "goldens.json").write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
