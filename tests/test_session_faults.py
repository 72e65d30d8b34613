"""Faults at the worst moment: the model and every other session stay usable, and nothing that was acknowledged is lost."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from checkpoints import DEVICES, MOE, assert_same, everything, load, model

import lily

MIB = 1 << 20


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, count).astype(np.int32)


class Left(Exception):
    pass


@contextmanager
def files_of_at_most(count: int):
    """As on a full disk: a write beyond `count` bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def bystander():
    """A session beside, that must come out of it as it was."""
    session = model(MOE).prefill(ids(300, 1))
    session.generate(max_tokens=3, temperature=0, ignore_eos=True)
    copy = session.fork()
    expected = everything(copy)
    yield session
    assert_same(everything(session), expected)
    assert model(MOE)._native.in_flight == 0


# Saving


@pytest.mark.parametrize("size", [0, 100, 5000, 200_000])
def test_a_full_disk_leaves_the_older_file_and_the_session(bystander, tmp_path, size):
    path, session = tmp_path / "s.lily", model(MOE).prefill(ids(280))
    bystander.save(path)
    before = path.read_bytes()
    with files_of_at_most(size), pytest.raises(OSError):
        session.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["s.lily"]
    session.save(path)
    assert_same(everything(lily.Session.load(model(MOE), path)), everything(session))


def test_a_device_without_space_is_an_error_of_the_system(bystander):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    from lily import session_file

    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        session_file._write(file, {"tokens": ids(4)}, {})


KILLED = """
import os, signal, sys
import lily
from lily import session_file

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def half(file, tensors, metadata):
    file.write(b"half of a file")
    kill()

model = lily.Model.from_pretrained(sys.argv[1], progress=False)
session = model.prefill(list(range(2, 300)))
if sys.argv[3] == "writing":
    session_file._write = half
elif sys.argv[3] == "syncing":
    os.fsync = kill
else:
    os.replace = kill
session.save(sys.argv[2])
"""


@pytest.mark.parametrize("moment", ["writing", "syncing", "renaming"])
def test_a_process_killed_while_it_saves_leaves_the_older_file(bystander, tmp_path, moment):
    path = tmp_path / "s.lily"
    bystander.save(path)
    before = path.read_bytes()
    run = subprocess.run([sys.executable, "-c", KILLED, model(MOE).source, path, moment])
    assert run.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert lily.Session.load(model(MOE), path).tokens == bystander.tokens
    bystander.save(path)


# Callbacks and cancellation


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_cancelled_reading_keeps_whole_chunks_and_goes_on(bystander, device, chunks):
    with load(MOE, device) as loaded:
        loaded._native.set_chunk(64)
        session, whole = loaded.session(), ids(300)

        def leave(stage, done, total):
            if done >= 64 * chunks:
                raise Left

        with pytest.raises(Left):
            session.append(whole, progress=leave)
        assert len(session) == 64 * chunks
        assert session.report() == lily.Reuse(reused=0, read=64 * chunks)
        session.append(whole[len(session) :])
        assert_same(everything(session), everything(loaded.prefill(whole)))


def test_an_exception_in_a_callback_of_a_rewind_leaves_the_session_as_it_was(bystander):
    session = model(MOE).prefill(ids(900))
    expected = everything(session.fork())

    def leave(stage, done, total):
        if done:
            raise Left

    with pytest.raises(Left):
        session.rewind(700, progress=leave)
    assert_same(everything(session), expected)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_exception_in_a_token_mask_keeps_the_tokens_before_it(bystander, after):
    def mask(generated):
        if len(generated) == after:
            raise Left
        return np.full(-(-512 // 32), 0xFFFFFFFF, np.uint32)

    session, plain = model(MOE).prefill(ids(40)), model(MOE).prefill(ids(40))
    with pytest.raises(Left):
        session.generate(max_tokens=8, temperature=0, ignore_eos=True, token_mask=mask)
    plain.generate(max_tokens=after, temperature=0, ignore_eos=True)
    assert_same(everything(session), everything(plain))


# The memory limit


def small(free: int) -> lily.Model:
    """With so many bytes beside the weights, and chunks whose workspace fits in them."""
    loaded = load(MOE, memory_limit=model(MOE).memory().weights + free)
    loaded._native.set_chunk(64)
    return loaded


def test_a_limit_reached_while_a_prompt_is_read_keeps_what_was_read():
    with small(8 * MIB) as loaded:
        beside = loaded.prefill(ids(70, 1))
        expected = everything(beside.fork())
        session, whole = loaded.session(), ids(4000)
        with pytest.raises(lily.OutOfMemoryError) as caught:
            session.append(whole)
        assert 0 < len(session) < len(whole) and len(session) % 64 == 0
        assert caught.value.needed > caught.value.available >= 0
        assert loaded.memory().total <= loaded.memory().limit
        read = len(session)
        assert_same(everything(beside), expected)
        beside.append([1, 2, 3])
        assert_same(everything(session.fork()), everything(model(MOE).prefill(whole[:read])))
        session.close()
        beside.generate(max_tokens=4, ignore_eos=True)
        assert len(loaded.prefill(whole[:1000])) == 1000


def test_a_limit_reached_while_tokens_are_generated_keeps_them():
    with small(8 * MIB) as loaded:
        hold = []
        session = loaded.prefill(ids(200))
        session.generate(max_tokens=1, ignore_eos=True, temperature=0)
        with pytest.raises(lily.OutOfMemoryError):
            for seed in range(200):
                hold.append(loaded.prefill(ids(200, seed)))
        while len(hold) > 1 and loaded.memory().total > loaded.memory().limit - 2 * MIB:
            hold.pop().close()
            loaded._native.trim()
        got = []
        with pytest.raises(lily.OutOfMemoryError):
            for one in session.stream(max_tokens=3800, ignore_eos=True, temperature=0):
                got += one.tokens
        assert got and session.tokens[-len(got) :] == got
        plain = model(MOE).prefill(ids(200))
        plain.generate(max_tokens=len(session) - 200, ignore_eos=True, temperature=0)
        for other in hold:
            other.close()
        assert_same(everything(session), everything(plain))


def test_memory_that_a_session_needs_is_taken_from_the_store_first():
    with small(10 * MIB) as loaded:
        loaded.sessions.budget = 1 << 40
        for seed in range(6):
            loaded.sessions._put(loaded.prefill(ids(300, seed))._native.fork())
        stored = len(loaded.sessions)
        assert stored > 1
        session = loaded.prefill(ids(1500))
        assert len(loaded.sessions) < stored and loaded.memory().total <= loaded.memory().limit
        assert_same(everything(session), everything(model(MOE).prefill(ids(1500))))


# The store's directory


@pytest.fixture
def stored(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "lily")
    with load(MOE) as loaded:
        loaded.sessions.keep_on_disk(tmp_path)
        yield loaded


def test_a_full_disk_costs_the_store_a_file_and_nothing_else(stored, tmp_path, caplog):
    stored.sessions._put(stored.prefill(ids(300))._native)
    with files_of_at_most(1000):
        assert stored.sessions.flush() == 0
    assert "not written" in caplog.text and len(stored.sessions) == 1
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
    assert stored.sessions.flush() == 1
