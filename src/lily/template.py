"""The checkpoint's chat template, rendered in a sandbox as Hugging Face renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lily.config import read_json
from lily.errors import TemplateError
from lily.tokenizer import token_text


class ChatTemplate:
    """A Jinja template from messages to a prompt: `source` is its text, `tokens` its special-token variables."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.tokens = dict(tokens or {})

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate | None:
        """chat_template.jinja, else the one in tokenizer_config.json, else None."""
        path = directory / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        tokens = {name: text for name in config if name.endswith("_token") and (text := token_text(config[name]))}
        file = directory / "chat_template.jinja"
        try:
            source = file.read_text(encoding="utf-8") if file.is_file() else _from_config(config.get("chat_template"))
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"{file}: cannot be read ({error})") from error
        return None if source is None else cls(source, tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. Raises `TemplateError` with the template's own words when it refuses the messages."""
        if isinstance(messages, (str, bytes, Mapping)) or not all(isinstance(m, Mapping) for m in messages):
            raise TypeError("messages must be a list of objects such as {'role': 'user', 'content': 'Hi'}")
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise TypeError("tools must be a list of objects in the JSON form {'type': 'function', 'function': {...}}")
        context = self.tokens | {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled.render(context | variables)
        except TemplateError:
            raise
        except Exception as error:  # whatever a template does wrong, it is the template's or the messages' fault
            raise TemplateError(f"the chat template refused these messages: {error}") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads without setting them. Raises `TemplateError` when it does not parse."""
        from jinja2 import meta

        environment = self._compiled.environment
        return frozenset(meta.find_undeclared_variables(environment.parse(self.source))) - environment.globals.keys()

    @cached_property
    def _compiled(self) -> Any:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not parse: {error}") from error


def _from_config(value: Any) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the models saw it in training: unescaped characters and the order of insertion."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refused these messages: {message}")
