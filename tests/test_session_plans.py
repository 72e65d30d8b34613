"""The promise: results depend only on which tokens were read and which were generated, whatever else was done on the way."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest
from checkpoints import DENSE, MIXED, MOE, ORIGINAL, assert_same, everything, load
from hypothesis import HealthCheck, Phase, given, seed, settings
from session_plans import EDGES, plans, run

import lily

DEMO = "demo"
DEVICES = ("cpu",)
CHUNKS = (64, 512)
SECONDS = 60 * float(os.environ.get("SOAK_MINUTES", "1"))


@pytest.fixture(scope="module", params=[(name, device) for name in (DEMO, MOE, DENSE, MIXED, ORIGINAL) for device in DEVICES], ids="-".join)
def model(request):
    name, device = request.param
    with lily.Model.demo(device=device, progress=False) if name == DEMO else load(name, device) as model:
        yield model


def ids(model: lily.Model, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count).astype(np.int32)


def quiet_settings(examples: int, **options) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=checks, print_blob=True, **options)


# A failure is shown as it was found: shrinking it would take longer than the rest of the suite. The soak run shrinks.
@quiet_settings(6, derandomize=True, phases=[Phase.generate])
@given(plan=plans(tuple(edge for edge in EDGES if edge < 300), steps=9))
def test_any_work_equals_the_plain_run_of_its_reads_and_generations(model, tmp_path, plan):
    run(model, tmp_path, plan, most_tokens=600)


@pytest.mark.soak
@pytest.mark.parametrize("chunk", CHUNKS)
def test_long_random_work_equals_the_plain_run(model, tmp_path, chunk):
    default, end = model._native.chunk, time.monotonic() + SECONDS / len(CHUNKS)
    model._native.set_chunk(chunk)
    try:
        while time.monotonic() < end:
            start = random.SystemRandom().getrandbits(32)
            print("seed", start)

            @seed(start)
            @quiet_settings(10)
            @given(plan=plans(EDGES, steps=24))
            def work(plan):
                run(model, tmp_path, plan, most_tokens=3000)

            work()
    finally:
        model._native.set_chunk(default)


def edges_equal_less_read(model: lily.Model, directory, count: int, edges: list[int]) -> None:
    """A long prompt, taken back to each edge by rewind, by a fork and through a file, against a session that read no more."""
    whole = ids(model, count)
    long, plain = model.prefill(whole), model.session()
    for edge in edges:
        plain.append(whole[len(plain) : edge])
        expected = everything(plain)
        back = long.fork()
        result = back.rewind(edge)
        assert result.kept + result.reread == edge and result.reread <= 1024
        assert_same(everything(back), expected)
        back.save(directory / "edge.lily")
        loaded = lily.Session.load(model, directory / "edge.lily")
        assert_same(everything(loaded), expected)
        for session in (back, loaded):
            session.append(whole[edge:][:3])
        assert_same(everything(back), everything(loaded))
    assert_same(everything(long), everything(model.prefill(whole)))


def test_lengths_around_the_edges_of_blocks_and_chunks(model, tmp_path):
    edges_equal_less_read(model, tmp_path, 530, [1, 255, 256, 257, 511, 512, 513])


@pytest.mark.soak
def test_lengths_around_every_edge_of_a_prompt_of_3000_tokens(model, tmp_path):
    edges = sorted(
        {base * step + more for step in (256, 512, 1024) for base in range(1, 3000 // step + 1) for more in (-1, 0, 1)}
        & set(range(1, 3000))
    )
    edges_equal_less_read(model, tmp_path, 3000, edges)


def test_a_prompt_of_3000_tokens_beside_other_sessions(tmp_path):
    """On the shipped model, cut anywhere, forked, rewound over two snapshots and read on, while others work."""
    import threading

    with lily.Model.demo(progress=False) as model:
        whole = ids(model, 3000)
        expected = everything(model.prefill(whole))
        stop = threading.Event()

        def neighbour() -> None:
            while not stop.is_set():
                with model.prefill(ids(model, 70, 5)) as other:
                    other.generate(max_tokens=4, ignore_eos=True)

        thread = threading.Thread(target=neighbour)
        thread.start()
        try:
            session = model.session()
            for start, end in ((0, 1), (1, 700), (700, 1024), (1024, 2049), (2049, 3000)):
                session.append(whole[start:end])
            assert session.rewind(2040).kept == 1024
            session = session.fork()
            session.append(whole[2040:])
        finally:
            stop.set()
            thread.join()
        assert_same(everything(session), expected)
