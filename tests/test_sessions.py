"""Sessions as values: rewinding, saving and loading give the bits of a session that never did anything else."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from checkpoints import tiny

import lily
from lily import testing


@pytest.fixture(scope="module")
def model():
    with lily.Model.demo(progress=False) as model:
        yield model


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """For what depends on lengths alone: long prompts take little."""
    with lily.Model.from_pretrained(tiny(tmp_path_factory.mktemp("small"), context=8200, vocab=6000), progress=False) as model:
        yield model


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 6000, n).tolist()


def same(a: lily.Session, b: lily.Session) -> bool:
    first, second = testing.state(a), testing.state(b)
    equal = first.keys() == second.keys() and all(np.array_equal(first[k], second[k]) for k in first)
    return equal and a.tokens == b.tokens and a.origins.tolist() == b.origins.tolist()


def snapshots(session: lily.Session) -> list[int]:
    return session._native.snapshots


def test_snapshots_lie_every_1024_tokens_and_at_the_end_of_the_prompt(model):
    assert snapshots(model.prefill(ids(3000))) == [1024, 2048, 3000]


def test_the_number_of_snapshots_grows_with_the_logarithm_of_the_length(small):
    kept = {n: len(snapshots(small.prefill(ids(n)))) for n in (2048, 4096, 8192)}
    assert kept[4096] - kept[2048] <= 4
    assert kept[8192] - kept[4096] <= 4


def test_marks_keep_states_inside_a_chunk(model):
    session = model.session()
    session._native.append(np.array(ids(600), np.int32), None, [10, 11, 512, 599])
    assert snapshots(session) == [10, 11, 512, 599, 600]
    assert session.rewind(11) == lily.Rewind(kept=11, reread=0)
    assert same(session, model.prefill(ids(600)[:11]))


def test_more_marks_than_a_chunk_carries_are_all_kept_in_order(model):
    session = model.session()
    marks = list(range(3, 400, 20))
    session._native.append(np.array(ids(600), np.int32), None, marks)
    assert snapshots(session) == [3, *marks[-7:], 600]  # the first, and the newest eight marked ones
    assert same(session, model.prefill(ids(600)))


@pytest.mark.parametrize("bad", [[0], [300], [5, 5], [7, 6]])
def test_marks_outside_the_prompt_or_out_of_order_are_refused(model, bad):
    session = model.session()
    with pytest.raises(ValueError, match="marks"):
        session._native.append(np.array(ids(300), np.int32), None, bad)
    assert len(session) == 0


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1023, 1024, 1025, 1499, 1500])
def test_rewinding_into_a_prompt_equals_reading_less(model, n):
    session = model.prefill(ids(1500))
    result = session.rewind(n)
    assert result.kept + result.reread == n
    assert result.reread <= 1024
    assert len(session) == n
    if n:
        assert same(session, model.prefill(ids(1500)[:n]))
        assert np.array_equal(session.logits(), model.prefill(ids(1500)[:n]).logits())


def test_rewinding_into_generated_tokens_decodes_them_again(model):
    session = model.prefill(ids(300))
    session.generate(max_tokens=20, temperature=0, ignore_eos=True)
    session.append(ids(5, seed=1))
    session.generate(max_tokens=9, temperature=0, ignore_eos=True)
    assert session.rewind(312) == lily.Rewind(kept=300, reread=12)
    plain = model.prefill(ids(300))
    plain.generate(max_tokens=13, temperature=0, ignore_eos=True)
    assert np.array_equal(session.logits(), _after(plain, 312))


def _after(session: lily.Session, n: int) -> np.ndarray:
    """Logits of a plain session cut to n tokens by its own generation."""
    session.rewind(n)
    return session.logits()


def test_a_rewound_session_goes_on_like_one_that_never_went_further(model):
    session = model.prefill("Once upon a time")
    n = len(session)
    first = session.generate(max_tokens=12, temperature=0)
    session.rewind(n)
    assert session.generate(max_tokens=12, temperature=0).tokens == first.tokens


def test_a_change_late_in_a_long_prompt_rereads_little(small):
    session = small.prefill(ids(8000))
    result = session.rewind(7000)
    assert result.kept >= 5952 and result.reread <= 2048
    assert result.kept + result.reread == len(session) == 7000


def test_rewinding_a_fork_leaves_the_other_alone(model):
    session = model.prefill(ids(700))
    other = session.fork()
    other.rewind(300)
    other.append(ids(50, seed=2))
    assert same(session, model.prefill(ids(700)))


def test_rewind_refuses_lengths_the_session_does_not_have(model):
    session = model.prefill([1, 2, 3])
    for n in (-1, 4):
        with pytest.raises(ValueError, match=f"rewind\\({n}\\)"):
            session.rewind(n)
    assert session.tokens == [1, 2, 3]


def test_a_rewind_that_fails_leaves_the_session_as_it_was(model):
    session = model.prefill(ids(1500))
    testing.fail_at(model, 0, 3)
    with pytest.raises(lily.GPUError):
        session.rewind(1400)
    assert same(session, model.prefill(ids(1500)))


@pytest.mark.parametrize("chunk", [1, 7, 700, 1024, *(pytest.param(rows, marks=pytest.mark.soak) for rows in (4100, 8200))])
def test_chunks_of_any_size_give_the_same_bits(model, chunk):
    """Of more than 4,096 rows too: test_long_runs.py has them for a smaller model."""
    n = {4100: 4200, 8200: 8300}.get(chunk, 1100 if chunk > 7 else 300)
    plain = model.prefill(ids(n))
    default = model._native.chunk
    try:
        model._native.set_chunk(chunk)
        assert same(model.prefill(ids(n)), plain)
    finally:
        model._native.set_chunk(default)


@pytest.mark.parametrize("n", [1, 256, 300, 1500])
def test_a_saved_session_goes_on_exactly(model, tmp_path, n):
    session = model.prefill(ids(n))
    session.generate(max_tokens=3, temperature=0, ignore_eos=True)
    session.save(tmp_path / "s.lily")
    loaded = lily.Session.load(model, tmp_path / "s.lily")
    assert same(loaded, session)
    assert snapshots(loaded) == snapshots(session)
    options = {"max_tokens": 8, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    assert loaded.generate(**options).tokens == session.generate(**options).tokens
    assert loaded.rewind(n // 2) == session.rewind(n // 2)
    assert same(loaded, session)


def test_an_empty_session_can_be_saved(model, tmp_path):
    model.session().save(tmp_path / "empty.lily")
    assert len(lily.Session.load(model, tmp_path / "empty.lily")) == 0


def test_a_session_of_another_device_is_refused_by_the_field_that_differs(model, tmp_path):
    model.prefill("The cat").save(tmp_path / "s.lily")
    with (
        lily.Model.demo(device="cpu:float32", progress=False) as other,
        pytest.raises(lily.SessionMismatchError, match="storage 'bfloat16'"),
    ):
        lily.Session.load(other, tmp_path / "s.lily")


def test_a_session_of_another_checkpoint_is_refused(model, tmp_path):
    model.prefill([1, 2]).save(tmp_path / "s.lily")
    fixture = os.path.join(os.path.dirname(__file__), "data", "fixtures", "a_moe_q4g64")
    with lily.Model.from_pretrained(fixture, progress=False) as other, pytest.raises(lily.SessionMismatchError, match="model"):
        lily.Session.load(other, tmp_path / "s.lily")


def test_every_cut_or_altered_file_is_refused(model, tmp_path):
    path = tmp_path / "s.lily"
    model.prefill("Once upon a time").save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(3)
    for _ in range(60):
        data = bytearray(whole)
        if rng.random() < 0.5:
            data = data[: rng.integers(0, len(whole))]
        else:
            at = rng.integers(0, len(whole))
            data[at] ^= 1 << rng.integers(0, 8)
        path.write_bytes(data)
        try:
            loaded = lily.Session.load(model, path)
        except lily.SessionMismatchError:
            continue
        # A flipped bit may only survive where it says nothing: padding or the spelling of the header.
        assert loaded.tokens == model.encode("Once upon a time")
        assert same(loaded, model.prefill("Once upon a time"))


def test_a_hostile_header_never_reaches_the_engine_unchecked(model, tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "s.lily"
    model.prefill("Once upon a time").save(path)
    with safe_open(path, "np") as file:
        header = json.loads(file.metadata()["lily"])
    tensors = load_file(path)
    changes = [
        {"consumed": 10**6}, {"consumed": -1}, {"states": 0}, {"states": 99}, {"kv": 1}, {"snapshots": [[5000, 0, True]]},
        {"snapshots": [[1, 7, True]]}, {"snapshots": "x"}, {"crc32": None}, {"crc32": {}}, {"consumed": "two"}, {"version": 2},
    ]  # fmt: skip
    for change in changes:
        save_file(tensors, path, metadata={"lily": json.dumps(header | change)})
        with pytest.raises(lily.SessionMismatchError):
            lily.Session.load(model, path)
    for text in ("", "[]", "not json"):
        save_file(tensors, path, metadata={"lily": text})
        with pytest.raises(lily.SessionMismatchError):
            lily.Session.load(model, path)


@pytest.mark.parametrize("field", ["version", "lily", "config", "model", "device", "storage", "arithmetic", "plan"])
def test_a_session_that_something_else_computed_is_refused_by_the_field_that_differs(model, tmp_path, field):
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "s.lily"
    model.prefill("Once upon a time").save(path)
    with safe_open(path, "np") as file:
        header = json.loads(file.metadata()["lily"])
    save_file(load_file(path), path, metadata={"lily": json.dumps(header | {field: "other"})})
    with pytest.raises(lily.SessionMismatchError, match=f"computed with {field} 'other'"):
        lily.Session.load(model, path)


@pytest.mark.parametrize(
    ("isa", "forced", "name"),
    [
        ("avx512", "", "x86-fma-2"), ("avx2", "", "x86-fma-2"), ("avx512", "gemm=avx2", "x86-fma-2"), ("neon", "", "neon-2"),
        ("avx512", "*=portable", "x86-fma-2, but *=portable"), ("avx2", "gemv=avx512,gemm=portable", "x86-fma-2, but gemm=portable"),
    ],
)  # fmt: skip
def test_instruction_sets_that_give_the_same_bits_share_their_files(isa, forced, name):
    from lily.session_file import arithmetic

    assert arithmetic(isa, forced) == name


def test_a_session_of_forced_kernels_is_refused_without_them(tmp_path, monkeypatch):
    fixture = os.path.join(os.path.dirname(__file__), "data", "fixtures", "a_moe_q4g64")
    with lily.Model.from_pretrained(fixture, progress=False) as model:
        monkeypatch.setenv("LILY_KERNEL", "gdn_scan=portable")
        model.prefill([1, 2, 3]).save(tmp_path / "s.lily")
        monkeypatch.delenv("LILY_KERNEL")
        with pytest.raises(lily.SessionMismatchError, match="arithmetic 'x86-fma-2, but gdn_scan=portable'|arithmetic 'neon-2, but"):
            lily.Session.load(model, tmp_path / "s.lily")


def test_a_session_says_what_it_reused_and_read(model):
    session = model.prefill(ids(300))
    assert session.report() == lily.Reuse(reused=0, read=300)
    session.generate(ids(5, seed=1), max_tokens=4, temperature=0, ignore_eos=True)
    assert session.report() == lily.Reuse(reused=300, read=5)
    session.generate(max_tokens=2)
    assert session.report().read == 0
    session.rewind(302)
    assert session.report() == lily.Reuse(reused=300, read=2)
    assert session.fork().report() == lily.Reuse(reused=302, read=0)
    with pytest.raises(ValueError, match="outside"):
        session.append([10**6])
    assert session.report() == lily.Reuse(reused=300, read=2)


def test_a_failed_save_leaves_the_older_file(model, tmp_path, monkeypatch):
    path = tmp_path / "s.lily"
    model.prefill("The cat").save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        model.prefill("Another text").save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.lily"]


def test_closing_a_model_closes_its_sessions(tmp_path):
    model = lily.Model.demo(progress=False)
    session = model.prefill("The cat")
    model.close()
    with pytest.raises(ValueError, match="closed"):
        session.generate(max_tokens=1)


def test_regular_snapshots_add_no_work_to_a_prompt():
    """They are states that the end of a chunk writes anyway: the device runs the same submissions, stages and dispatches."""
    from checkpoints import MOE, load

    from lily._engine import native

    with load(MOE) as model:
        work = []
        for on in (True, False):
            native().testing.set_regular_snapshots(model._native, on)
            before = native().testing.counters(model._native)
            session = model.prefill(np.arange(1100) % 500)
            after = native().testing.counters(model._native)
            work.append({name: after[name] - before[name] for name in after})
            assert snapshots(session) == ([1024, 1100] if on else [1100])
            session.close()
        assert work[0] == work[1] and work[0]["dispatches"] > 0
