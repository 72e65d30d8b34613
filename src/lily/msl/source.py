"""Where the kernel sources are, and one file with its headers as one stream of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from lily.errors import LilyError
from lily.kernel_folder import CANDIDATES, kernel_folder
from lily.msl.tokens import Token, tokenize

SYSTEM_HEADERS = (
    "metal_stdlib",
    "metal_simdgroup_matrix",
    "metal_tensor",
    "MetalPerformancePrimitives/MetalPerformancePrimitives.h",
)
_INCLUDE = re.compile(r'#\s*include\s*(?:<([^>]+)>|"([^"]+)")')


@dataclass(frozen=True, order=True)
class Finding:
    """One place where a kernel source leaves the subset."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


class KernelSourceError(LilyError):
    """A kernel source is outside of the subset that every compiler takes. `findings` lists each place."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(str(f) for f in findings))
        self.findings = findings


@dataclass
class Unit:
    """One .metal file with its headers in place. Tokens of kind "line" switch the file that diagnostics name."""

    name: str
    tokens: list[Token] = field(default_factory=list)
    system: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)


def kernel_root() -> Path:
    """The folder `metal` with the kernels: the repository's in an editable install, else the one inside of the package."""
    folder = kernel_folder()
    if folder is None:
        raise LilyError(f"the kernel sources are missing: neither {CANDIDATES[0]} nor {CANDIDATES[1]} holds include/args.h")
    return folder


def kernel_files(root: Path | None = None) -> list[Path]:
    """Every .metal file, in order of its name."""
    return sorted((root or kernel_root()).glob("**/*.metal"))


def load(path: Path, root: Path | None = None) -> Unit:
    """Reads a file and puts its headers in place, each once. Headers are looked up beside the including file, then in root/include."""
    root = root or kernel_root()
    unit = Unit(_shown(path, root))
    seen: set[Path] = set()

    def add(path: Path) -> None:
        seen.add(path.resolve())
        shown = _shown(path, root)
        text = path.read_text(encoding="utf-8")
        unit.comments[shown] = "\n".join(re.findall(r"//[^\n]*|/\*.*?\*/", text, re.S))
        unit.tokens.append(Token("line", f'#line 1 "{shown}"\n', "", shown, 1))
        tokens, rest = tokenize(text, shown)
        for token in tokens:
            include = _INCLUDE.match(token.text) if token.kind == "directive" else None
            if include is None:
                unit.tokens.append(token)
                continue
            system, quoted = include.groups()
            unit.tokens.append(Token("blank", "", token.space, shown, token.line))
            if system == "stdint.h":
                continue  # args.h names it for the host; Metal has these types built in
            if system:
                if system not in SYSTEM_HEADERS:
                    allowed = ", ".join(f"<{h}>" for h in SYSTEM_HEADERS)
                    unit.findings.append(Finding(shown, token.line, "include", f"<{system}> is not one of {allowed}"))
                elif system not in unit.system:
                    unit.system.append(system)
                continue
            found = next((f for f in (path.parent / quoted, root / "include" / quoted) if f.is_file()), None)
            if found is None:
                unit.findings.append(
                    Finding(shown, token.line, "include", f'"{quoted}" is neither beside the file nor in {root / "include"}')
                )
            elif found.resolve() not in seen:
                unit.tokens.append(Token("blank", "\n", "", shown, token.line))
                add(found)
                # The line end after the include follows this and completes line token.line.
                unit.tokens.append(Token("line", f'#line {token.line} "{shown}"\n', "", shown, token.line))
        unit.tokens.append(Token("blank", "\n", rest, shown, 0))

    add(path)
    if "metal_stdlib" in unit.system:
        unit.system.remove("metal_stdlib")
    unit.system.insert(0, "metal_stdlib")
    return unit


def _shown(path: Path, root: Path) -> str:
    """metal/decode/gemv.metal for the kernels; the plain name for a file elsewhere."""
    try:
        return f"metal/{path.resolve().relative_to(root.resolve()).as_posix()}"
    except ValueError:
        return path.name
