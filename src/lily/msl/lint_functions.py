"""Checks of functions: inline, no recursion, an address space on every pointer, no cast from one space to another."""

from __future__ import annotations

from lily.msl.source import Finding
from lily.msl.structure import SPACES, Declaration, Parameter, flat, functions
from lily.msl.tokens import Token, closing, closing_angle, plain

_STARTS = (";", "{", "}")
_SKIPPED = ("return", "else", "case", "do", "delete", "throw", "goto", "new", "sizeof")


def check(found: list[Declaration]) -> list[Finding]:
    out: list[Finding] = []
    named = functions(found)
    for name, d in named:
        out += _form(name, d)
        out += _header_spaces(name, d)
        out += _body_spaces(d)
        out += _casts(d)
    out += _overloads(named)
    out += _recursion(named)
    for d in flat(found):
        out += _fields(d)
        words = [t.text for t in d.head]
        if words[:1] == ["static_assert"]:
            out += _static_assert(d.head)
        if d.kind == "prototype" and "inline" not in words:
            out.append(Finding(d.file, d.line, "inline", f"{d.name} is not inline"))
    return out


def _at(token: Token, rule: str, text: str) -> Finding:
    return Finding(token.file, token.line, rule, text)


def _form(name: str, d: Declaration) -> list[Finding]:
    out = []
    if d.kind == "function" and "inline" not in [t.text for t in d.head]:
        out.append(Finding(d.file, d.line, "inline", f"{name} is not inline"))
    depth = 0
    for i, t in enumerate(d.body):
        depth += {"{": 1, "}": -1}.get(t.text, 0)
        starts = i == 0 or d.body[i - 1].text in _STARTS
        if starts and t.text == "static" or t.text == "static" and d.body[i - 1].text == "constant":
            out.append(_at(t, "static", f"static variable in {name}; a kernel keeps no state"))
        if starts and t.text in ("constant", "const") and _is_constant_variable(d.body, i):
            out.append(_at(t, "program-scope", f"a constant table in {name}; Metal has them at namespace scope only"))
        if t.text == "static_assert":
            out += _static_assert(d.body[i:])
        if (
            t.text == "("
            and i + 3 < len(d.body)
            and d.body[i + 1].text == "*"
            and d.body[i + 2].kind == "name"
            and d.body[i + 3].text == ")"
        ):
            if (
                i + 4 < len(d.body)
                and d.body[i + 4].text == "("
                and i
                and d.body[i - 1].kind == "name"
                and d.body[i - 1].text not in _SKIPPED
            ):
                out.append(_at(t, "function-pointer", f"{d.body[i + 2].text} is a pointer to a function"))
    return out


def _is_constant_variable(body: list[Token], at: int) -> bool:
    head = []
    for t in body[at:]:
        if t.text in (";", "=", "{", "("):
            break
        head.append(t.text)
    return "constant" in head and "*" not in head and "&" not in head


def _static_assert(tokens: list[Token]) -> list[Finding]:
    inner = tokens[2 : closing(tokens, 1)] if len(tokens) > 1 and tokens[1].text == "(" else []
    if inner and inner[-1].kind == "text":
        return []
    return [_at(tokens[0], "static-assert", "static_assert needs a message before C++17")]


def _header_spaces(name: str, d: Declaration) -> list[Finding]:
    out = []
    start = next((i for i, t in enumerate(d.head) if t.text == "("), len(d.head))
    for t in _bare_pointers(d.head[:start]):
        out.append(_at(t, "address-space", f"{name} returns a pointer or reference without an address space"))
    for p in d.parameters:
        for t in _bare_pointers(p.tokens):
            out.append(_at(t, "address-space", f"parameter {p.name} of {name} is a pointer or reference without an address space"))
            break
    return out


def _bare_pointers(tokens: list[Token]) -> list[Token]:
    """The `*` and `&` of a declaration that no address space stands before. `&&` counts as well; `operator*` does not."""
    space, out = False, []
    for i, t in enumerate(tokens):
        if t.text in SPACES:
            space = True
        elif t.text in ("*", "&", "&&") and not (i and tokens[i - 1].text == "operator"):
            if not space:
                out.append(t)
        elif t.text in ("=", "[", "("):
            break
    return out


