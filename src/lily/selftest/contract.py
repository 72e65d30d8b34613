"""What metal/include/args.h states, read from the file: the argument structs of the kernels and the access of each of their buffers."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.msl import kernel_root

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

CONSTANTS: dict[str, int] = {}


def _text() -> str:
    return (kernel_root() / "include/args.h").read_text(encoding="utf-8")


@lru_cache
def structs() -> dict[str, type]:
    """Every struct of args.h as a ctypes.Structure; fills `CONSTANTS` too."""
    text = _text()
    for name, value in re.findall(r"#define (LILY_\w+) (\d+)u?\b", text):
        CONSTANTS[name] = int(value)
    text = re.sub(r"//[^\n]*", "", text)
    found: dict[str, type] = {}
    basic = {"uint32_t": ctypes.c_uint32, "float": ctypes.c_float}
    for body, name in re.findall(r"typedef struct \{(.*?)\}\s*(\w+);", text, re.S):
        fields = []
        for declaration in body.split(";"):
            declaration = declaration.strip()
            if not declaration:
                continue
            kind, rest = declaration.split(None, 1)
            base = basic.get(kind) or found[kind]
            for item in rest.split(","):
                m = re.fullmatch(r"\s*(\w+)(?:\[(\w+)\])?\s*", item)
                assert m is not None, item
                count = m[2] and (CONSTANTS.get(m[2]) or int(m[2]))
                fields.append((m[1], base * count if count else base))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def make(name: str, **values: Any) -> Any:
    """A struct of args.h; nested structs are given as dicts, arrays as lists."""
    s = structs()[name]()
    for key, value in values.items():
        field = getattr(s, key)
        if isinstance(field, ctypes.Structure):
            for k, v in value.items():
                setattr(field, k, v)
        elif isinstance(field, ctypes.Array):
            for i, v in enumerate(value):
                if isinstance(v, dict):
                    for k, w in v.items():
                        setattr(field[i], k, w)
                else:
                    field[i] = v
        else:
            assert key in dict(s._fields_), key
            setattr(s, key, value)
    return s


def step(**values: Any) -> Array:
    """The step record as bytes."""
    return np.frombuffer(bytes(make("LilyStep", **values)), np.uint8).copy()


@lru_cache
def contracts() -> dict[str, str]:
    """The access of each buffer of each kernel as args.h states it: r, w, or b for both."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?!//)", _text()):
        text = " ".join(re.sub(r"^//", "", block.strip(), flags=re.M).split())
        for name, body in re.findall(r"(\w+): (0 .*?)(?=\w+: 0 |\Z)", text):
            body = body.split("grid:")[0]
            access, at = "", 0
            for m in re.finditer(r"(?:^|(?<=, ))(\d+)(?:-(\d+)|\.\.? \d+\+(\d+)|\+3s:)? ?(.*?)(?=, \d+[ .\-+]|\Z)", body):
                if int(m[1]) != at:
                    continue
                letter = "b" if "(rw" in m[4] else "w" if "(w" in m[4] else "r"
                count = int(m[2]) - at + 1 if m[2] else int(m[3]) if m[3] else 1
                access, at = access + letter * count, at + count
            found[name] = access
    return found
