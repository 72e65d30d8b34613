"""What the documents say is true: commands, code blocks, generated pages, links."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import lily

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXT_FILES = [
    path
    for folder in ("src", "csrc", "metal", "docs", "examples", "tests", ".ci", ".github")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".pyi", ".md", ".ipynb", ".cpp", ".hpp", ".h", ".yml", ".toml", "") and path.is_file()
]
PROJECT_FILES = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob(".*.yaml"), *TEXT_FILES]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def readme_command(name: str) -> str:
    found = re.search(rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert found, f"README.md has no command {name!r}"
    return found[1]


def test_readme_names_the_two_commands():
    assert readme_command("try") == 'pip install . && lily generate "Once upon a time"'
    assert readme_command("test") == "pip install '.[test,mlx]' && python -m pytest"


def test_ci_runs_the_test_command_of_readme():
    script = (ROOT / ".ci/run").read_text()
    function = re.search(r"^readme_command\(\) \{\n.*?^\}", script, re.M | re.S)
    assert function and "readme_command test" in script
    found = subprocess.run(["bash", "-c", f"{function[0]}\nreadme_command test"], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == readme_command("test")


@pytest.mark.parametrize("page", ["README.md", "docs/start.md", "docs/chat.md", "docs/sessions.md", "docs/server/README.md"])
def test_python_blocks_of_a_page_run(page, capsys):
    names = {"__name__": "__docs__"}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert capsys.readouterr().out


def test_shell_commands_of_the_start_page_run():
    commands = [line for block in blocks("docs/start.md", "bash") for line in block.splitlines() if line.startswith("lily ")]
    assert commands
    for command in commands:
        run = subprocess.run([sys.executable, "-m", *shlex.split(command)], capture_output=True, text=True)
        assert run.returncode == 0 and run.stdout.strip(), f"{command}: {run.stderr}"


@pytest.mark.parametrize("page", ["README.md", "docs/start.md", "docs/architecture.md", "docs/hardware.md"])
def test_commands_and_variables_that_a_page_names_exist(page):
    from lily.cli import cli

    text = (ROOT / page).read_text()
    assert set(re.findall(r"^lily (\w+)", text, re.M)) | set(re.findall(r"`lily (\w+)", text)) <= set(cli.commands)
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
    for variable in re.findall(r"\bLILY_[A-Z]+\b(?==)", text):
        assert f'"{variable}"' in sources, variable


def test_the_api_page_is_up_to_date():
    build = runpy.run_path(str(ROOT / "docs/build_api.py"))
    assert (ROOT / "docs/api.md").read_text() == build["page"](), "run python docs/build_api.py"


def test_the_model_card_is_a_copy_of_the_one_beside_the_weights():
    card = (Path(lily.Model.demo().source) / "README.md").read_text()
    assert (ROOT / "docs/demo-model.md").read_text() == card
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in card


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_decision_is_listed():
    index = (ROOT / "docs/decisions/README.md").read_text()
    assert all(path.name in index for path in (ROOT / "docs/decisions").glob("0*.md"))


def test_no_command_installs_the_other_project_of_that_name():
    wrong = re.compile(r"pip install(?:\s+-\S+)*\s+[\"']?lily(?!-inference|_inference|\w)")
    for path in PROJECT_FILES:
        assert not wrong.search(path.read_text(errors="replace")), path


def test_no_document_names_a_path_of_one_machine():
    for path in PROJECT_FILES:
        assert not re.search(r"(?<![\w.])/(work|home|root|opt)/\w", path.read_text(errors="replace")), path
