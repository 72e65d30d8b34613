"""The options of a chat request, and the thinking switch in all its spellings."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from lily.errors import MessageError
from lily.progress import Progress
from lily.request import _DEFAULTS, F, Options, show_options

_log = logging.getLogger(__name__)

_NO_EFFORT = ("none", "minimal")
_RESERVED = ("messages", "tools", "add_generation_prompt")


class ChatOptions(Options, total=False):
    """The keyword arguments of `chat` and `stream_chat`."""

    tools: Sequence[Any] | None
    tool_choice: Any
    parallel_tool_calls: bool
    thinking: bool | None
    enable_thinking: bool | None
    reasoning_effort: str | None
    response_format: Mapping[str, Any] | None
    reuse_generated: bool
    drop_volatile: bool
    chat_template_kwargs: Mapping[str, Any] | None
    progress: Progress


_OWN: dict[str, Any] = {
    "tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "thinking": None, "enable_thinking": None, "reasoning_effort": None, "response_format": None,
    "reuse_generated": True, "drop_volatile": True, "chat_template_kwargs": None, "progress": None,
}  # fmt: skip


def takes_chat_options(function: F) -> F:
    """Show the options one by one in the signature of a function that takes them as `**options`."""
    return show_options(function, _OWN | _DEFAULTS, ChatOptions.__annotations__ | Options.__annotations__)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the chat, each with its value or default, and those of `generate`."""
    own = _OWN | {name: value for name, value in options.items() if name in _OWN}
    return own, {name: value for name, value in options.items() if name not in _OWN}


def thinking_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables, with all spellings of the thinking switch in one; `chat_template_kwargs` wins."""
    own = dict(given["chat_template_kwargs"] or {})
    for name in _RESERVED:
        if name in own:
            raise MessageError("is set by chat itself", path=f"chat_template_kwargs.{name}")
    switches = {name: _switch(given[name], name) for name in ("thinking", "enable_thinking") if given[name] is not None}
    if len(set(switches.values())) > 1:
        raise MessageError("and enable_thinking say opposite things; give one of them", path="thinking")
    result: dict[str, Any] = {}
    for effort, switch in (
        (given["reasoning_effort"], next(iter(switches.values()), None)),
        (own.get("reasoning_effort"), own.get("enable_thinking")),
    ):
        if effort is not None:
            if not isinstance(effort, str):
                raise MessageError(f"is {effort!r}, expected a word such as 'none' or 'low'", path="reasoning_effort")
            result["reasoning_effort"] = effort
            if effort in _NO_EFFORT:
                result["enable_thinking"] = False
        if switch is not None:
            result["enable_thinking"] = _switch(switch, "enable_thinking")
    if result.get("reasoning_effort") in _NO_EFFORT:
        del result["reasoning_effort"]  # templates know levels, not their absence
    return {name: value for name, value in own.items() if name not in ("enable_thinking", "reasoning_effort")} | result


def check_variables(variables: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse variables that the template does not read. The words about thinking are noted in the log instead: clients send
    them to any model."""
    for name in variables:
        if name in ("enable_thinking", "reasoning_effort"):
            if name not in known:
                _note_unread(name)
        elif name not in known:
            raise MessageError("is no variable of this checkpoint's chat template", path=f"chat_template_kwargs.{name}")


@cache
def _note_unread(name: str) -> None:
    """Once in the life of the process."""
    _log.info("%s is accepted and has no effect: the chat template does not read it", name)


def _switch(value: Any, name: str) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise MessageError(f"is {value!r}, expected True or False", path=name)
    return value
