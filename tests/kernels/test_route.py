"""The routing of a chunk in three kernels: the slots are those of moe_group, and the tile map covers them, past 65,535 slots too."""

import numpy as np
import pytest
import reference_moe
import reference_route as reference
from harness import isas, make, run, run_sim, step

from lily.errors import DeviceError

isa = pytest.mark.parametrize("isa", isas())
UNTOUCHED = 7777777


def choices(T, E, k, kind="even", seed=0):
    """ids u32[T,k], distinct within a row. "one": every row chooses expert 0; "few": 9 in 10 rows choose among the first 2k."""
    rng = np.random.default_rng(seed)
    scores = rng.random((T, E))
    if kind == "one":
        scores[:, 0] = 2
    if kind == "few":
        scores[rng.random(T) < 0.9, : 2 * k] += 1
    return np.argsort(-scores, axis=1)[:, :k].astype(np.uint32)


def route(ids, E, tile_rows=16, rows=None, isa="best", N_a=1024, N_b=2048, split=None):
    """All three kernels: what each writes, by name."""
    T, k = ids.shape
    B, max_tiles = -(-T // 64), -(-T * k // tile_rows) + E
    args = make("LilyRouteArgs", E=E, k=k, T=T, tile_rows=tile_rows, N_a=N_a, N_b=N_b)
    at = step(rows=T if rows is None else rows)

    def fresh(*shape):
        return np.full(shape, UNTOUCHED, np.uint32)

    out = dict(counts=fresh(B, E), offsets=fresh(E + 1), base=fresh(B, E), tiles=fresh(max_tiles, 4), grids=fresh(2, 3))
    out |= dict(slot_row=fresh(T * k), slot_of=fresh(T, k))
    run("moe_histogram", args, [at, ids, out["counts"]], B, isa=isa, split=split)
    run("moe_scan", args, [at, *(out[n] for n in ("counts", "offsets", "base", "tiles", "grids"))], 1, isa=isa)
    run("moe_scatter", args, [at, ids, out["base"], out["slot_row"], out["slot_of"]], B, isa=isa, split=split)
    return out


def check(out, ids, E, tile_rows, N_a=1024, N_b=2048):
    """Live parts against the references; the rest is untouched. `ids`: live rows."""
    counts = reference.moe_histogram(ids, E)
    offsets, base, tiles, grids = reference.moe_scan(counts, tile_rows, N_a, N_b)
    slot_row, slot_of = reference.moe_scatter(ids, base)
    want = dict(counts=counts, offsets=offsets, base=base, tiles=tiles, grids=grids, slot_row=slot_row, slot_of=slot_of)
    for name, expected in want.items():
        np.testing.assert_array_equal(out[name][: len(expected)], expected, err_msg=name)
        assert (out[name][len(expected) :] == UNTOUCHED).all(), name
    group_offsets, group_row, group_of = reference_moe.moe_group(ids, E)
    np.testing.assert_array_equal(out["offsets"], group_offsets)
    np.testing.assert_array_equal(out["slot_row"][: ids.size], group_row)
    np.testing.assert_array_equal(out["slot_of"][: len(ids)], group_of)


@isa
@pytest.mark.parametrize("tile_rows", [16, 32])
@pytest.mark.parametrize(
    "T,E,k,kind", [(1, 16, 4, "even"), (64, 16, 4, "one"), (65, 256, 8, "few"), (300, 256, 8, "even"), (130, 512, 10, "few")]
)
def test_slots_are_those_of_moe_group_and_tiles_cover_them(T, E, k, kind, tile_rows, isa):
    ids = choices(T, E, k, kind)
    check(route(ids, E, tile_rows, isa=isa), ids, E, tile_rows)


@isa
@pytest.mark.parametrize("T,k", [(4100, 8), (8200, 10)])
def test_counts_pass_sixteen_bits(T, k, isa):
    ids = choices(T, 256, k, "one")
    out = route(ids, 256, 32, isa=isa)
    check(out, ids, 256, 32)
    assert out["offsets"][-1] == T * k and (T == 4100 or T * k > 65535)


@isa
def test_rows_past_the_live_ones_are_not_touched(isa):
    ids = choices(200, 64, 8)
    for rows in (1, 63, 64, 65, 199):
        check(route(ids, 64, rows=rows, isa=isa), ids[:rows], 64, 16)


@isa
def test_a_tile_is_a_part_of_one_expert_and_dead_tiles_do_not_exist(isa):
    ids = choices(257, 128, 8, "few")
    out = route(ids, 128, 16, isa=isa, N_a=1000, N_b=64)
    n = out["grids"][0, 1]
    expert, first, rows, zero = out["tiles"][:n].T
    assert (out["grids"] == [[16, n, 1], [1, n, 1]]).all() and (zero == 0).all()
    assert (rows >= 1).all() and (rows <= 16).all() and rows.sum() == 257 * 8
    assert (out["offsets"][expert] <= first).all() and (first + rows <= out["offsets"][expert + 1]).all()
    assert (np.repeat(first, rows) + np.concatenate([np.arange(r) for r in rows]) == np.arange(257 * 8)).all()


@isa
def test_the_split_over_threads_changes_nothing(isa):
    ids = choices(400, 64, 8)
    whole, parts = route(ids, 64, isa=isa), route(ids, 64, isa=isa, split=2)
    assert all(whole[name].tobytes() == parts[name].tobytes() for name in whole)


@pytest.mark.skipif("sim" not in isas(), reason="the simulator is not built: LILY_SIM")
def test_a_shape_without_a_metal_form_is_refused_by_name():
    args = make("LilyRouteArgs", E=1024, k=8, T=1, tile_rows=16, N_a=64, N_b=64)
    with pytest.raises(DeviceError, match="kernel 'moe_histogram' has no Metal form for 1024 experts, expected at most 512"):
        run_sim("moe_histogram", args, [step(rows=1), np.zeros((1, 8), np.uint32), np.zeros((1, 1024), np.uint32)], 1)
    args = make("LilyGdnArgs", Nk=1, Nv=1, Dk=320, Dv=64)
    with pytest.raises(DeviceError, match="kernel 'gdn_scan' has no Metal form for a key head dim of 320"):
        run_sim("gdn_scan", args, [step(rows=1), *[np.zeros(4, np.float32)] * 5], 1)
