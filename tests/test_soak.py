"""What takes long, and random input in quantity: run by .ci/soak. SOAK_MINUTES bounds each random test (default: 1)."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest

import lily
from lily.model import DEMO
from lily.testing import state

pytestmark = pytest.mark.soak
SECONDS = 60 * float(os.environ.get("SOAK_MINUTES", "1"))


@pytest.fixture(scope="module")
def model():
    with lily.Model.demo() as model:
        yield model


def rounds():
    """Seeds until the time is up; a failure prints the seed that it had."""
    seed, end = random.SystemRandom().getrandbits(32), time.monotonic() + SECONDS
    while time.monotonic() < end:
        print("seed", seed)
        yield random.Random(seed)
        seed += 1


def same(a: lily.Session, b: lily.Session) -> bool:
    left, right = state(a), state(b)
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


def random_ids(rng: random.Random, model: lily.Model, count: int) -> list[int]:
    return [rng.randrange(model.config.vocab_size) for _ in range(count)]


def test_any_cut_of_any_prompt_gives_the_same_bits(model):
    for rng in rounds():
        ids = random_ids(rng, model, rng.choice([1, 63, 65, 255, 256, 257, 511, 513, 1500, rng.randint(2, 3000)]))
        whole, pieces = model.prefill(ids), model.session()
        at = 0
        while at < len(ids):
            count = rng.choice([1, 2, 31, 64, 300, 512, len(ids)])
            pieces.append(ids[at : at + count])
            at += count
            if rng.random() < 0.2:
                pieces = pieces.fork()
        assert np.array_equal(whole.logits(), pieces.logits()) and same(whole, pieces)


def test_random_walks_of_sessions_equal_the_same_steps_without_forks(model):
    """Appends, generations, early stops and forks, replayed on a fresh session from tokens and origins."""
    for rng in rounds():
        session, log = model.session(), []
        for _ in range(rng.randint(2, 8)):
            if not log or rng.random() < 0.5:
                ids = random_ids(rng, model, rng.randint(1, 80))
                session.append(ids)
                log.append(("read", ids))
            else:
                options = {"temperature": rng.choice([0, 0.8]), "seed": rng.getrandbits(32), "ignore_eos": True}
                stop, stream = rng.randint(1, 12), session.stream(max_tokens=rng.randint(12, 20), **options)
                for count, _ in enumerate(stream, 1):
                    if count == stop:
                        break
                stream.close()
                log.append(("generate", stop, options))
            if rng.random() < 0.4:
                other = session.fork()
                other.generate(random_ids(rng, model, 5), max_tokens=4)
        replayed = model.session()
        for entry in log:
            if entry[0] == "read":
                replayed.append(entry[1])
            else:
                replayed.generate(max_tokens=entry[1], **entry[2])
        assert replayed.tokens == session.tokens and replayed.origins.tolist() == session.origins.tolist()
        assert np.array_equal(replayed.logits(), session.logits()) and same(replayed, session)


def test_damaged_checkpoints_are_refused_or_run_but_never_crash(tmp_path):
    header_bytes = struct.unpack("<Q", (DEMO / "model.safetensors").read_bytes()[:8])[0] + 8
    for rng in rounds():
        copy = tmp_path / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(DEMO, copy)
        damage(rng, copy, header_bytes)
        try:
            with lily.Model.from_pretrained(copy, max_context=256) as model:
                model.generate([1, 2, 3], max_tokens=2)
        except (lily.LilyError, ValueError):
            pass


def damage(rng: random.Random, directory: Path, header_bytes: int) -> None:
    kind = rng.randrange(4)
    if kind == 0:  # a config field gone or odd
        path = directory / "config.json"
        config = json.loads(path.read_text())
        part = config.get("text_config", config)
        name = rng.choice(sorted(part))
        if rng.random() < 0.5:
            del part[name]
        else:
            part[name] = rng.choice([0, -1, 1, 3, 1 << 40, 0.5, None, "x", [], {}])
        path.write_text(json.dumps(config))
    elif kind == 1:  # a truncated file
        path = directory / rng.choice(["model.safetensors", "tokenizer.json", "config.json", "model.safetensors.index.json"])
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:  # bytes of the header or of a small file changed
        name = "model.safetensors" if kind == 2 else rng.choice(["tokenizer.json", "config.json", "generation_config.json"])
        with open(directory / name, "r+b") as file:
            size = header_bytes if kind == 2 else os.path.getsize(directory / name)
            for _ in range(rng.randint(1, 4)):
                file.seek(rng.randrange(size))
                file.write(bytes([rng.randrange(256)]))


def test_a_long_context_ends_at_the_limit_and_the_next_call_is_right():
    with lily.Model.demo() as model:
        limit = model.max_context
        ids = random_ids(random.Random(0), model, limit - 5)
        session = model.prefill(ids)
        answer = session.generate(max_tokens=100, ignore_eos=True, temperature=0)
        assert (len(answer.tokens), answer.finish_reason, len(session)) == (5, "length", limit)
        with pytest.raises(lily.ContextOverflowError):
            session.append([1])
        assert model.generate("The capital of France is", max_tokens=2, temperature=0).text.startswith(" Paris")
