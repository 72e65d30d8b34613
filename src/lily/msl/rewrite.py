"""A kernel source for one compiler: Apple's, the strict check's, the simulator's or CUDA's. Lines stay where they were."""

from __future__ import annotations

from typing import Any

from lily.msl.source import Unit
from lily.msl.structure import BUILTINS, SPACES, Declaration, declarations, flat, functions, significant
from lily.msl.tokens import Token, closing, plain

MODES = ("apple", "strict", "sim", "cuda")


def rewritten(unit: Unit, mode: str, storage: str = "bfloat16") -> str:
    """The source text for `mode`. `storage` "float32" defines LILY_STORAGE_FLOAT32 at its top."""
    edits = _Edits()
    found = declarations(significant(unit))
    kernels = {d.name: d for d in flat(found) if d.kind == "kernel"}
    for d in flat(found):
        if d.kind == "instantiation":
            edits.replace(d.head, _instantiate(d, kernels.get(d.name), mode))
        elif d.kind == "function_constant" and mode != "apple":
            edits.replace(d.head, f"LILY_FC({d.type}, {d.name}, {d.index})")
        elif d.kind == "table" and mode in ("sim", "cuda"):
            _table(d, edits)
    if mode != "apple":
        for _, d in functions(found):
            if d.kind == "kernel":
                _kernel(d, edits, mode)
            if mode == "cuda":
                for t in d.head:
                    if t.text == "inline":
                        edits.swap(t, "LILY_INLINE")
        _threadgroup_variables(found, edits)
        if mode == "strict":
            _pointer_casts(significant(unit), edits)
        else:
            _spaces(unit, edits)
    head = [f"#include <{name}>\n" for name in unit.system]
    if storage == "float32":
        head.insert(0, "#define LILY_STORAGE_FLOAT32 1\n")
    begin, end = ([], []) if mode == "apple" else (["LILY_UNIT_BEGIN\n"], ["LILY_UNIT_END\n"])
    return "".join(head + begin + [edits.text(t) for t in unit.tokens] + end)


def description(unit: Unit) -> dict[str, Any]:
    """Kernels, function constants and instantiations as plain values."""
    found = flat(declarations(significant(unit)))
    return {
        "file": unit.name,
        "kernels": [
            {
                "name": k.name,
                "line": k.line,
                "template": plain(k.template).strip(),
                "parameters": [
                    {"name": p.name, "type": p.type, "attribute": p.attribute, "index": p.index, "writable": p.writable, "space": p.space}
                    for p in k.parameters
                ],
            }
            for k in found
            if k.kind == "kernel"
        ],
        "constants": [{"name": d.name, "type": d.type, "index": d.index} for d in found if d.kind == "function_constant"],
        "instantiations": [
            {"host_name": d.host_name, "kernel": d.name, "arguments": d.arguments, "line": d.line}
            for d in found
            if d.kind == "instantiation"
        ],
    }


class _Edits:
    """Replacements by token; the white space before a token always stays, and with it every line."""

    def __init__(self) -> None:
        self._text: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._after: dict[int, str] = {}

    def swap(self, token: Token, text: str) -> None:
        self._text[id(token)] = text

    def before(self, token: Token, text: str) -> None:
        self._before[id(token)] = self._before.get(id(token), "") + text

    def after(self, token: Token, text: str) -> None:
        self._after[id(token)] = text

    def replace(self, tokens: list[Token], text: str) -> None:
        self.swap(tokens[0], text)
        for token in tokens[1:]:
            self.swap(token, "")

    def text(self, token: Token) -> str:
        if token.kind == "directive" and token.text.replace(" ", "") == "#pragmaonce":
            return token.space
        key = id(token)
        text = self._text.get(key, token.text)
        return token.space + self._before.get(key, "") + text + self._after.get(key, "")


def _instantiate(d: Declaration, kernel: Declaration | None, mode: str) -> str:
    function = f"{d.name}<{d.arguments}>" if d.arguments else d.name
    end = "" if d.last is not None and d.last.text == ";" else ";"
    if mode in ("sim", "cuda"):
        return f'LILY_REGISTER({d.host_name}, {d.name}_bindings, "{d.file}", {d.line}, {function}){end}'
    if kernel is None or not kernel.template:
        return ""  # published by its own name
    if mode == "strict":
        return f"template decltype({function}) {function}{end}"
    return f'template [[host_name("{d.host_name}")]] [[kernel]] decltype({function}) {function}{end}'


