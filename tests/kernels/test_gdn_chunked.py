"""The chunkwise form of gdn_scan on the simulator: against float64, and where it may and may not give other bits than a chunk cut elsewhere."""

import os

import numpy as np
import pytest
import reference_gdn as reference
from harness import run_sim, step
from reference_norm import assert_agrees
from test_gdn import Case, f64, nan, prepared, same_bits

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="needs the simulator: LILY_SIM")
HEADS = Case(2, 4)


def chunked(case, y, gates, S, *, position=0, rows=None, snapshots=(), seed=0, variant="chunked"):
    """o, the last state, the snapshots, and what the simulator counted."""
    rows = len(y) if rows is None else rows
    S_out, o, shots = nan(*S.shape), nan(len(y), case.Nv, case.Dv), [nan(*S.shape) for _ in snapshots]
    at = step(position=position, rows=rows, n_snapshots=len(shots), snapshot_rows=list(snapshots))
    counted = run_sim("gdn_scan", case.args, [at, y, gates, S, S_out, o, *shots], 0, rows=len(y), seed=seed, variant=variant)
    assert counted["function"].startswith("gdn_scan_chunked_") == (variant == "chunked")
    return o, S_out, shots, counted


def agrees(case, y, gates, S, snapshots=(), **options):
    o, S_out, shots, counted = chunked(case, y, gates, S, snapshots=snapshots, **options)
    o_ref, S_ref, shots_ref = reference.gdn_scan(*f64(y, gates, S), case.Nk, snapshots)
    for mine, theirs in zip([o, S_out, *shots], [o_ref, S_ref, *shots_ref], strict=True):
        assert_agrees(mine, theirs)
    return [o, S_out, *shots], counted


@pytest.mark.parametrize("T,position", [(1, 0), (63, 64), (64, 10), (65, 0), (130, 10), (130, 64)])
def test_agrees_with_float64_and_repeats_its_bits(T, position):
    """One row, blocks that are whole, short by a row and one longer, begun inside of a block and on its edge; states after a row inside."""
    y, gates, S = prepared(HEADS, T)
    snapshots = sorted({0, T // 2, T - 1})
    first, counted = agrees(HEADS, y, gates, S, snapshots, position=position)
    assert counted["threadgroup_bytes"] <= 32768
    o, S_out, shots, _ = chunked(HEADS, y, gates, S, position=position, snapshots=snapshots, seed=9)
    same_bits(first, [o, S_out, *shots])


@pytest.mark.parametrize(
    "case", [Case(1, 2, Dk=64, Dv=48), Case(1, 1, Dk=16, Dv=8), Case(1, 1, Dk=48, Dv=16), Case(1, 1, Dk=256, Dv=40)], ids=str
)
def test_head_dims_off_the_tile(case):
    agrees(case, *prepared(case, 70), position=3)


def hard(T, kind):
    """y, gates and S of one head where a careless form fails."""
    case = Case(1, 1)
    y, gates, S = prepared(case, T)
    rng = np.random.default_rng(T)
    gates[..., 1] = 1
    if kind == "slow decay":
        gates[..., 0] = 1 - rng.uniform(0, 1e-6, gates[..., 0].shape)
    elif kind == "equal keys":  # the triangular system at its least well conditioned
        gates[..., 0] = 1
        y[:, case.Dk : 2 * case.Dk] = y[0, case.Dk : 2 * case.Dk]
    elif kind == "quick forgetting":  # a product over a block is far below the smallest float
        gates[..., 0] = np.exp(-rng.uniform(5, 80, gates[..., 0].shape))
        gates[::7, :, 0] = 1
    else:  # gates that are zero between gates that are one
        gates[..., 0] = 1
        gates[[3, 20, 21, 40], :, 0] = 0
    return case, y, gates, S


@pytest.mark.parametrize("kind", ["slow decay", "equal keys", "quick forgetting", "zero gates"])
def test_decays_neither_overflow_nor_lose_digits(kind):
    case, y, gates, S = hard(64, kind)
    agrees(case, y, gates, S)


def test_cuts_at_multiples_of_64_and_at_snapshots_keep_every_bit():
    case = Case(1, 1)
    y, gates, S = prepared(case, 100)
    position, cuts = 40, [24, 60, 88]  # row 24 is position 64, row 88 is position 128; a snapshot after row 59
    whole = chunked(case, y, gates, S, position=position, snapshots=[59])
    state, outputs, after = S, [], {}
    for begin, end in zip([0, *cuts], [*cuts, 100], strict=True):
        o, state, _, _ = chunked(case, y[begin:end].copy(), gates[begin:end].copy(), state, position=position + begin)
        outputs.append(o)
        after[end] = state
    same_bits([whole[0], whole[1], *whole[2]], [np.concatenate(outputs), after[100], after[60]])


def test_a_cut_inside_of_a_block_changes_bits_but_only_within_the_bar():
    """Why the form is not the default: the sequential one gives the same bits from any cut."""
    case = Case(1, 1)
    y, gates, S = prepared(case, 64)

    def last_state(variant, cut):
        state = S
        for begin, end in ((0, cut), (cut, 64)) if cut else ((0, 64),):
            state = chunked(case, y[begin:end].copy(), gates[begin:end].copy(), state, position=begin, variant=variant)[1]
        return state

    assert last_state("chunked", 0).tobytes() != last_state("chunked", 30).tobytes()
    assert last_state("registers", 0).tobytes() == last_state("registers", 30).tobytes()
    assert_agrees(last_state("chunked", 30), reference.gdn_scan(*f64(y, gates, S), case.Nk)[1])


def test_dead_rows_and_snapshots_without_a_buffer_are_not_touched():
    case = Case(1, 1)
    y, gates, S = prepared(case, 20)
    y[11:], gates[11:] = np.nan, np.nan
    S_out, o, shot = nan(*S.shape), nan(20, 1, case.Dv), nan(*S.shape)
    at = step(rows=11, n_snapshots=2, snapshot_rows=[4, 6])
    run_sim("gdn_scan", case.args, [at, y, gates, S, S_out, o, None, shot], 0, rows=20, variant="chunked")
    o_ref, S_ref, (shot_ref,) = reference.gdn_scan(*f64(y[:11], gates[:11], S), 1, [6])
    for mine, theirs in ((o[:11], o_ref), (S_out, S_ref), (shot, shot_ref)):
        assert_agrees(mine, theirs)
    assert np.isnan(o[11:]).all()
    empty = chunked(case, y, gates, S, rows=0)
    assert np.isnan(empty[0]).all()
    same_bits([empty[1]], [S])


def test_the_state_moves_once():
    """Through memory in and out, however many blocks; keys twice and queries once for each 32 columns of a value head."""
    case = Case(1, 2)
    y, gates, S = prepared(case, 130)
    counted = chunked(case, y, gates, S)[3]["traffic"]
    assert counted["buffer 3"]["bytes_read"] == counted["buffer 4"]["bytes_written"] == S.nbytes
    assert counted["buffer 4"]["bytes_read"] == 0
    assert counted["buffer 5"]["bytes_written"] == 130 * case.Nv * case.Dv * 4
    slices = case.Nv * case.Dv // 32
    assert counted["buffer 1"]["bytes_read"] == 130 * 4 * (3 * slices * case.Dk + case.Nv * case.Dv)


def test_a_value_head_that_does_not_fill_tiles_is_refused():
    from lily.errors import DeviceError

    case = Case(1, 1, Dv=20)
    with pytest.raises(DeviceError, match="multiple of 8"):
        chunked(case, *prepared(case, 2))
