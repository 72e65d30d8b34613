"""What threads, signals, forks and full memory may do at the worst moment: an error at most, never a crash or a wrong result."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from checkpoints import tiny

import lily


@pytest.fixture(scope="module")
def model():
    with lily.Model.demo(progress=False) as model:
        yield model


def ids(n: int) -> list[int]:
    return [(i * 37) % 5000 + 300 for i in range(n)]


def logits(model: lily.Model, *appends: list[int]) -> np.ndarray:
    session = model.session()
    for part in appends:
        session.append(part)
    return session.logits()


@pytest.fixture(scope="module")
def sizes(model):
    """Bytes that two sessions of 100 and 512 tokens need, and those of one state."""
    with lily.Model.demo(progress=False) as probe:
        sessions = [probe.prefill(ids(100)), probe.prefill(ids(512))]
        memory = probe.memory()
        assert len(sessions) == 2
        return memory.total, memory.state_bytes


@pytest.mark.parametrize("states", [1, 2, 3, 4, 6, 8, 10])
def test_memory_that_runs_out_in_an_append_leaves_every_session_right(model, sizes, states):
    total, state = sizes
    with lily.Model.demo(progress=False, memory_limit=total + states * state) as small:
        other, session = small.prefill(ids(100)), small.prefill(ids(512))
        shared = session.fork()
        for part in (ids(512), ids(10)):
            try:
                session.append(part)
            except lily.OutOfMemoryError as error:
                assert error.needed > 0
        assert session.tokens[:512] == ids(512)
        for one, expected in ((session, session.tokens), (shared, ids(512)), (other, ids(100))):
            try:
                assert np.array_equal(one.logits(), logits(model, expected))
            except lily.OutOfMemoryError:
                continue


def test_a_copy_of_a_shared_block_that_fails_leaves_both_forks_right(model):
    with lily.Model.demo(progress=False) as probe:  # the smallest workspace: what runs out is room for states, keys and values
        probe._native.set_chunk(16)
        sessions = [probe.prefill(ids(100)), probe.prefill(ids(512))]
        total, state = probe.memory().total, probe.memory().state_bytes
        assert len(sessions) == 2
    seen = 0
    for extra in range(-6 * state, 9 * state, 3 * state):
        try:
            small = lily.Model.demo(progress=False, memory_limit=total + extra)
        except lily.OutOfMemoryError:
            continue
        with small:
            small._native.set_chunk(16)
            try:
                first = small.prefill(ids(100))
            except lily.OutOfMemoryError:
                continue
            second = first.fork()
            try:
                first.append(ids(900))
            except lily.OutOfMemoryError:
                seen += 1
            for one in (first, second):
                try:
                    one.append([5, 6, 7])
                    assert np.array_equal(one.logits(), logits(model, one.tokens))
                except lily.OutOfMemoryError:
                    continue
    assert seen


@pytest.mark.parametrize("what", ["session", "model"])
def test_closing_while_another_thread_reads_is_no_crash(what):
    model = lily.Model.demo(progress=False)
    session = model.session()
    outcome: list[object] = []

    def read() -> None:
        try:
            session.append(ids(4000))
            outcome.append("read")
        except (ValueError, lily.LilyError) as error:
            outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.1)
    (session if what == "session" else model).close()
    thread.join(60)
    assert not thread.is_alive() and len(outcome) == 1
    with pytest.raises(ValueError, match="closed"):
        session.append([1])


def test_a_progress_callback_may_close_its_session(model):
    session = model.session()
    session.append(ids(600), progress=lambda stage, done, total: session.close())
    with pytest.raises(ValueError, match="closed"):
        session.append([1])


def test_closing_a_decoder_ends_a_wait_in_another_thread(model):
    session = model.prefill(ids(50))
    decoder = session._native.start({"temperature": 0}, 10_000)
    errors: list[BaseException] = []

    def pull() -> None:
        try:
            while decoder.next(None):
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    time.sleep(0.2)
    decoder.close()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(errors[0], (ValueError, lily.LilyError))
    tokens = session.tokens
    assert np.array_equal(session.fork().logits(), session.logits()) and session.tokens == tokens


def test_properties_may_be_read_while_another_thread_generates(model):
    session = model.prefill(ids(20))
    done = threading.Event()
    seen: list[int] = []

    def poll() -> None:
        while not done.is_set():
            tokens, origins = session.tokens, session.origins
            assert tokens[:20] == ids(20) and session.nbytes > 0
            seen.append(len(tokens) - len(origins))

    thread = threading.Thread(target=poll)
    thread.start()
    session.generate(max_tokens=150, temperature=0, ignore_eos=True)
    done.set()
    thread.join(30)
    assert seen and len(session) == 170


def test_ctrl_c_in_a_rewind_over_generated_tokens_changes_nothing(model):
    session = model.prefill(ids(10))
    session.generate(max_tokens=300, temperature=0, ignore_eos=True)
    before = session.tokens
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.05, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.rewind(305)
        while True:  # the rewind was faster than the signal
            time.sleep(0.01)
    assert time.perf_counter() - pressed[0] < 1
    timer.join()
    assert session.tokens == before or len(session) == 305
    assert np.array_equal(session.fork().logits(), session.logits())


def test_a_forked_child_is_refused_instead_of_hanging(model):
    stream = model.stream("Once upon a time", max_tokens=4, temperature=0)
    next(stream)
    child = os.fork()
    if child == 0:
        code = 3
        try:
            next(stream)
        except lily.DeviceError as error:
            code = 0 if "fork" in str(error) else 4
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert len(list(stream)) == 3


def test_mask_bits_behind_the_vocabulary_allow_nothing(tmp_path):
    with lily.Model.from_pretrained(tiny(tmp_path, context=64, vocab=520), progress=False) as model:
        mask = np.zeros(17, np.uint32)
        mask[-1] = 1 << 20  # ids 512 to 519 are the last word's low eight bits
        with pytest.raises(lily.SamplingError, match="no token at all"):
            model.generate([1, 2, 3], max_tokens=3, token_mask=lambda _: mask)
        mask[-1] |= 1 << 7
        assert model.generate([1, 2, 3], max_tokens=3, ignore_eos=True, token_mask=lambda _: mask).tokens == [519] * 3


@pytest.mark.parametrize("value", [1e39, -1e39, 1e31])
def test_values_that_float32_cannot_hold_are_refused(value):
    with pytest.raises(lily.SamplingError, match="frequency_penalty"):
        lily.Sampling(frequency_penalty=value)
    with pytest.raises(lily.SamplingError, match="repetition_penalty"):
        lily.Sampling(repetition_penalty=abs(1 / value))