def _fields(d: Declaration) -> list[Finding]:
    out = []
    if d.kind in ("struct", "variable", "table"):
        for child in d.children if d.kind == "struct" else [d]:
            if child.kind in ("variable", "table"):
                out += [
                    _at(t, "address-space", f"{child.name} is a pointer or reference without an address space")
                    for t in _bare_pointers(child.head)[:1]
                ]
    elif d.head and d.head[0].text in ("using", "typedef"):
        words = d.head[next((i for i, t in enumerate(d.head) if t.text == "="), 0) :]
        out += [_at(t, "address-space", "an alias of a pointer without an address space") for t in _bare_pointers(words[1:])[:1]]
    return out


def _body_spaces(d: Declaration) -> list[Finding]:
    """Pointers declared in statements, `for` heads and casts."""
    out = []
    body = d.body
    for i, t in enumerate(body):
        starts = (
            i == 0 or body[i - 1].text in _STARTS or (body[i - 1].text == "(" and i >= 2 and body[i - 2].text in ("for", "if", "while"))
        )
        if starts and t.kind == "name" and t.text not in _SKIPPED:
            star = _declared_pointer(body, i)
            if star is not None:
                name = next((x.text for x in body[i:] if x.kind == "name" and x.line >= star.line and body.index(x) > body.index(star)), "")
                out.append(_at(star, "address-space", f"{name} is a pointer or reference without an address space"))
        if t.text == "(" and (i == 0 or body[i - 1].kind != "name" or body[i - 1].text in _SKIPPED):
            inner = body[i + 1 : closing(body, i)]
            if len(inner) >= 2 and inner[-1].text == "*" and _type_end(inner, 0) == _stars_from(inner):
                out += [
                    _at(x, "address-space", f"cast to {plain(inner).strip()} names no address space") for x in _bare_pointers(inner)[:1]
                ]
        if t.text in ("static_cast", "reinterpret_cast", "as_type", "const_cast") and i + 1 < len(body) and body[i + 1].text == "<":
            inner = body[i + 2 : closing_angle(body, i + 1)]
            out += [
                _at(x, "address-space", f"{t.text} to {plain(inner).strip()} names no address space") for x in _bare_pointers(inner)[:1]
            ]
    return out


def _type_end(tokens: list[Token], at: int) -> int:
    """Index after a type's name: qualifiers, `a::b`, template arguments. `at` when there is none."""
    i = at
    while i < len(tokens) and tokens[i].text in ("const", "constexpr", "static", "unsigned", "signed", *SPACES):
        i += 1
    if i >= len(tokens) or tokens[i].kind != "name":
        return i if i > at and tokens[i - 1].text in ("unsigned", "signed") else at
    while True:
        i += 1
        if i < len(tokens) and tokens[i].text == "<":
            end = closing_angle(tokens, i)
            if end < 0:
                return at
            i = end + 1
        if i + 1 < len(tokens) and tokens[i].text == "::" and tokens[i + 1].kind == "name":
            i += 1
            continue
        break
    while i < len(tokens) and tokens[i].text in ("const", *SPACES):
        i += 1
    return i


def _stars_from(inner: list[Token]) -> int:
    i = len(inner)
    while i and inner[i - 1].text in ("*", "const"):
        i -= 1
    return i


def _declared_pointer(body: list[Token], at: int) -> Token | None:
    """The `*` or `&` of `T* name = ...` at the start of a statement, when no address space comes before it."""
    end = _type_end(body, at)
    if end == at or end >= len(body) or body[end].text not in ("*", "&", "&&"):
        return None
    after = end
    while after < len(body) and body[after].text in ("*", "&", "&&", "const"):
        after += 1
    if after + 1 >= len(body) or body[after].kind != "name" or body[after + 1].text not in ("=", ";", ",", ":", "[", "{"):
        return None
    return None if any(t.text in SPACES for t in body[at:end]) else body[end]


