"""Request bodies: limited in size and depth, read as JSON, and checked against a structure."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from lily.server.errors import ApiError, bad_request
from lily.server.settings import Settings

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"Object (?P<how>contains unknown|missing required) field `(?P<name>.*)`")


async def json_object(request: Request, settings: Settings) -> dict[str, Any]:
    """The body as an object. Raises `ApiError` 400, 413 or 415."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body has type {kind!r}, expected application/json (curl: -H 'Content-Type: application/json')")
    limit = settings.max_body_bytes
    announced = request.headers.get("content-length", "")
    body = bytearray()
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(int(announced), limit)
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise _too_large(len(body), limit)
    except ClientDisconnect:
        raise ApiError(400, "the client went away while it sent the request") from None
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is no JSON: {error}", code="invalid_json") from error
    except RecursionError:
        raise _too_deep(settings.max_depth) from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is {_kind(value)}, expected an object")
    _check_depth(value, settings.max_depth)
    return value


def checked(structure: type[T], value: dict[str, Any]) -> T:
    """The object as a structure; a field that is null was not given. Raises `ApiError` 400, naming the field."""
    try:
        return msgspec.convert({name: field for name, field in value.items() if field is not None}, structure)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        assert found is not None
        what, place = found["what"], found["place"] or ""
        field = _FIELD.match(what)
        if field:
            path = f"{place}.{field['name']}" if place else field["name"]
            raise bad_request("is unknown here" if field["how"].startswith("contains") else "is missing", path) from error
        raise bad_request(f"is wrong: {what.replace('`', '')}", place or None) from error


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes or more, the limit is {limit}", code="body_too_large")


def _too_deep(limit: int) -> ApiError:
    return bad_request(f"the body is nested more than {limit} deep", code="too_deep")


def _check_depth(value: Any, limit: int) -> None:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, (dict, list))
        ]  # fmt: skip
        if not level:
            return
    raise _too_deep(limit)


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)
