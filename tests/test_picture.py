"""The picture of the dispatch graph: every dispatch is a box in its stage's column, and what it waits for is drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from checkpoints import FIXTURES, MOE
from click.testing import CliRunner

import lily
from lily.cli import cli
from lily.picture import draw

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def step():
    return lily.plan(FIXTURES / MOE, device="metal").decode["forward"]


def test_a_dispatch_waits_for_one_of_the_stage_before_it(step):
    for dispatch in step:
        before = [step[i]["stage"] for i in dispatch["after"]]
        assert (dispatch["stage"] == 0 and not before) or max(before) == dispatch["stage"] - 1


def test_every_dispatch_is_drawn_once_in_the_column_of_its_stage(step):
    root = ElementTree.fromstring(draw(step, "one step"))
    boxes = [r for r in root.iter(f"{SVG}rect") if r.get("rx")]
    assert len(boxes) == len(step)
    columns = sorted({float(r.get("x")) for r in boxes})
    assert [columns.index(float(r.get("x"))) for r in boxes] == [d["stage"] for d in step]
    assert len(list(root.iter(f"{SVG}path"))) == sum(len(d["after"]) for d in step)


def test_one_layer_can_be_drawn_alone(step):
    root = ElementTree.fromstring(draw(step, "layer 0", ("layers.0.",)))
    wanted = [d for d in step if d["label"].startswith("layers.0.")]
    assert len([r for r in root.iter(f"{SVG}rect") if r.get("rx")]) == len(wanted) > 5
    with pytest.raises(ValueError, match="layers.99."):
        draw(step, "none", ("layers.99.",))


def test_the_command_writes_the_file(tmp_path):
    out = tmp_path / "step.svg"
    result = CliRunner().invoke(cli, ["plan", str(FIXTURES / MOE), "--device", "metal", "--picture", str(out), "--layers", "0,3"])
    assert result.exit_code == 0, result.output
    labels = out.read_text()
    assert "layers.3.self_attn" in labels and "layers.1." not in labels
