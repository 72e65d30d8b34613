"""Bit for bit: results depend on tokens and origins, never on cuts, chunks, schedules, plans, threads or neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import (
    DENSE,
    DEVICES,
    GREEDY,
    MOE,
    assert_same,
    everything,
    load,
    model,
    prompt,
)

import lily
from lily._engine import native
from lily.testing import set_schedule

LENGTH = 300


def run(loaded: lily.Model, name: str, **options) -> dict[str, np.ndarray]:
    """A prompt of 300 tokens read, 12 generated: everything after each part."""
    session = loaded.prefill(prompt(name, LENGTH))
    read = {f"read.{key}": value for key, value in everything(session).items()}
    answer = session.generate(max_tokens=12, logprobs=3, **(GREEDY | options))
    logprobs = np.array([[entry.logprob, *(p for _, p in entry.top)] for entry in answer.logprobs])
    return read | {f"generated.{key}": value for key, value in everything(session).items()} | {"logprobs": logprobs}


@pytest.fixture(scope="module")
def plain():
    """The usual run of each fixture on each device."""
    found = {}

    def get(name, device):
        if (name, device) not in found:
            found[name, device] = run(model(name, device), name)
        return found[name, device]

    return get


# Cuts and chunks


def cuts(kind: str, length: int) -> list[int]:
    """The sizes of the pieces."""
    if kind == "random":
        borders = np.sort(np.random.default_rng(5).choice(np.arange(1, length), 9, replace=False))
        return np.diff([0, *borders, length]).tolist()
    size = int(kind)
    return [size] * (length // size) + ([length % size] if length % size else [])


@pytest.mark.parametrize("kind", ["1", "7", "64", "random"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_any_split_of_a_prompt(name, device, kind):
    ids = prompt(name, LENGTH)
    whole, split = model(name, device).prefill(ids), model(name, device).session()
    start = 0
    for size in cuts(kind, LENGTH):
        split.append(ids[start : start + size])
        start += size
    assert start == LENGTH
    assert_same(everything(split), everything(whole))


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64, 299])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_any_chunk_size(name, device, rows, plain):
    with load(name, device) as loaded:
        loaded._native.set_chunk(rows)
        assert_same(run(loaded, name), plain(name, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_all_rows_and_the_last_row_have_the_same_logits(name, device):
    loaded, ids = model(name, device), prompt(name, LENGTH)
    rows = loaded.logits(ids, last_only=False)
    for length in (1, 7, 64, 65, LENGTH):
        assert np.array_equal(loaded.logits(ids[:length]), rows[length - 1])
    assert np.array_equal(loaded.logits(ids[:64], last_only=False), rows[:64])


@pytest.mark.parametrize("device", DEVICES)
def test_generated_and_read_tokens_of_any_mixture(device):
    """Appends between generations, cut in two ways."""
    loaded, ids = model(MOE, device), prompt(MOE, LENGTH)

    def mixed(pieces):
        session = loaded.session()
        for start, stop in pieces:
            session.append(ids[start:stop])
        session.generate(max_tokens=5, **GREEDY)
        for start, stop in ((100, 131), (131, 180)) if len(pieces) > 1 else ((100, 180),):
            session.append(ids[start:stop])
        session.generate(max_tokens=5, **GREEDY)
        return everything(session)

    assert_same(mixed([(0, 33), (33, 100)]), mixed([(0, 100)]))


# Plans and schedules


@pytest.mark.parametrize("schedule", ["serial", "shuffle:1", "shuffle:2", "shuffle:3", "stages"])
@pytest.mark.parametrize("plan", ["fused", "unfused"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_schedules_and_plans(name, device, plan, schedule, plain, monkeypatch):
    monkeypatch.setenv("LILY_PLAN", plan)
    with load(name, device) as loaded:
        set_schedule(loaded, schedule)
        assert_same(run(loaded, name), plain(name, device))


def test_plans_record_different_dispatches(monkeypatch):
    plans = {}
    for plan in ("fused", "unfused"):
        monkeypatch.setenv("LILY_PLAN", plan)
        with load(MOE) as loaded:
            plans[plan] = loaded._native.plan()
    for part in ("decode", "prefill"):
        assert plans["fused"][part]["dispatches"] < plans["unfused"][part]["dispatches"], part


@pytest.mark.parametrize("sampling", [{"temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 4}])
@pytest.mark.parametrize("plan", ["fused", "unfused"])
def test_sampled_tokens_of_any_plan_and_schedule(plan, sampling, monkeypatch):
    monkeypatch.setenv("LILY_PLAN", plan)
    usual = run(model(MOE), MOE, **sampling)
    with load(MOE) as loaded:
        set_schedule(loaded, "shuffle:9")
        assert_same(run(loaded, MOE, **sampling), usual)


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_the_shuffle_notices_a_missing_barrier(part):
    """Without barrier N some order of the merged stages gives other results: for most N, in at most six draws."""
    with load(MOE) as loaded:
        ids, other, drops = prompt(MOE, 64), prompt(MOE, 300)[100:164], 0

        def outcome():
            loaded.prefill(other).close()  # so that what is left in the workspace is not what this prompt writes
            session = loaded.prefill(ids)
            if part == "decode":
                session.generate(max_tokens=2, **GREEDY)
            return b"".join(value.tobytes() for value in everything(session).values())

        usual = outcome()
        plan = loaded._native.plan()[part]
        stages = plan["stages"] if part == "prefill" else 1 + max(item["stage"] for item in plan["forward"])
        barriers = range(stages - 1)
        for barrier in barriers:
            for seed in range(6):
                set_schedule(loaded, f"shuffle:{seed}:drop:{barrier}")
                if outcome() != usual:
                    drops += 1
                    break
        assert drops >= 0.9 * len(barriers), f"{drops} of {len(barriers)}"
        set_schedule(loaded, "shuffle:0")
        assert outcome() == usual


@pytest.mark.parametrize("text", ["random", "shuffle:", "shuffle:x", "shuffle:1:drop:", "drop:3"])
def test_a_bad_schedule_is_refused(text):
    with pytest.raises(ValueError, match="schedule"):
        set_schedule(model(MOE), text)


# Threads and instruction sets


@pytest.mark.parametrize("threads", ["1", "2", "5"])
@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_threads(device, threads, plain, monkeypatch):
    monkeypatch.setenv("LILY_THREADS", threads)
    with load(MOE, device) as loaded:
        assert loaded.device.threads == int(threads)
        assert_same(run(loaded, MOE), plain(MOE, device))


@pytest.mark.parametrize("isa", native().testing.instruction_sets())
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_every_instruction_set_computes_the_model(name, isa, monkeypatch):
    monkeypatch.setenv("LILY_KERNEL", f"*={isa}")
    with load(name, "cpu:float32") as loaded:
        found = loaded.logits(prompt(name, 64), last_only=False)
        usual = model(name, "cpu:float32").logits(prompt(name, 64), last_only=False)
        assert abs(found - usual).max() <= 1e-3


X86 = [name for name in native().testing.variants() if name in ("amx", "amx-emulated", "avx512", "avx2")]


@pytest.mark.skipif(len(X86) < 2, reason="this machine lacks AVX2 or AVX-512")
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_x86_variants_read_a_prompt_to_the_same_bits(name, monkeypatch):
    found = []
    for isa in X86:
        monkeypatch.setenv("LILY_KERNEL", f"*={isa}")
        with load(name) as loaded:
            found.append(everything(loaded.prefill(prompt(name, LENGTH))))
    for other in found[1:]:
        assert_same(found[0], other)


@pytest.mark.parametrize("value", ["gemm", "gemm=sse9", "no_such_kernel=portable", "gemm=portable,", "=portable", "gemv=amx-emulated"])
def test_an_illegal_kernel_choice_is_an_error(value, monkeypatch):
    with load(MOE) as loaded:
        monkeypatch.setenv("LILY_KERNEL", value)
        with pytest.raises(lily.DeviceError, match="LILY_KERNEL"):
            loaded.prefill([1, 2, 3])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("LILY_THREADS", "0", ValueError),
        ("LILY_THREADS", "two", ValueError),
        ("LILY_PLAN", "fast", ValueError),
        ("LILY_SCHEDULE", "any", ValueError),
    ],
)
def test_a_bad_setting_in_the_environment_is_refused_at_load(name, value, error, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(error, match=name if name != "LILY_SCHEDULE" else "schedule"):
        load(MOE)


def test_the_schedule_can_come_from_the_environment(plain, monkeypatch):
    monkeypatch.setenv("LILY_SCHEDULE", "shuffle:7")
    with load(MOE) as loaded:
        assert_same(run(loaded, MOE), plain(MOE, "cpu"))


# Forks


@pytest.mark.parametrize("length", [7, 256, 300])
@pytest.mark.parametrize("device", DEVICES)
def test_forks_share_the_past_and_then_go_their_own_way(device, length):
    """On both sides of a block border; each branch equals the same tokens in a session of its own."""
    loaded, ids = model(MOE, device), prompt(MOE, LENGTH)[:length]
    continuations = ([5, 6, 7], [8, 9], [10] * 20)

    def branch(session, more):
        session.append(more)
        session.generate(max_tokens=6, **GREEDY)
        return everything(session)

    alone = [branch(loaded.prefill(ids), more) for more in continuations]
    trunk = loaded.prefill(ids)
    before = everything(trunk)
    forks = [trunk.fork() for _ in continuations]
    together = [branch(session, more) for session, more in zip(forks, continuations, strict=True)]
    for left, right in zip(together, alone, strict=True):
        assert_same(left, right)
    assert_same(everything(trunk), before)
    assert not np.array_equal(together[0]["logits"], together[1]["logits"])


def test_a_fork_of_a_pending_token_goes_on_alike():
    session = model(MOE).prefill(prompt(MOE, 64))
    session.generate(max_tokens=3, **GREEDY)
    forks = session.fork(), session.fork()
    assert_same(*(everything(fork) for fork in forks))
    assert_same(everything(forks[0]), everything(session))


def test_a_fork_outlives_its_source():
    session = model(MOE).prefill(prompt(MOE, 64))
    wanted = everything(session)
    fork = session.fork()
    session.close()
    for _ in range(3):
        model(MOE).prefill(prompt(MOE, LENGTH))
    assert_same(everything(fork), wanted)
