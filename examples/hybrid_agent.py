"""Two models, one of them private: a cloud model plans, a local model works on your files. What leaves the machine is printed.

    python examples/hybrid_agent.py FOLDER "Which invoice is unpaid?" --cloud-url https://api.openai.com/v1 --cloud-model MODEL

The cloud model sees the question and what the tools are called, never a file's name or content: it answers with steps. The
local model follows them, with tools that reach into FOLDER and nowhere else. Needs lily-inference[server] and openai.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lily

PLANNER = (
    "You plan for an assistant that works on private files which you never see. It has these tools: {tools}. "
    "Answer with at most five short steps, one on a line, and nothing else."
)
WORKER = "You answer questions about the user's files with the tools that you have. Follow the plan. Be brief."
ROUNDS = 8


def file_tools(folder: Path) -> list[Callable[..., str]]:
    """Tools that read the folder; a path that leads out of it is refused."""
    root = folder.resolve()

    def list_files() -> str:
        """List the files."""
        return "\n".join(sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()))

    def read_file(name: str) -> str:
        """Read a file.

        Args:
            name: The file's name, as list_files shows it.
        """
        try:
            path = (root / name).resolve()
            found = path.is_relative_to(root) and path.is_file()
        except ValueError:  # a NUL in the name
            found = False
        if not found:
            return f"There is no file {name!r}."
        return path.read_text(encoding="utf-8", errors="replace")[:20_000]

    return [list_files, read_file]


def plan(cloud: Any, model: str, question: str, tools: Sequence[Callable[..., str]], show: Callable[[str], None]) -> str:
    """The cloud model's steps. Everything that is sent is shown first."""
    names = ", ".join(f"{tool.__name__} ({(tool.__doc__ or '').splitlines()[0]})" for tool in tools)
    messages = [{"role": "system", "content": PLANNER.format(tools=names)}, {"role": "user", "content": question}]
    for message in messages:
        show(f"leaves this machine: {message['role']}: {message['content']}")
    return cloud.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""


def work(local: lily.Model, question: str, steps: str, tools: Sequence[Callable[..., str]], show: Callable[[str], None]) -> str:
    """The local model's answer; its tools run here."""
    by_name = {tool.__name__: tool for tool in tools}
    messages: list[Any] = [{"role": "system", "content": f"{WORKER}\n\nPlan:\n{steps}"}, {"role": "user", "content": question}]
    for _ in range(ROUNDS):
        reply = local.chat(messages, tools=list(tools), max_tokens=2000)
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content
        for call in reply.tool_calls:
            show(f"stays here: {call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})")
            try:
                result = by_name[call.name](**call.arguments)
            except (TypeError, OSError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "No answer after as many rounds as are allowed."


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    import openai

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--local", help="directory or Hub id of the local model; the shipped one when left out")
    parser.add_argument("--cloud-url", required=True, help="any OpenAI-compatible server; its key is in CLOUD_API_KEY")
    parser.add_argument("--cloud-model", required=True)
    given = parser.parse_args(arguments)
    tools = file_tools(given.folder)
    with openai.OpenAI(base_url=given.cloud_url, api_key=os.environ.get("CLOUD_API_KEY", "none")) as cloud:
        steps = plan(cloud, given.cloud_model, given.question, tools, print)
    print(f"the plan:\n{steps}")
    with lily.Model.from_pretrained(given.local) if given.local else lily.Model.demo() as local:
        print(work(local, given.question, steps, tools, print))


if __name__ == "__main__":
    main()
