"""Norms and the residual stream against float64; a norm on its own gives the bits of one folded into its consumer."""

import numpy as np
import pytest
import reference_norm as reference
from harness import act, isas, make, run, step
from reference_norm import assert_agrees

EPS = 1e-6
WIDTHS = [128, 512, 1152, 2048, 5120]
STORAGES = ["bfloat16", "float32"]


def stream(rows, H):
    rng = np.random.default_rng(rows * 10000 + H)
    h = rng.normal(0, 1, (rows, H)) * np.exp(rng.normal(0, 1, (rows, 1)))
    h[0, :2] *= 100  # residual streams have a few large channels
    return h.astype(np.float32), rng.normal(1, 0.3, H).astype(np.float32)


def empty(like, storage):
    return act(np.full(like.shape, np.nan), storage)


def norm_rows(h, weight, rows, isa, storage="bfloat16", split=None):
    x = empty(h, storage)
    run(
        "rmsnorm_rows",
        make("LilyNormArgs", H=h.shape[1], eps=EPS),
        [step(rows=rows), h, weight, x],
        len(h),
        isa=isa,
        storage=storage,
        split=split,
    )
    return x


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("H", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7])
def test_rmsnorm_rows(H, rows, storage):
    h, weight = stream(8, H)
    expected = reference.rmsnorm_rows(h.astype(np.float64), weight.astype(np.float64), EPS)
    for isa in isas():
        x = norm_rows(h, weight, rows, isa, storage)
        assert_agrees(x[:rows], expected[:rows])
        np.testing.assert_array_equal(x[rows:], empty(h, storage)[rows:], "rows past step.rows are not touched")
        np.testing.assert_array_equal(x, norm_rows(h, weight, rows, isa, storage, split=3))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("H", WIDTHS)
def test_residual_step_then_norm_final_equals_rmsnorm_rows_in_every_bit(H, storage):
    (before, weight), (y, _) = stream(1, H), stream(2, H)
    y = y[1]
    expected, sums = reference.residual_step(y.astype(np.float64), before[0].astype(np.float64))
    args = make("LilyNormArgs", H=H, eps=EPS)
    for isa in isas():
        h, ssq, hidden = before[0].copy(), np.empty(H // 16, np.float32), np.empty(H, np.float32)
        run("residual_step", args, [y, h, ssq], 1, isa=isa, storage=storage)
        np.testing.assert_array_equal(h, (before[0] + y))
        assert_agrees(h, expected)
        assert_agrees(ssq, sums)
        x = empty(h, storage)
        run("norm_final", args, [h, ssq, weight, x, hidden], 1, isa=isa, storage=storage)
        np.testing.assert_array_equal(hidden, h)
        assert_agrees(x, reference.norm_final(h.astype(np.float64), weight.astype(np.float64), EPS)[0])
        np.testing.assert_array_equal(x, norm_rows(h[None], weight, 1, isa, storage)[0])
        np.testing.assert_array_equal(ssq.view(np.uint32), partial_sums(h).view(np.uint32))


def partial_sums(h):
    """The contract's order: 16 squares, folded in halves (lane i + lane i+8, +4, +2, +1)."""
    s = h.reshape(-1, 16) ** 2
    s = s[:, :8] + s[:, 8:]
    s = s[:, :4] + s[:, 4:]
    s = s[:, :2] + s[:, 2:]
    return s[:, 0] + s[:, 1]


def total_of(partials, isa):
    """The sum of a row's partial sums: ascending on the CPU; on a GPU 32 lanes take them by turns and are added as a tree of neighbours."""
    if isa != "sim":
        return np.cumsum(partials, dtype=np.float32)[-1]
    lanes = np.concatenate([partials, np.zeros(-len(partials) % 32, np.float32)]).reshape(-1, 32)
    sums = np.cumsum(lanes, axis=0, dtype=np.float32)[-1]
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    return sums[0]


@pytest.mark.parametrize("H", [128, 2048])
def test_the_order_of_the_sums_is_the_contract(H):
    """float32 numpy in the stated order gives the kernel's bits."""
    h, weight = stream(3, H)
    for row in h:
        for isa in isas():
            total = total_of(partial_sums(row), isa)
            r = np.float32(1) / np.sqrt(np.float32(total / np.float32(H) + np.float32(EPS)))
            for storage in STORAGES:
                np.testing.assert_array_equal(norm_rows(row[None], weight, 1, isa, storage)[0], act((row * r) * weight, storage))


@pytest.mark.parametrize("H", [128, 5120])
def test_residual_rows(H):
    (y, _), (before, _) = stream(5, H), stream(6, H)
    y = np.concatenate([y, y[:1]])
    for isa in isas():
        for split in (None, 2):
            h = before.copy()
            run("residual_rows", make("LilyNormArgs", H=H, eps=EPS), [step(rows=4), y, h], 6, isa=isa, split=split)
            assert_agrees(h[:4], reference.residual_rows(y.astype(np.float64), before.astype(np.float64))[:4])
            np.testing.assert_array_equal(h[:4], before[:4] + y[:4])
            np.testing.assert_array_equal(h[4:], before[4:])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("H", WIDTHS)
def test_residual_norm_rows_is_residual_rows_then_rmsnorm_rows(H, storage):
    (y, weight), (before, _) = stream(5, H), stream(6, H)
    y = np.concatenate([y, y[:1]])
    expected_h, expected_x = reference.residual_norm_rows(*(a.astype(np.float64) for a in (y, before, weight)), EPS)
    for isa in isas():
        for split in (None, 2):
            h, x = before.copy(), empty(before, storage)
            args = make("LilyNormArgs", H=H, eps=EPS)
            run("residual_norm_rows", args, [step(rows=4), y, h, weight, x], 6, isa=isa, storage=storage, split=split)
            assert_agrees(h[:4], expected_h[:4])
            assert_agrees(x[:4], expected_x[:4])
            twin = before.copy()
            run("residual_rows", args, [step(rows=4), y, twin], 6, isa=isa, storage=storage)
            np.testing.assert_array_equal(h, twin)
            np.testing.assert_array_equal(x, norm_rows(twin, weight, 4, isa, storage))


@pytest.mark.parametrize("copy_all", [0, 1])
def test_take_rows(copy_all):
    H, rows, bucket = 256, 5, 8
    h, _ = stream(bucket, H)
    hidden_ref, snapshots_ref, all_ref = reference.take_rows(h[:rows], [0, 3, 4])
    for isa in isas():
        for split in (None, 3):
            hidden, every = np.full(H, np.nan, np.float32), np.full((bucket, H), np.nan, np.float32)
            snapshots = [np.full(H, np.nan, np.float32) for _ in range(3)]
            s = step(rows=rows, n_snapshots=4, snapshot_rows=[0, 2, 3, 4])
            buffers = [s, h, hidden, snapshots[0], None, snapshots[1], snapshots[2], *[None] * 4, every if copy_all else None]
            run("take_rows", make("LilyNormArgs", H=H, copy_all=copy_all), buffers, bucket, isa=isa, split=split)
            np.testing.assert_array_equal(hidden, hidden_ref)
            for mine, theirs in zip(snapshots, snapshots_ref, strict=True):
                np.testing.assert_array_equal(mine, theirs)
            if copy_all:
                np.testing.assert_array_equal(every[:rows], all_ref)
                assert np.isnan(every[rows:]).all()
