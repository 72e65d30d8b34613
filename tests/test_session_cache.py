"""The store's directory: sessions survive the process, files are never changed, and their size is bounded."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from checkpoints import DENSE, MOE, assert_same, everything, load

import lily
from lily import session_cache, session_file


def question(words: int, name: str = "a") -> list[dict]:
    return [{"role": "user", "content": f"{name} " + " ".join(f"shelf {i} holds jars" for i in range(words))}]


def ask(model: lily.Model, messages: list[dict], **options) -> lily.Message:
    return model.chat(messages, thinking=False, temperature=0, max_tokens=options.pop("max_tokens", 3), ignore_eos=True, **options)


def files(directory) -> list:
    return sorted(directory.glob("*/*"))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "sessions"


@pytest.fixture
def model(directory):
    with load(MOE) as model:
        model.sessions.keep_on_disk(directory)
        yield model


def test_a_later_process_goes_on_from_the_file_with_the_bits_of_a_cold_run(directory):
    messages = question(20)
    with load(MOE) as model:
        model.sessions.keep_on_disk(directory)
        first = ask(model, messages)
        assert first.reuse.reused == 0 and not files(directory)
    (path,) = files(directory)
    before = path.read_bytes()
    with load(MOE) as model:
        model.sessions.keep_on_disk(directory)
        again = ask(model, messages, reuse_generated=False)
        assert again.reuse.read <= 64 and again.usage.reused_tokens > 256
        assert again.tokens == first.tokens
        warm = model.sessions._newest().fork()
        longer = ask(model, [*messages, again, {"role": "user", "content": "More?"}])
        assert longer.usage.reused_tokens >= 256
        cold = model.session()
        cold.append(warm.tokens[: again.usage.prompt_tokens])
        cold.generate(max_tokens=3, temperature=0, ignore_eos=True)
        assert_same(everything(warm), everything(cold))
        assert path.read_bytes() == before  # whatever was done with its copies


def test_what_leaves_the_memory_is_found_again_on_the_disk(model, directory):
    first = question(20, "a")
    ask(model, first)
    model.sessions.budget = model.sessions.nbytes + 1000
    ask(model, question(20, "b"))
    assert len(model.sessions) == 1 and len(files(directory)) == 1
    assert ask(model, first).reuse.read <= 64


def test_a_session_is_written_once(model, directory):
    ask(model, question(20))
    assert model.sessions.flush() == 1
    (path,) = files(directory)
    stamp = path.stat().st_ino
    assert model.sessions.flush() == 1
    assert [p.stat().st_ino for p in files(directory)] == [stamp]


def test_all_files_stay_within_the_limit_and_the_least_recently_used_goes_first(directory):
    def total() -> int:
        return sum(path.stat().st_size for path in files(directory))

    with load(MOE) as model, load(DENSE) as other:
        model.sessions.keep_on_disk(directory)
        ask(model, question(20, "a"))
        model.sessions.flush()
        size = total()
        limit = 4 * size
        for one in (model, other):
            one.sessions.keep_on_disk(directory, limit=limit)
        (oldest,) = files(directory)
        used = time.time()
        for i, name in enumerate("bcdef"):
            one = other if name == "d" else model
            one.sessions.clear()
            ask(one, question(20, name))
            one.sessions.flush()
            assert total() <= limit
            for path in files(directory):  # an order that does not hang on the clock's grain
                if path != oldest and path.stat().st_mtime > used + i:
                    os.utime(path, (used + i, used + i))
            os.utime(oldest, (used + 100, used + 100)) if oldest.exists() else None
        assert oldest.exists() and 1 < len(files(directory)) < 6
        assert len({path.parent for path in files(directory)}) <= 2
        model.sessions.keep_on_disk(directory, limit=1000)
        model.sessions.clear()
        ask(model, question(20, "g"))
        assert model.sessions.flush() == 0  # larger than everything there may be


def test_models_and_devices_do_not_take_each_others_files(directory):
    with load(MOE) as model, load(MOE, "cpu:float32") as exact, load(DENSE) as other:
        for one in (model, exact, other):
            one.sessions.keep_on_disk(directory)
        ask(model, question(20))
        model.sessions.flush()
        for one in (exact, other):
            assert ask(one, question(20)).reuse.reused == 0
            one.sessions.clear()
        assert len(files(directory)) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "replaced"])
def test_a_damaged_file_is_passed_over_and_deleted(directory, damage):
    messages = question(20)
    with load(MOE) as model:
        model.sessions.keep_on_disk(directory)
        expected = ask(model, messages, logprobs=1)
    (path,) = files(directory)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes({"cut": data[:-100], "flipped": data, "emptied": b"", "replaced": b"something else" * 100}[damage])
    with load(MOE) as model:
        model.sessions.keep_on_disk(directory)
        again = ask(model, messages, logprobs=1)
        assert again.usage.reused_tokens == 0
        assert (again.tokens, again.logprobs) == (expected.tokens, expected.logprobs)
        if damage == "flipped":
            assert not path.exists()


def test_a_file_that_another_process_deletes_is_no_error(model, directory, monkeypatch):
    messages = question(20)
    ask(model, messages)
    model.sessions.flush()
    model.sessions.clear()
    listed = session_cache.SessionCache.entries

    def gone(cache):
        found = listed(cache)
        for path in files(directory):
            path.unlink()
        return found

    monkeypatch.setattr(session_cache.SessionCache, "entries", gone)
    assert ask(model, messages).usage.reused_tokens == 0


def test_files_of_a_killed_process_are_removed_and_those_being_written_are_not(model, directory):
    ask(model, question(20))
    model.sessions.flush()
    folder = files(directory)[0].parent
    dead, alive = (folder / f".x.{name}{session_file.PART}" for name in ("dead", "alive"))
    for path in (dead, alive):
        path.write_bytes(b"half")
    os.utime(dead, (time.time() - 7200,) * 2)
    ask(model, question(22, "b"))
    model.sessions.flush()
    assert not dead.exists() and alive.exists()


def test_clearing_may_take_the_files_along(model, directory):
    ask(model, question(20))
    model.sessions.flush()
    model.sessions.clear()
    assert len(files(directory)) == 1
    model.sessions.clear(disk=True)
    assert not files(directory)


def test_the_usual_directory_is_the_systems_cache(monkeypatch, tmp_path):
    import platformdirs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with load(DENSE) as model:
        assert model.sessions.keep_on_disk() == platformdirs.user_cache_path("lily-inference", appauthor=False) / "sessions"


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_a_bad_limit_is_refused(model, bad, error):
    with pytest.raises(error, match="limit"):
        model.sessions.keep_on_disk(limit=bad)


def test_the_prefix_that_spares_most_is_taken_from_memory_or_disk(model):
    ask(model, question(30))
    model.sessions.flush()
    model.sessions.clear()
    ask(model, question(2))  # in memory, but short
    assert ask(model, question(30)).reuse.read <= 64
    ask(model, question(30))
    newest = len(model.sessions._newest().tokens)
    assert newest == len(ids_of(model, question(30))) + 3  # now from memory, not loaded again


def ids_of(model: lily.Model, messages: list[dict]) -> np.ndarray:
    return np.array(model.apply_chat_template(messages, tokenize=True, enable_thinking=False))
