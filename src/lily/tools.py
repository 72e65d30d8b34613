"""Tools that a chat may call: declared as Python functions or as JSON, chosen, and their argument types."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lily.errors import MessageError

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_NAME = re.compile(r"[^\s<>]+")


@dataclass(frozen=True)
class Tool:
    """A declared tool: its name, the JSON schema of its arguments, and the declaration as a template shows it."""

    name: str
    parameters: Mapping[str, Any]
    declaration: Mapping[str, Any]


def declared(tools: Iterable[Any] | None) -> list[Tool]:
    """Tools from functions and OpenAI objects. Raises `MessageError` with the place, as in `tools[0].function.name`."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise TypeError("tools must be a list of functions or of objects {'type': 'function', 'function': {...}}")
    found: list[Tool] = []
    for i, given in enumerate(tools):
        tool = _from_function(given, f"tools[{i}]") if callable(given) else _from_json(given, f"tools[{i}]")
        if any(tool.name == other.name for other in found):
            raise MessageError(f"is {tool.name!r} a second time", path=f"tools[{i}].function.name")
        found.append(tool)
    return found


def chosen(choice: Any, tools: Sequence[Tool]) -> tuple[list[Tool], list[str]]:
    """The tools to render and parse, and the names of which the answer must call one (none for a free choice)."""
    if choice is None or choice == "auto":
        return list(tools), []
    if choice == "none":
        return [], []
    if choice == "required":
        if not tools:
            raise MessageError("is 'required', but there are no tools", path="tool_choice")
        return list(tools), [tool.name for tool in tools]
    name = getattr(choice, "__name__", None) if callable(choice) else choice
    if isinstance(choice, Mapping):
        name = _chosen_name(choice)
    names = [tool.name for tool in tools]
    if name not in names:
        expected = f"'auto', 'none', 'required' or one of the tools ({', '.join(names) or 'there are none'})"
        raise MessageError(f"is {str(choice)[:80]!r}, expected {expected}", path="tool_choice")
    return list(tools), [str(name)]


def _chosen_name(choice: Mapping[str, Any]) -> Any:
    """The name in `{"type": "function", "function": {"name": ...}}`, or in the same without the inner object."""
    if choice.get("type") not in (None, "function"):
        raise MessageError(f"is {str(choice['type'])[:80]!r}, expected 'function'", path="tool_choice.type")
    levels = [("tool_choice", choice, ("type", "name"))]
    if isinstance(choice.get("function"), Mapping):
        levels = [("tool_choice", choice, ("type", "function")), ("tool_choice.function", choice["function"], ("name",))]
    for path, given, keys in levels:
        for key, value in given.items():
            if key not in keys and value is not None:
                raise MessageError(f"is unknown here, expected {' and '.join(keys)}", path=f"{path}.{key}")
    return levels[-1][1].get("name")


def forced_opening(names: Sequence[str]) -> str:
    """The text with which an answer begins that must call one of the tools; "" for none."""
    opening = "<tool_call>\n<function="
    return "" if not names else f"{opening}{names[0]}>\n" if len(names) == 1 else opening


def forced_choices(names: Sequence[str], tools: Sequence[Tool]) -> list[str]:
    """The ways in which a call may go on behind its forced opening: to a first parameter, or to its end."""
    found: list[str] = []
    for tool in tools:
        if tool.name in names:
            head = f"{tool.name}>\n" if len(names) > 1 else ""
            properties = tool.parameters.get("properties")
            keys = list(properties) if isinstance(properties, Mapping) else []
            found += [f"{head}<parameter={key}>\n" for key in keys]
            if not keys or not tool.parameters.get("required"):
                found.append(f"{head}</function>\n</tool_call>")
    return found


