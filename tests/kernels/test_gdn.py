"""Gated DeltaNet: each kernel against float64; decode's fused kernel, the row kernels and every cut of a chunk agree in every bit."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import reference_gdn as reference
from harness import act, act_values, affordable, isas, make, rb, run, run_sim, step
from reference_norm import assert_agrees

EPS = 1e-6
STORAGES = ["bfloat16", "float32"]
HEADS = [(2, 2), (2, 4), (1, 3), (1, 4)]  # Nk, Nv: every ratio in use
ROWS = [1, 2, 3, 4, 7, 64, 300]


@dataclass(frozen=True)
class Case:
    Nk: int
    Nv: int
    storage: str = "bfloat16"
    Dk: int = 128
    Dv: int = 128

    @property
    def C(self):
        return 2 * self.Nk * self.Dk + self.Nv * self.Dv

    @property
    def width(self):  # of a row of the input projection: qkv | z | b | a
        return self.C + self.Nv * self.Dv + 2 * self.Nv

    @property
    def args(self):
        return make(
            "LilyGdnArgs", Nk=self.Nk, Nv=self.Nv, Dk=self.Dk, Dv=self.Dv, ld_qkv=self.width, ld_z=self.width, ld_ba=self.width, eps=EPS
        )

    def parts(self, proj):
        """qkv, z, b, a as the buffers of a kernel: each starts at its first element, rows `width` apart."""
        flat, z, b = proj.reshape(-1), self.C, self.C + self.Nv * self.Dv
        return flat, flat[z:], flat[b:], flat[b + self.Nv :]


@dataclass
class Data:
    proj: np.ndarray  # [T, width]
    conv_w: np.ndarray
    A: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray
    conv: np.ndarray  # act [3,C]
    S: np.ndarray


@lru_cache(maxsize=4)
def data(case: Case, T: int) -> Data:
    rng = np.random.default_rng(1000 * case.Nk + 10 * case.Nv + T)

    def normal(*shape, s=1.0):
        return rng.normal(0, s, shape).astype(np.float32)

    proj = normal(T, case.width)
    proj[:, -case.Nv :] *= 4  # softplus on both sides of zero
    if case.storage == "bfloat16":
        proj[:, : case.C] = rb(proj[:, : case.C])
    A = -np.exp(rng.uniform(-6, 2, case.Nv)).astype(np.float32)  # from decays close to 1 to quick forgetting
    return Data(
        proj,
        normal(4, case.C, s=0.5),
        A,
        normal(case.Nv),
        1 + normal(case.Dv, s=0.2),
        act(normal(3, case.C), case.storage),
        normal(case.Nv, case.Dk, case.Dv),
    )


def nan(*shape):
    return np.full(shape, np.nan, np.float32)


def f64(*arrays):
    return [a.astype(np.float64) for a in arrays]


def conv_rows(case, d, isa="best", rows=None, snapshots=(), split=None):
    """y, conv_out, and the conv rows after each row of `snapshots`."""
    rows = len(d.proj) if rows is None else rows
    y, out = nan(len(d.proj), case.C), act(nan(3, case.C), case.storage)
    shots = [act(nan(3, case.C), case.storage) for _ in snapshots]
    s = step(rows=rows, n_snapshots=len(shots), snapshot_rows=list(snapshots))
    run(
        "conv_rows",
        case.args,
        [s, case.parts(d.proj)[0], d.conv_w, d.conv, out, y, *shots],
        -(-len(d.proj) // 32),
        isa=isa,
        storage=case.storage,
        split=split,
    )
    return y, out, shots


def prepare_rows(case, d, y, isa="best", rows=None, split=None):
    rows = len(d.proj) if rows is None else rows
    y, gates = y.copy(), nan(len(d.proj), case.Nv, 2)
    _, _, b, a = case.parts(d.proj)
    run(
        "gdn_prepare_rows",
        case.args,
        [step(rows=rows), y, b, a, d.A, d.dt_bias, gates],
        len(d.proj),
        isa=isa,
        storage=case.storage,
        split=split,
    )
    return y, gates


def scan(case, y, gates, S, isa="best", rows=None, snapshots=(), split=None):
    rows = len(y) if rows is None else rows
    S_out, o = nan(*S.shape), nan(len(y), case.Nv, case.Dv)
    shots = [nan(*S.shape) for _ in snapshots]
    s = step(rows=rows, n_snapshots=len(shots), snapshot_rows=list(snapshots))
    run("gdn_scan", case.args, [s, y, gates, S, S_out, o, *shots], case.Nv * -(-case.Dv // 64), isa=isa, storage=case.storage, split=split)
    return o, S_out, shots


def gated_norm_rows(case, d, o, isa="best", rows=None, split=None):
    rows = len(o) if rows is None else rows
    x = act(nan(*o.shape), case.storage)
    run(
        "gated_norm_rows",
        case.args,
        [step(rows=rows), o, case.parts(d.proj)[1], d.norm, x],
        len(o),
        isa=isa,
        storage=case.storage,
        split=split,
    )
    return x


def chain(case, d, isa="best", split=None):
    """The row kernels in order: x, conv_out, S_out."""
    y, conv_out, _ = conv_rows(case, d, isa, split=split)
    y, gates = prepare_rows(case, d, y, isa, split=split)
    o, S, _ = scan(case, y, gates, d.S, isa, split=split)
    return gated_norm_rows(case, d, o, isa, split=split), conv_out, S


def fused(case, d, isa="best", split=None):
    """gdn_step on row 0: x, conv_out, S_out."""
    conv_out, S, x = act(nan(3, case.C), case.storage), nan(*d.S.shape), act(nan(case.Nv, case.Dv), case.storage)
    run(
        "gdn_step",
        case.args,
        [d.proj[0], d.conv_w, d.A, d.dt_bias, d.norm, d.conv, d.S, conv_out, S, x],
        case.Nv,
        isa=isa,
        storage=case.storage,
        split=split,
    )
    return x, conv_out, S


def same_bits(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def prepared(case, T):
    """y and gates as gdn_scan reads them, made in float64."""
    d = data(case, T)
    y, _, _ = reference.conv_rows(*f64(d.proj[:, : case.C], d.conv_w, act_values(d.conv)))
    b, a = d.proj[:, -2 * case.Nv : -case.Nv], d.proj[:, -case.Nv :]
    y, gates = reference.gdn_prepare_rows(y, *f64(b, a, d.A, d.dt_bias), case.Nk, case.Dk)
    return y.astype(np.float32), gates.astype(np.float32), d.S


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("T", ROWS)
def test_conv_rows(T, storage):
    case = Case(1, 3, storage)
    d = data(case, T)
    snapshots = sorted({0, T // 2, T - 1})
    y_ref, conv_ref, shots_ref = reference.conv_rows(*f64(d.proj[:, : case.C], d.conv_w, act_values(d.conv)), snapshots)
    for isa in isas():
        y, conv, shots = conv_rows(case, d, isa, snapshots=snapshots)
        assert_agrees(y, y_ref)
        for mine, theirs in zip([conv, *shots], [conv_ref, *shots_ref], strict=True):
            np.testing.assert_array_equal(act_values(mine), theirs.astype(np.float32))


@pytest.mark.parametrize("heads", [*HEADS, (16, 32)])
def test_gdn_prepare_rows(heads):
    case = Case(*heads)
    d = replace(data(case, 5), proj=data(case, 5).proj.copy())
    y0 = np.random.default_rng(0).normal(0, 1, (5, case.C)).astype(np.float32)
    y0[1, : case.Dk] = 0  # a zero query stays zero
    b, a = d.proj[:, -2 * case.Nv : -case.Nv], d.proj[:, -case.Nv :]
    a[0, :2], b[0, :2] = (-200, 200), (200, -200)
    expected, gates_ref = reference.gdn_prepare_rows(*f64(y0, b, a, d.A, d.dt_bias), case.Nk, case.Dk)
    n = 2 * case.Nk * case.Dk
    for isa in isas():
        y, gates = prepare_rows(case, d, y0, isa)
        assert_agrees(y[:, :n], expected[:, :n])
        np.testing.assert_array_equal(y[:, n:], y0[:, n:])
        assert_agrees(gates, gates_ref)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("T", ROWS)
def test_gdn_scan(T, heads):
    case = Case(*heads)
    y, gates, S = prepared(case, T)
    snapshots = sorted({0, T // 2, T - 1})
    o_ref, S_ref, shots_ref = reference.gdn_scan(*f64(y, gates, S), case.Nk, snapshots)
    for isa in isas():
        if not affordable(isa, T, 75):
            continue
        o, S_out, shots = scan(case, y, gates, S, isa, snapshots=snapshots)
        assert_agrees(o, o_ref)
        for mine, theirs in zip([S_out, *shots], [S_ref, *shots_ref], strict=True):
            assert_agrees(mine, theirs)


@pytest.mark.parametrize("storage", STORAGES)
def test_gated_norm_rows(storage):
    case = Case(1, 3, storage)
    d = data(case, 7)
    o = np.random.default_rng(5).normal(0, 0.1, (7, case.Nv, case.Dv)).astype(np.float32)
    z = d.proj[:, case.C : case.C + case.Nv * case.Dv].reshape(o.shape)
    expected = reference.gated_norm_rows(*f64(o, z, d.norm), EPS)
    for isa in isas():
        assert_agrees(gated_norm_rows(case, d, o, isa), expected)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", [*[Case(*h) for h in HEADS], Case(2, 4, Dk=64, Dv=80), Case(1, 2, Dk=256, Dv=256)], ids=str)
def test_gdn_step(case, storage):
    case = Case(case.Nk, case.Nv, storage, case.Dk, case.Dv)
    d = data(case, 1)
    x_ref, conv_ref, S_ref = reference.gdn_step(*f64(d.proj[0], d.conv_w, d.A, d.dt_bias, d.norm, act_values(d.conv), d.S), case.Nk, EPS)
    for isa in isas():
        x, conv, S = fused(case, d, isa)
        assert_agrees(x, x_ref)
        np.testing.assert_array_equal(act_values(conv), conv_ref.astype(np.float32))
        assert_agrees(S, S_ref)
        same_bits(fused(case, d, isa, split=1), (x, conv, S))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", [*[Case(*h) for h in HEADS], Case(2, 4, Dk=64, Dv=80)], ids=str)
def test_fused_step_equals_the_row_kernels_in_every_bit(case, storage):
    case = Case(case.Nk, case.Nv, storage, case.Dk, case.Dv)
    d = data(case, 1)
    for isa in isas():
        x, conv, S = chain(case, d, isa)
        same_bits(fused(case, d, isa), (x[0], conv, S))


@pytest.mark.parametrize("storage", STORAGES)
def test_avx2_and_avx512_agree_in_every_bit(storage):
    if not {"avx2", "avx512"} <= set(isas()):
        pytest.skip("needs a machine with AVX-512")
    for case in (Case(2, 4, storage), Case(1, 3, storage, Dv=48)):
        d = data(case, 64)
        same_bits(chain(case, d, "avx2"), chain(case, d, "avx512"))
        same_bits(fused(case, d, "avx2"), fused(case, d, "avx512"))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_chunk_can_be_cut_anywhere(storage):
    case = Case(1, 2, storage)
    whole = data(case, 300)
    for isa in isas():
        state, xs = (whole.conv, whole.S), []
        for begin, end in ((0, 1), (1, 3), (3, 7), (7, 71), (71, 300)):
            x, *state = chain(case, replace(whole, proj=whole.proj[begin:end], conv=state[0], S=state[1]), isa)
            xs.append(x)
        same_bits((np.concatenate(xs), *state), chain(case, whole, isa))


def test_a_snapshot_is_the_state_of_a_shorter_chunk():
    case = Case(1, 2)
    d = data(case, 64)
    y, gates, S = prepared(case, 64)
    for isa in isas():
        rows = [0, 1, 2, 30, 62, 63]
        _, _, convs = conv_rows(case, d, isa, snapshots=rows)
        _, _, states = scan(case, y, gates, S, isa, snapshots=rows)
        for r, conv, state in zip(rows, convs, states, strict=True):
            same_bits([conv], [conv_rows(case, d, isa, rows=r + 1)[1]])
            same_bits([state], [scan(case, y, gates, S, isa, rows=r + 1)[1]])


def test_snapshots_without_a_buffer_are_skipped():
    case = Case(1, 1)
    d = data(case, 4)
    y, gates, S = prepared(case, 4)
    s = step(rows=4, n_snapshots=3, snapshot_rows=[0, 1, 2])
    conv, conv_out, S_shot, S_out = act(nan(3, case.C), case.storage), act(nan(3, case.C), case.storage), nan(*S.shape), nan(*S.shape)
    run("conv_rows", case.args, [s, case.parts(d.proj)[0], d.conv_w, d.conv, conv_out, nan(4, case.C), None, conv, None], case.C // 128)
    run("gdn_scan", case.args, [s, y, gates, S, S_out, nan(4, case.Nv, case.Dv), None, S_shot, None], 2)
    same_bits([conv, S_shot], [conv_rows(case, d, rows=2)[1], scan(case, y, gates, S, rows=2)[1]])


def test_the_split_over_threads_changes_nothing_and_dead_rows_are_not_touched():
    case = Case(2, 4)
    d, rows = data(case, 16), 11
    for isa in isas():
        same_bits(chain(case, d, isa, split=1), chain(case, d, isa))
        same_bits(chain(case, d, isa, split=3), chain(case, d, isa))
        y, conv, _ = conv_rows(case, d, isa, rows=rows)
        y, gates = prepare_rows(case, d, y, isa, rows=rows)
        o, S, _ = scan(case, y, gates, d.S, isa, rows=rows)
        x = gated_norm_rows(case, d, o, isa, rows=rows)
        short = replace(d, proj=d.proj[:rows])
        same_bits((x[:rows], conv, S), chain(case, short, isa))
        assert all(np.isnan(a[rows:]).all() for a in (y, gates, o, act_values(x)))


def test_head_dims_off_the_tile():
    """Dv that is not a multiple of 64, Dk other than 128, channels that are not a multiple of 128."""
    for case in (Case(1, 2, Dk=64, Dv=80), Case(2, 2, Dk=16, Dv=16), Case(1, 1, Dk=256, Dv=112)):
        d = data(case, 9)
        y, gates, S = prepared(case, 9)
        o_ref, S_ref, _ = reference.gdn_scan(*f64(y, gates, S), case.Nk)
        for isa in isas():
            o, S_out, _ = scan(case, y, gates, S, isa)
            assert_agrees(o, o_ref)
            assert_agrees(S_out, S_ref)
            assert_agrees(conv_rows(case, d, isa)[0], reference.conv_rows(*f64(d.proj[:, : case.C], d.conv_w, act_values(d.conv)))[0])


def test_the_row_kernels_at_the_widths_of_the_35B_model():
    """16 key heads, 32 value heads, 8,192 channels; three rows, so that every form of the code has work."""
    case = Case(16, 32)
    d = data(case, 3)
    conv_ref, state_ref, _ = reference.conv_rows(*f64(d.proj[:, : case.C], d.conv_w, act_values(d.conv)))
    y, gates, S = prepared(case, 3)
    o_ref, S_ref, _ = reference.gdn_scan(*f64(y, gates, S), case.Nk)
    z = d.proj[:, case.C : case.C + case.Nv * case.Dv].reshape(o_ref.shape)
    for isa in isas():
        conv, state, _ = conv_rows(case, d, isa)
        assert_agrees(conv, conv_ref)
        np.testing.assert_array_equal(act_values(state), state_ref.astype(np.float32))
        o, S_out, _ = scan(case, y, gates, S, isa)
        assert_agrees(o, o_ref)
        assert_agrees(S_out, S_ref)
        assert_agrees(gated_norm_rows(case, d, o, isa), reference.gated_norm_rows(*f64(o, z, d.norm), EPS))


@pytest.mark.skipif("sim" not in isas(), reason="the simulator is not built: LILY_SIM")
@pytest.mark.parametrize("case", [Case(1, 2), Case(1, 1, Dk=64, Dv=48)], ids=str)
def test_the_scan_in_registers_moves_the_state_once_and_gives_the_bits_of_a_scan_in_blocks(case):
    T, snapshots = 100, [31, 40, 99]
    y, gates, S = prepared(case, T)
    results, traffic = {}, {}
    for variant in ("registers", "blocks"):
        S_out, o = nan(*S.shape), nan(T, case.Nv, case.Dv)
        shots = [nan(*S.shape) for _ in snapshots]
        at = step(rows=T, n_snapshots=len(shots), snapshot_rows=snapshots)
        counted = run_sim("gdn_scan", case.args, [at, y, gates, S, S_out, o, *shots], 0, rows=T, variant=variant)
        results[variant], traffic[variant] = [S_out, o, *shots], counted["traffic"]
    same_bits(results["registers"], results["blocks"])
    state = S.nbytes
    assert traffic["registers"]["buffer 3"]["bytes_read"] == traffic["registers"]["buffer 4"]["bytes_written"] == state
    assert traffic["registers"]["buffer 4"]["bytes_read"] == 0
    # Blocks of 32 rows: after each of the first three the state goes out and comes back.
    assert traffic["blocks"]["buffer 4"]["bytes_written"] == 4 * state
    assert traffic["blocks"]["buffer 3"]["bytes_read"] + traffic["blocks"]["buffer 4"]["bytes_read"] == 4 * state
