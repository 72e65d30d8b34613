"""Writes docs/api.md from the docstrings and signatures of the public names.

python docs/build_api.py           # writes the page
python docs/build_api.py --check   # fails when the page is out of date
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import lily
from lily.cli import cli

PAGE = Path(__file__).parent / "api.md"
SECTIONS = {
    "Models": ["Model"],
    "Chat": ["Message", "MessageDelta", "ToolCall", "ToolCallDelta"],
    "Server": ["serve"],
    "Sessions": ["Session", "Rewind", "SessionStore", "Reuse"],
    "Sampling": ["Sampling"],
    "Results": ["Generation", "Chunk", "TokenLogprob", "Usage", "Timing", "Score", "Ranked", "Memory"],
    "Planning and devices": ["plan", "Plan", "Profile", "devices", "DeviceInfo"],
    "Checkpoints": ["inspect", "Inspection", "ModelConfig", "Tokenizer"],
    "Errors": [
        "LilyError", "CheckpointError", "DeviceError", "GPUError", "OutOfMemoryError", "ContextOverflowError", "TemplateError", "MessageError",
        "SamplingError", "SessionMismatchError", "CancelledError",
    ],
}  # fmt: skip
HEAD = """# API

Made by `docs/build_api.py` from the docstrings; edit those.
Everything after the first argument is keyword-only, and every example runs in the test suite.
"""


def page() -> str:
    listed = [name for names in SECTIONS.values() for name in names]
    if sorted(listed) != sorted(lily.__all__):
        raise SystemExit(f"docs/build_api.py and lily.__all__ differ in {sorted(set(listed) ^ set(lily.__all__))}")
    parts = [HEAD]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}\n")
        for name in names:
            parts += entry(name, getattr(lily, name))
    return "\n".join(parts + command_line()).rstrip() + "\n"


def entry(name: str, value: Any) -> list[str]:
    if not inspect.isclass(value):
        return [f"### lily.{name}\n", signature(f"lily.{name}", value), text(value)]
    if issubclass(value, BaseException):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return [f"### lily.{name}({bases})\n", text(value)]
    parts = [f"### class lily.{name}\n", text(value)]
    if dataclasses.is_dataclass(value):
        parts.append("Fields: " + ", ".join(f"`{f.name}: {f.type}`" for f in dataclasses.fields(value)) + ".\n")
    members = [item for base in value.__mro__ if base.__module__.startswith("lily") for item in vars(base).items()]
    for attribute, member in members:
        if attribute.startswith("_"):
            continue
        if isinstance(member, property):
            kind = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
            parts += [f"#### {name}.{attribute}\n", f"`{attribute}: {kind}`\n", text(member)]
        elif isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member):
            function = inspect.unwrap(getattr(value, attribute))
            parts += [f"#### {name}.{attribute}\n", signature(f"{name}.{attribute}", function), text(function)]
    return parts


def signature(name: str, function: Any) -> str:
    """A call as a code block; annotations of results as written in the source."""
    words: list[str] = []
    for p in inspect.signature(function).parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        words.append(f"{star}{p.name}" + (f"={p.default!r}" if p.default is not p.empty else ""))
    result = inspect.signature(function).return_annotation
    arrow = "" if result in (inspect.Signature.empty, "None", "Any") else f" -> {result}"
    lines = textwrap.wrap(f"{name}({', '.join(words)}){arrow}", 120, subsequent_indent="    ", break_long_words=False)
    return "\n".join(["```python", *lines, "```", ""])


def text(value: Any) -> str:
    """A docstring with its examples as code blocks."""
    lines: list[str] = []
    example = False
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if line.startswith(">>>") and not example:
            lines.append("```python")
            example = True
        elif not line and example:
            lines.append("```")
            example = False
        lines.append(line)
    return "\n".join([*lines, "```"] if example else lines) + "\n"


def command_line() -> list[str]:
    parts = ["## Command line\n", f"{cli.help} Results go to stdout, everything else to stderr.\n"]
    listed: list[tuple[str, Any]] = []
    for name, command in cli.commands.items():
        listed += [(name, command), *((f"{name} {inner}", part) for inner, part in getattr(command, "commands", {}).items())]
    for name, command in listed:
        arguments = "".join(f" {p.name.upper()}" for p in command.params if p.param_type_name == "argument")  # type: ignore[union-attr]
        parts += [f"### lily {name}{arguments} [options]\n", f"{command.help}\n"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        if options:
            rows = [f"| `{', '.join(p.opts)}` | {p.help} |" for p in options]  # type: ignore[attr-defined]
            parts.append("\n".join(["| option | |", "|---|---|", *rows]) + "\n")
    return parts


if __name__ == "__main__":
    fresh = page()
    if "--check" in sys.argv:
        raise SystemExit(None if PAGE.read_text() == fresh else "docs/api.md is out of date: run python docs/build_api.py")
    PAGE.write_text(fresh)
