"""Collectives stand where all lanes reach them: not in a branch of `?:`, nor behind `&&` or `||`, which leave lanes out one by one."""

from __future__ import annotations

from lily.msl.source import Finding
from lily.msl.structure import Declaration, functions
from lily.msl.tokens import Token

_PREFIXES = ("simd_", "quad_", "simdgroup_load", "simdgroup_store", "simdgroup_multiply")
_BARRIERS = ("threadgroup_barrier", "simdgroup_barrier")


def check(found: list[Declaration]) -> list[Finding]:
    named = functions(found)
    collective = _collectives(named)
    out = []
    for name, d in named:
        for i, t in enumerate(d.body):
            if _is_call(d.body, i) and (t.text in collective or _is_collective(t.text)) and _is_conditional(d.body, i):
                text = f"{t.text} in {name} is reached by some lanes only; give its result a name before the condition"
                out.append(Finding(t.file, t.line, "collective", text))
    return out


def _is_collective(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _BARRIERS


def _is_call(body: list[Token], i: int) -> bool:
    return body[i].kind == "name" and i + 1 < len(body) and body[i + 1].text in ("(", "<") and (i == 0 or body[i - 1].text != ".")


def _collectives(named: list[tuple[str, Declaration]]) -> set[str]:
    """Names of helpers that contain a collective, or call one that does."""
    calls = {d.name: {t.text for i, t in enumerate(d.body) if _is_call(d.body, i)} for _, d in named}
    out = {name for name, called in calls.items() if any(_is_collective(c) for c in called)}
    while more := {name for name, called in calls.items() if called & out} - out:
        out |= more
    return out


def _is_conditional(body: list[Token], i: int) -> bool:
    """Walks back to the start of the statement; what stands in closed brackets has been evaluated already."""
    depth = 0
    for t in reversed(body[:i]):
        if t.kind != "mark":
            continue
        if t.text in (")", "]", "]]"):
            depth += 1
        elif t.text in ("(", "[", "[["):
            depth -= 1
        elif depth <= 0 and t.text in (";", "{", "}"):
            return False
        elif depth <= 0 and t.text in ("?", "&&", "||"):
            return True
    return False
