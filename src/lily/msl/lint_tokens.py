"""Checks that need no more than the tokens: words, literals, directives, member names."""

from __future__ import annotations

import re

from lily.msl.source import Finding, Unit
from lily.msl.structure import BUILTINS, SPACES
from lily.msl.tokens import Token, closing

_WORDS = {
    "double": "there is no double on the GPU",
    "goto": "goto is not in Metal",
    "try": "no exceptions on the GPU",
    "catch": "no exceptions on the GPU",
    "throw": "no exceptions on the GPU",
    "virtual": "no virtual functions on the GPU",
    "new": "no allocation on the GPU",
    "delete": "no allocation on the GPU",
    "dynamic_cast": "no run-time types on the GPU",
    "typeid": "no run-time types on the GPU",
    "asm": "assembly is not Metal",
    "thread_local": "thread_local is not in Metal",
    "atomic_ulong": "64-bit atomics are not on every GPU",
    "atomic_long": "64-bit atomics are not on every GPU",
    "host_name": "publish a kernel by LILY_INSTANTIATE",
    "volatile": "volatile has no use in a kernel; it would hide a missing barrier",
}
_RESERVED = SPACES + ("kernel", "buffer", "vertex", "fragment", "sampler", "object", "mesh")
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_VEC3 = re.compile(r"(?:packed_)?(?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)3")
_FLOAT = re.compile(r"(?:[0-9']*\.[0-9']*(?:[eE][+-]?[0-9]+)?|[0-9']+[eE][+-]?[0-9]+)(\w*)")
_INTEGER = re.compile(r"(?:0[xX][0-9a-fA-F']+|0[bB][01']+|[0-9']+)(?:[uU]?[lL]?|[lL][uU])")
_CONDITION = re.compile(r"#\s*(?:if|ifdef|ifndef|elif)\b(.*)", re.S)
_DEFINE = re.compile(r"#\s*define\s+(\w+)(\(?)(.*)", re.S)


def check(unit: Unit, tokens: list[Token]) -> list[Finding]:
    out: list[Finding] = []
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else None
        after = tokens[i + 1] if i + 1 < len(tokens) else None
        if token.kind == "name":
            out += _name(token, before, after)
            out += _member(token, before, after)
        elif token.kind == "number":
            out += _number(token)
        elif token.text in ("[", "[["):
            out += _bracket(unit, tokens, i)
    for token in unit.tokens:
        if token.kind == "directive":
            out += _directive(token)
    for i, token in enumerate(tokens):
        if token.text == "thread_elements" and "layout-dependent" not in unit.comments.get(token.file, ""):
            out.append(
                _at(
                    token,
                    "matrix-layout",
                    "thread_elements() depends on Apple's layout; say `layout-dependent` in a comment of the file or use load and store",
                )
            )
        if token.text == "simdgroup_matrix" and i + 1 < len(tokens) and tokens[i + 1].text == "<":
            size = [t.text for t in tokens[i + 2 : i + 8]]
            if size[1:6] != [",", "8", ",", "8", ">"]:
                out.append(_at(token, "matrix-size", f"simdgroup_matrix<{''.join(size[:-1])} is not <T, 8, 8>"))
    return out


def _at(token: Token, rule: str, text: str) -> Finding:
    return Finding(token.file, token.line, rule, text)


def _name(token: Token, before: Token | None, after: Token | None) -> list[Finding]:
    word, previous, following = token.text, before.text if before else "", after.text if after else ""
    if word in _WORDS and previous not in (".", "->"):
        return [_at(token, "word", f"`{word}`: {_WORDS[word]}")]
    if word == "std" and following == "::":
        return [_at(token, "std", "std:: is not in Metal; use metal::")]
    if word == "long" and (following in ("long", "double")):
        return [_at(token, "word", f"`long {following}` is not in Metal")]
    if word.startswith("__") and word != "__METAL_VERSION__":
        return [_at(token, "word", f"`{word}` belongs to one compiler")]
    if word in _RESERVED:
        return _reserved(token, previous, following)
    return []


def _reserved(token: Token, previous: str, following: str) -> list[Finding]:
    """A space stands before a type; `buffer` only opens an attribute; anything else is a name that some compiler takes for itself."""
    word = token.text
    if word == "buffer":
        good = previous == "[[" and following == "("
    elif word == "threadgroup" and previous == "[[":
        good = True
    elif word in SPACES:
        good = (following[:1].isalpha() or following[:1] == "_" or following in ("::", "*", "&")) and previous not in (".", "->")
    elif word == "kernel":
        good = following == "void"
    else:
        good = False
    return [] if good else [_at(token, "reserved-name", f"`{word}` is a word of Metal and cannot be a name")]


def _member(token: Token, before: Token | None, after: Token | None) -> list[Finding]:
    if before is not None and before.text == "." and _SWIZZLE.fullmatch(token.text):
        return [_at(token, "swizzle", f"`.{token.text}` takes several components at once; take them one by one")]
    return []


def _number(token: Token) -> list[Finding]:
    text = token.text
    match = _FLOAT.fullmatch(text) if not text.lower().startswith(("0x", "0b")) else None
    if match and match[1] not in ("f", "F"):
        reason = "is a double outside of Metal" if not match[1] else f"has the suffix {match[1]}"
        return [_at(token, "literal", f"{text} {reason}; write {text[: len(text) - len(match[1])]}f or a conversion such as bfloat(x)")]
    if match is None and not _INTEGER.fullmatch(text):
        return [_at(token, "literal", f"{text} has a suffix that not every compiler takes")]
    return []


def _bracket(unit: Unit, tokens: list[Token], i: int) -> list[Finding]:
    token, before = tokens[i], tokens[i - 1] if i else None
    if token.text == "[[":
        inner = tokens[i + 1] if i + 1 < len(tokens) else token
        if inner.text not in (*BUILTINS, "buffer", "function_constant"):
            return [_at(token, "attribute-unknown", f"[[{inner.text}]] is not in the subset")]
        return []
    opens_expression = before is None or before.text in ("(", ",", "=", "{", "}", ";", "return", ":", "?", "&&", "||")
    end = closing(tokens, i)
    if opens_expression and end + 1 < len(tokens) and tokens[end + 1].text in ("(", "{"):
        return [_at(token, "lambda", "no lambdas; write an inline helper")]
    return []


def _directive(token: Token) -> list[Finding]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", token.text, flags=re.S)
    condition = _CONDITION.match(text)
    if condition:
        names = re.findall(r"\b[A-Za-z_]\w*", condition[1])
        bad = [n for n in names if n != "defined" and n != "__METAL_VERSION__" and not n.startswith("LILY_")]
        return [_at(token, "condition", f"#if on {bad[0]}: only __METAL_VERSION__ and LILY_* may differ")] if bad else []
    define = _DEFINE.match(text)
    if define:
        name, bracket, body = define.groups()
        if bracket:
            return [_at(token, "macro", f"{name}(...) is a macro with parameters; write an inline helper or a template")]
        if set(re.findall(r"\w+", body)) & {*SPACES, "kernel"} or name in _RESERVED:
            return [_at(token, "macro", f"{name} hides an address space from the rewriter")]
        return []
    if re.match(r"#\s*(?:endif|else|undef|pragma|error)\b", text):
        return []
    return [_at(token, "directive", f"{text.split()[0]} is not in the subset")]


def is_vec3(word: str) -> bool:
    return bool(_VEC3.fullmatch(word))
