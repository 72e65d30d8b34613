"""What kernels move, counted by the simulator. The bars at the widths of the 35B model are the report's: `python -m tests.sim report`."""

from __future__ import annotations

import os

import pytest
from simulator import ROOT  # noqa: F401  (makes tests.sim importable)

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="LILY_SIM is not set: no simulator of the Metal kernels")


@pytest.fixture(scope="module")
def cases():
    from tests.sim import cases

    return cases


def counted(case):
    from tests.sim.report import count

    return count(case)


def test_a_matrix_vector_product_reads_its_weights_once_in_whole_lines(cases):
    for case in (cases.gemv("head", 96, 2048), cases.gemv_norm("in_proj", [128, 64, 32], 8), cases.gemv_residual("out_proj", 4096, 64)):
        assert counted(case).faults == []


def test_without_arithmetic_the_same_weights_are_read_once(cases, monkeypatch):
    """LILY_KERNEL=name=read of every matrix-vector kernel, for the pure read rate; all codes, 3 bits too."""
    monkeypatch.setattr(cases, "E", 16)
    wanted = [
        cases.gemv("head", 96, 2048),
        cases.gemv("3 bits", 64, 2048, 3),
        cases.gemv_norm("in_proj", [128, 64, 32], 8),
        cases.gemv_residual("out_proj", 4096, 64),
        cases._shared_gate_up(),
        cases._moe_gate_up(),
        cases._moe_down(),
    ]
    for case in wanted:
        case.variant = "read"
        found = counted(case)
        assert found.faults == [] and found.weights_times == pytest.approx(1, abs=0.02), case.label


@pytest.mark.parametrize("tile_rows", [16, 32])
@pytest.mark.parametrize("kernel", ["moe_gate_up_rows", "moe_gemm_rows"])
def test_an_expert_is_read_once_a_tile_of_its_rows(kernel, tile_rows, cases):
    """Codes exactly; scales and biases are listed apart."""
    found = counted(cases.experts_rows(kernel, tile_rows, experts=32, hidden=256, inner=128))
    codes = [r for r in found.rows if r.kind == "codes"]
    assert codes
    for row in codes:
        assert row.read == row.expected
        assert row.coalescing >= 0.95


def test_attention_reads_keys_and_values_in_whole_lines(cases):
    assert counted(cases.attn_split("attn_split", 600)).faults == []


def test_the_scan_in_registers_moves_the_state_once_and_the_blocks_at_every_32_rows(cases):
    """At 2,048 rows of 32 heads: 4 MiB against 256 MiB. Here 256 rows of two heads."""
    state = 2 * 128 * 128 * 4
    moved = {}
    for variant in ("registers", "blocks"):
        found = counted(cases.gdn_scan(variant, rows=256, heads=2))
        assert found.faults == []
        moved[variant] = sum(r.read + r.written for r in found.rows if r.kind == "state")
    assert moved == {"registers": 2 * state, "blocks": 8 * 2 * state}
