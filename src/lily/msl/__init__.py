"""Reads Metal kernel sources: checks that they stay in the subset that every compiler takes, and rewrites them for each compiler.

The subset is Metal's own language less what Apple's compiler, clang and NVIDIA's do not agree on, plus one macro,
`LILY_INSTANTIATE(host_name, function, template arguments...)`, which publishes a kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lily.msl.lint import findings
from lily.msl.rewrite import MODES, description, rewritten
from lily.msl.source import Finding, KernelSourceError, Unit, kernel_files, kernel_root, load

__all__ = ["MODES", "Finding", "KernelSourceError", "describe", "kernel_files", "kernel_root", "lint", "rewrite"]


def lint(path: str | Path, root: Path | None = None) -> list[Finding]:
    """Where the file or one of its headers leaves the subset, in order."""
    return findings(load(Path(path), root))


def rewrite(path: str | Path, mode: str, *, storage: str = "bfloat16", root: Path | None = None) -> str:
    """The file, headers included, as one source for "apple", "strict", "sim" or "cuda"; `storage` is that of activations, bfloat16 or float32.

    Raises `KernelSourceError` with every finding of the lint, `ValueError` for an unknown mode or storage.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    if storage not in ("bfloat16", "float32"):
        raise ValueError(f"storage is {storage!r}, expected bfloat16 or float32")
    return rewritten(_checked(path, root), mode, storage)


def describe(path: str | Path, *, root: Path | None = None) -> dict[str, Any]:
    """The file's kernels with their parameters, its function constants and instantiations, as plain values (JSON). Raises `KernelSourceError`."""
    return description(_checked(path, root))


def _checked(path: str | Path, root: Path | None) -> Unit:
    unit = load(Path(path), root)
    found = findings(unit)
    if found:
        raise KernelSourceError(found)
    return unit
