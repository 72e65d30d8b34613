"""Kernel sources stay in the subset that every compiler takes, and clang with real address spaces finds nothing in them."""

import re
from pathlib import Path

import pytest
from simulator import clang
from strict_check import problems

from lily import msl

HERE = Path(__file__).parent
PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
needs_clang = pytest.mark.skipif(clang() is None, reason="the strict check needs clang")


def seeded():
    """(name, line numbers of the file's lines, {line: rule}) of each source in the file of mistakes."""
    cases, lines = [], (HERE / "mistakes_strict.metal").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("//---")] + [len(lines)]
    for start, end in zip(starts, starts[1:], strict=False):
        marks = {i + 1: m[1] for i in range(start, end) if (m := re.search(r"// <- (.+)$", lines[i]))}
        assert marks, lines[start]
        # The text keeps its line numbers; the prelude takes the place of the file's head.
        text = PRELUDE + "\n" * (start - 2) + "\n".join(lines[start:end]) + "\n"
        cases.append(pytest.param(text, marks, id=lines[start][6:]))
    return cases


def lint_marks(marks):
    return {(line, rule) for line, rule in marks.items() if not rule.startswith("clang:")}


@pytest.mark.parametrize("text,marks", seeded())
def test_the_lint_names_each_mistake_with_its_line_and_nothing_else(tmp_path, text, marks):
    path = tmp_path / "seeded.metal"
    path.write_text(text)
    assert {(f.line, f.rule) for f in msl.lint(path)} == lint_marks(marks)
    if lint_marks(marks):
        with pytest.raises(msl.KernelSourceError) as caught:
            msl.rewrite(path, "sim")
        assert all(f"seeded.metal:{line}: {rule}: " in str(caught.value) for line, rule in lint_marks(marks))


@needs_clang
@pytest.mark.parametrize("text,marks", [case for case in seeded() if not lint_marks(case.values[1])])
def test_clang_names_what_the_lint_cannot_see(tmp_path, text, marks):
    path = tmp_path / "seeded.metal"
    path.write_text(text)
    found = problems(path)
    for line, rule in marks.items():
        wanted = rule.removeprefix("clang: ")
        assert any(p.line == line and wanted in p.text for p in found), found
    assert {p.line for p in found if p.file == "seeded.metal"} == set(marks), found


def test_at_least_twelve_mistakes_are_seeded():
    assert len(seeded()) >= 12


@needs_clang
@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
@pytest.mark.parametrize("path", [*msl.kernel_files(), HERE / "clean.metal"], ids=lambda p: p.stem)
def test_every_kernel_is_clean(path, storage):
    assert problems(path, storage) == []
