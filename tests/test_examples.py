"""The examples run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_the_quickstart_runs():
    run = subprocess.run([sys.executable, EXAMPLES / "quickstart.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "The capital of France is Paris" in run.stdout and "The ball was red." in run.stdout


def test_the_slice_example_writes_a_checkpoint_that_runs(tmp_path):
    import lily

    command = [sys.executable, EXAMPLES / "make_slice.py", tmp_path / "slice", "--layers", "4", "--experts", "16", "--vocab", "6144"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with lily.Model.from_pretrained(tmp_path / "slice", max_context=256) as model:
        assert len(model.generate("Once", max_tokens=3, temperature=0, ignore_eos=True).tokens) == 3


@pytest.fixture(scope="module", params=sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def notebook(request):
    import nbformat

    return request.param, nbformat.read(EXAMPLES / request.param, as_version=4)


def test_the_notebook_is_valid_and_stored_without_outputs(notebook):
    import nbformat

    nbformat.validate(notebook[1])
    cells = [cell for cell in notebook[1].cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)


SHOWN = {
    "tour.ipynb": ["decode step:"],
    "document.ipynb": [
        *(f"The secret word of {name} is {word}." for name, word in (("Mona", "wagon"), ("Henry", "kite"), ("Eva", "flute"), ("Caleb", "clock"))),
        "(reused 1528 tokens, read 17)", "1528 tokens read", "True", "Rewind(kept=1024",
    ],
}  # fmt: skip


def test_the_notebook_runs_and_shows_what_it_is_about(notebook, tmp_path):
    from nbclient import NotebookClient

    name, cells = notebook
    # A kernel of this interpreter, whatever other kernels are installed.
    cells.metadata.kernelspec.name = "python3"
    done = NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in shown)
    assert all(part in text for part in SHOWN[name]), name