def convert(raw: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """An argument's text as the value that its schema asks for; text that does not fit stays text."""
    kinds = kinds_of(schema, root)
    text = raw.strip()
    if "null" in kinds and text in ("null", "None"):
        return None
    if "boolean" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kinds & {"integer", "number", "object", "array"}:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return raw
        if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
            value = int(value)
        if _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds):
            return value
    return raw


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; without a word about types, text."""
    if not isinstance(schema, Mapping) or depth > 16:
        return frozenset({"string"})
    if "type" in schema:
        kind = schema["type"]
        return frozenset([kind] if isinstance(kind, str) else map(str, kind))
    if isinstance(schema.get("$ref"), str):
        return kinds_of(_resolve(schema["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), Sequence):
            return frozenset().union(*(kinds_of(option, root, depth + 1) for option in schema[word])) or frozenset({"string"})
    values = schema["enum"] if isinstance(schema.get("enum"), Sequence) else [schema["const"]] if "const" in schema else []
    if values:
        return frozenset(_kind(value) for value in values)
    return frozenset({"object"}) if "properties" in schema else frozenset({"array"}) if "items" in schema else frozenset({"string"})


def _kind(value: Any) -> str:
    for kind in (bool, int, float, str, type(None)):
        if isinstance(value, kind):
            return _SCALARS[kind]
    return "object" if isinstance(value, Mapping) else "array"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _from_json(given: Any, path: str) -> Tool:
    if not isinstance(given, Mapping):
        raise TypeError(f"{path} is {type(given).__name__}, expected a function or an object {{'type': 'function', ...}}")
    nested = isinstance(given.get("function"), Mapping)
    function = given["function"] if nested else {name: value for name, value in given.items() if name != "type"}
    if given.get("type", "function") != "function":
        raise MessageError(f"is {given['type']!r}, expected 'function'", path=f"{path}.type")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MessageError(f"is {name!r}, expected a name without spaces, < and >", path=f"{path}.function.name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise MessageError(f"is {type(parameters).__name__}, expected a JSON schema", path=f"{path}.function.parameters")
    return Tool(name, parameters, given if nested else {"type": "function", "function": function})


def _from_function(function: Callable[..., Any], path: str) -> Tool:
    """The schema of a function's signature; descriptions from its docstring (`Args:` or `:param name:`)."""
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # an annotation that only a type checker resolves
        hints = {}
    name = getattr(function, "__name__", type(function).__name__)
    if not _NAME.fullmatch(name):
        raise MessageError(f"is {name!r}: give the function a name", path=f"{path}.function.name")
    summary, notes = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        schema = _schema(hints.get(parameter.name, Any), f"{path}.function.parameters.{parameter.name}")
        if parameter.name in notes:
            schema["description"] = notes[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    body = {"name": name, **({"description": summary} if summary else {}), "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": body})


def _schema(hint: Any, path: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, inspect.Parameter.empty):
        return {}
    if isinstance(hint, type) and hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is typing.Annotated:
        return _schema(arguments[0], path)
    if origin is typing.Literal:
        kinds = {_kind(value) for value in arguments}
        return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin in (typing.Union, types.UnionType):
        options = [_schema(option, path) for option in arguments]
        simple = all(set(option) == {"type"} for option in options)
        return {"type": [option["type"] for option in options]} if simple else {"anyOf": options}
    if hint in (list, tuple, set) or origin in (list, tuple, set, Sequence, Iterable):
        inner = next((argument for argument in arguments if argument is not ...), Any)
        return {"type": "array", "items": _schema(inner, path)}
    if hint is dict or origin in (dict, Mapping):
        return {"type": "object"}
    raise MessageError(f"has type {hint!r}; give the tool as a JSON schema instead", path=path)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what is said about each parameter."""
    notes = {name: note.strip() for name, note in re.findall(r"^:param (?:[^:\n]* )?(\w+):\s*(.*)$", text, re.MULTILINE)}
    description, _, section = re.split(r"^:\w+", text, maxsplit=1, flags=re.MULTILINE)[0].partition("\nArgs:\n")
    last = ""
    for line in section.splitlines():
        if line.strip() and not line.startswith(" "):
            break  # the next section
        entry = re.match(r"\s{1,8}(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if entry:
            last = entry[1]
            notes[last] = entry[2].strip()
        elif last and line.strip():
            notes[last] = f"{notes[last]} {line.strip()}".strip()
    return re.split(r"\n(?:Returns|Raises|Examples?):\n", description)[0].strip(), notes
