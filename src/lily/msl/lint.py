"""The subset of Metal's language that Apple's compiler, clang and NVIDIA's take alike, as checks on tokens and declarations."""

from __future__ import annotations

from lily.msl import lint_flow, lint_functions, lint_kernels, lint_tokens
from lily.msl.source import Finding, Unit
from lily.msl.structure import declarations, significant


def findings(unit: Unit) -> list[Finding]:
    """Every place that leaves the subset, in order of file and line."""
    tokens = significant(unit)
    found = declarations(tokens)
    out = list(unit.findings)
    out += lint_tokens.check(unit, tokens)
    out += lint_kernels.check(found)
    out += lint_functions.check(found)
    out += lint_flow.check(found)
    return sorted(set(out))
