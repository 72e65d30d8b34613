"""A text, a stream, a session with two forks, and a score, with the model that ships with the package.

python examples/quickstart.py
"""

from __future__ import annotations

import lily


def main() -> None:
    with lily.Model.demo() as model:
        print("# generate")
        answer = model.generate("The capital of France is", max_tokens=8, temperature=0)
        print(f"The capital of France is{answer}")
        print(f"({answer.timing}; {answer.finish_reason})")

        print("\n# stream: the same seed, the same text")
        for chunk in model.stream("Once upon a time", max_tokens=48, temperature=0.7, seed=1):
            print(chunk.text, end="", flush=True)
        print()

        print("\n# a question, through the checkpoint's chat template")
        question = [{"role": "user", "content": "Tom has a red ball. What colour is Tom's ball?"}]
        prompt = model.apply_chat_template(question, enable_thinking=False)
        print(model.generate(prompt, max_tokens=32, temperature=0))

        print("\n# a session: read once, go on twice")
        session = model.prefill("Tom had a red ball and Anna had a blue kite.")
        for name in (" Tom", " Anna"):
            with session.fork() as branch:
                answer = branch.generate(name, max_tokens=12, temperature=0)
                print(f"...{name}{answer}   (tokens that were already there: {answer.usage.reused_tokens})")

        print("\n# score: how likely is a text?")
        for text in ("Once upon a time, there was a little boy.", "Little once, a boy time was upon there a."):
            print(f"{model.score(text).perplexity:10.2f}  {text}")


if __name__ == "__main__":
    main()
