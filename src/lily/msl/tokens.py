"""Tokens of a kernel source, each with the white space before it, so that joining them gives the text back."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPACE = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/|\\\n)*", re.S)
_DIRECTIVE = re.compile(r"#(?:\\\n|//[^\n]*|/\*.*?\*/|[^\n])*", re.S)
_TOKEN = re.compile(
    r"""(?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[\w.'])*)
      | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<mark>\[\[|\]\]|::|->|\+\+|--|<<=|<<|<=|==|!=|&&|\|\||[-+*/%&|^]=|\.\.\.|.)""",
    re.X | re.S,
)  # '>' stays alone, so that nested template brackets close one by one


@dataclass
class Token:
    """`kind`: name, number, text, mark or directive. `space` is what stands before it. `line` counts from 1."""

    kind: str
    text: str
    space: str
    file: str
    line: int


def tokenize(text: str, file: str) -> tuple[list[Token], str]:
    """The tokens and what follows the last one. A preprocessor directive is one token."""
    tokens: list[Token] = []
    at, line, line_start = 0, 1, True
    while True:
        space = _SPACE.match(text, at).group()
        at += len(space)
        line += space.count("\n")
        line_start = line_start or "\n" in space
        if at == len(text):
            return _join_brackets(tokens), space
        if text[at] == "#" and line_start:
            match, kind = _DIRECTIVE.match(text, at), "directive"
        else:
            match = _TOKEN.match(text, at)
            kind = match.lastgroup
        tokens.append(Token(kind, match.group(), space, file, line))
        line += match.group().count("\n")
        at = match.end()
        line_start = False


def _join_brackets(tokens: list[Token]) -> list[Token]:
    """`a[b[i]]` ends in two brackets, not in an attribute's end: only a `]]` that closes a `[[` stays whole."""
    out: list[Token] = []
    open_brackets: list[str] = []
    for token in tokens:
        if token.text in ("[", "[["):
            open_brackets.append(token.text)
        if token.text == "]]" and not (open_brackets and open_brackets[-1] == "[["):
            out.append(Token("mark", "]", token.space, token.file, token.line))
            out.append(Token("mark", "]", "", token.file, token.line))
            del open_brackets[-2:]
            continue
        if token.text in ("]", "]]") and open_brackets:
            open_brackets.pop()
        out.append(token)
    return out


def closing(tokens: list[Token], at: int) -> int:
    """Index of the bracket that closes the one at `at`; len(tokens) when it stays open."""
    pairs = {"(": ")", "[": "]", "{": "}", "[[": "]]"}
    stack = []
    for i in range(at, len(tokens)):
        text = tokens[i].text
        if tokens[i].kind != "mark":
            continue
        if text in pairs:
            stack.append(pairs[text])
        elif stack and text == stack[-1]:
            stack.pop()
            if not stack:
                return i
        elif text in pairs.values():
            return len(tokens)
    return len(tokens)


def closing_angle(tokens: list[Token], at: int) -> int:
    """Index of the `>` that closes the `<` at `at`; -1 when this `<` is a comparison."""
    depth, i = 0, at
    while i < len(tokens):
        text = tokens[i].text
        if tokens[i].kind == "mark":
            if text in ("(", "[", "[["):
                i = closing(tokens, i)
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return i
            elif text in (";", "{", "}", ")", "]", "&&", "||", "="):
                return -1
        i += 1
    return -1


def split_commas(tokens: list[Token]) -> list[list[Token]]:
    """Splits at commas outside of brackets and template arguments."""
    parts: list[list[Token]] = [[]]
    i = 0
    while i < len(tokens):
        token, end = tokens[i], i
        if token.kind == "mark" and token.text in ("(", "[", "{", "[["):
            end = min(closing(tokens, i), len(tokens) - 1)
        elif token.text == "<":
            end = max(closing_angle(tokens, i), i)
        if token.text == "," and end == i:
            parts.append([])
        else:
            parts[-1] += tokens[i : end + 1]
        i = end + 1
    return [] if parts == [[]] else parts


def plain(tokens: list[Token]) -> str:
    """The tokens as one line of text, for names and messages."""
    out = ""
    for i, token in enumerate(tokens):
        gap = bool(token.space.strip(" \t")) or bool(token.space)
        out += (" " if gap and i else "") + token.text
    return out