def _casts(d: Declaration) -> list[Finding]:
    """C-style casts whose operand is a variable of another address space. The strict check finds the others by their types."""
    spaces = {p.name: p.space for p in d.parameters if p.space and _is_pointer(p)}
    out = []
    for i, t in enumerate(d.body):
        if t.text in SPACES:
            name = _declared_name(d.body, i)
            if name:
                spaces[name] = t.text
        if t.text != "(":
            continue
        end = closing(d.body, i)
        inner = d.body[i + 1 : end]
        to = next((x.text for x in inner if x.text in SPACES), "")
        if not to or not inner or inner[-1].text not in ("*", "const") or end + 1 >= len(d.body):
            continue
        operand = end + 1
        while operand < len(d.body) and d.body[operand].text in ("(", "&"):
            operand += 1
        source = d.body[operand].text
        if operand + 1 < len(d.body) and d.body[operand + 1].text in (".", "->", "[", "("):
            continue  # what a member or an element is, only its type tells
        if spaces.get(source, to) != to:
            out.append(_at(t, "address-space-cast", f"{source} points to {spaces[source]} memory and is cast to {to} memory"))
    return out


def _is_pointer(p: Parameter) -> bool:
    return any(t.text in ("*", "&") for t in p.tokens)


def _declared_name(body: list[Token], at: int) -> str:
    """x of `device const T* x`, `threadgroup T x[4]`; "" in casts and template arguments."""
    end = _type_end(body, at)
    while end < len(body) and body[end].text in ("*", "&", "const"):
        end += 1
    if end + 1 < len(body) and body[end].kind == "name" and body[end + 1].text in ("=", ";", "[", ","):
        return body[end].text
    return ""


def _overloads(named: list[tuple[str, Declaration]]) -> list[Finding]:
    seen: dict[tuple[str, str], tuple[Declaration, str]] = {}
    out = []
    for name, d in named:
        if d.kind != "function":
            continue
        types = [[t.text for t in p.tokens] for p in d.parameters]
        bare = ";".join(" ".join(w for w in words[:-1] if w not in SPACES) for words in types) + "".join(t.text for t in d.template)
        full = ";".join(" ".join(words[:-1]) for words in types)
        first = seen.setdefault((name, bare), (d, full))
        if first[1] != full:
            out.append(
                Finding(
                    d.file,
                    d.line,
                    "overload",
                    f"{name} differs from the one in line {first[0].line} only in address spaces; make it a template over the pointer",
                )
            )
    return out


def _recursion(named: list[tuple[str, Declaration]]) -> list[Finding]:
    names = {name for name, _ in named}
    calls: dict[str, set[str]] = {}
    for name, d in named:
        scope = name.rpartition("::")[0]
        calls.setdefault(name, set()).update(_called(d.body, scope, names))
    out = []
    for name, d in named:
        reached, work = set(), list(calls[name])
        while work:
            other = work.pop()
            if other not in reached:
                reached.add(other)
                work += calls.get(other, ())
        if name in reached:
            out.append(Finding(d.file, d.line, "recursion", f"{name} calls itself"))
    return out


def _called(body: list[Token], scope: str, names: set[str]) -> set[str]:
    out = set()
    for i, t in enumerate(body):
        if t.kind != "name" or i + 1 >= len(body) or (i and body[i - 1].text in (".", "->")):
            continue
        following = body[i + 1].text
        if following == "<":
            end = closing_angle(body, i + 1)
            following = body[end + 1].text if 0 <= end < len(body) - 1 else ""
        if following != "(":
            continue
        if i >= 2 and body[i - 1].text == "::":
            out.add(_qualified(body, i))
        elif scope and f"{scope}::{t.text}" in names:
            out.add(f"{scope}::{t.text}")
        elif t.text in names:
            out.add(t.text)
    return out & names


def _qualified(body: list[Token], at: int) -> str:
    """X::f of `X<4>::f(`."""
    i = at - 2
    if body[i].text == ">":
        depth = 0
        while i > 0:
            depth += {">": 1, "<": -1}.get(body[i].text, 0)
            i -= 1
            if depth == 0:
                break
    owner = body[i].text
    return body[at].text if owner == "metal" else f"{owner}::{body[at].text}"