def _kernel(d: Declaration, edits: _Edits, mode: str) -> None:
    if mode in ("sim", "cuda"):
        rows = []
        for p in d.parameters:
            kind = p.attribute if p.attribute in BUILTINS else "buffer"
            rows.append(f'{{lily::bind_{kind}, {max(p.index, 0)}, "{p.name}", {"true" if p.writable else "false"}}}')
        edits.before(d.first, f"struct {d.name}_bindings {{ static constexpr lily::bind b[] = {{{', '.join(rows)}}}; }}; ")
    for t in d.head:
        if t.text == "kernel":
            edits.swap(t, "LILY_KERNEL_FUNCTION")
    for p in d.parameters:
        for inner in p.attributes:
            start = next(i for i, t in enumerate(d.head) if t is inner[0]) - 1
            edits.replace(d.head[start : closing(d.head, start) + 1], "")


def _table(d: Declaration, edits: _Edits) -> None:
    first = True
    for t in d.head:
        if t.text == "constant":
            edits.swap(t, "LILY_TABLE" if first else "")
            first = False
    if d.head[0].text != "constant":  # `constexpr constant`: the macro goes first
        for t in d.head:
            if t.text == "constant":
                edits.swap(t, "")
        edits.before(d.head[0], "LILY_TABLE ")


def threadgroup_variables(body: list[Token]) -> list[tuple[int, int, int, int]]:
    """Threadgroup variables of a function body: (index of `threadgroup`, of the name, of the end, depth of braces). A pointer is none."""
    found, depth, i = [], 0, 0
    while i < len(body):
        text = body[i].text
        if text == "{":
            depth += 1
        elif text == "}":
            depth -= 1
        elif text == "threadgroup" and (i == 0 or body[i - 1].text in (";", "{", "}", ")")):
            end, pointer = i, False
            while end < len(body) and body[end].text not in (";", "=", "{"):
                pointer = pointer or body[end].text in ("*", "&")
                end = closing(body, end) + 1 if body[end].text in ("(", "[") else end + 1
            if not pointer:
                name = end
                while body[name - 1].text == "]":
                    depth_brackets = 0
                    name -= 1
                    while True:
                        depth_brackets += {"]": 1, "[": -1}.get(body[name].text, 0)
                        if depth_brackets == 0:
                            break
                        name -= 1
                found.append((i, name - 1, end, depth))
            i = end
            continue
        i += 1
    return found


def _threadgroup_variables(found: list[Declaration], edits: _Edits) -> None:
    for _, d in functions(found):
        for start, name, end, _depth in threadgroup_variables(d.body):
            type_text = plain(d.body[start + 1 : name]).strip()
            dims = plain(d.body[name + 1 : end]).strip()
            edits.replace(d.body[start:end], f"LILY_TG(({type_text}), {d.body[name].text}, {dims})")


def _pointer_casts(tokens: list[Token], edits: _Edits) -> None:
    """`(device const uint4*)p` becomes `lily::pointer_cast<device const uint4*>()->*p`: as tight as a cast, and its spaces can be compared."""
    for start, end in pointer_casts(tokens):
        edits.swap(tokens[start], "lily::pointer_cast<")
        edits.swap(tokens[end], ">()->*")


def pointer_casts(tokens: list[Token]) -> list[tuple[int, int]]:
    """Brackets of C-style casts to a pointer with an address space."""
    found = []
    for i, t in enumerate(tokens):
        if t.text != "(" or i + 1 >= len(tokens) or tokens[i + 1].text not in SPACES + ("const",):
            continue
        end = closing(tokens, i)
        inner = [x.text for x in tokens[i + 1 : end]]
        if end + 1 >= len(tokens) or not any(s in inner for s in SPACES) or inner[-1] not in ("*", "const"):
            continue
        following = tokens[end + 1]
        if "*" in inner and (following.kind in ("name", "number") or following.text in ("(", "&", "*")):
            found.append((i, end))
    return found


def _spaces(unit: Unit, edits: _Edits) -> None:
    """Takes the address spaces out: C++ on a CPU or a GPU of another kind has one."""
    for i, t in enumerate(unit.tokens):
        if t.kind == "directive":
            continue
        if id(t) in edits._text:
            edits.swap(t, _without_spaces(edits._text[id(t)]))
        elif t.kind == "name" and t.text in ("device", "thread", "threadgroup"):
            edits.swap(t, "")
        elif t.kind == "name" and t.text == "constant":
            following = unit.tokens[i + 1].text if i + 1 < len(unit.tokens) else ""
            edits.swap(t, "" if following == "const" else "const")


def _without_spaces(text: str) -> str:
    """LILY_TG's type and the arguments of an instantiation may name address spaces as well."""
    words = []
    for word in text.split(" "):
        words.append("const" if word == "constant" else "" if word in ("device", "thread") else word)
    return " ".join(words)
