"""Random plans of work on sessions, each compared in every bit with a plain run of the same reads and generations.

A plan is a list of steps, each a tuple of a name and what it needs. Every session has a log of what was read and generated, from
which a fresh session, that is never cut, forked, rewound, saved or disturbed, can be made.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from checkpoints import assert_same, everything
from hypothesis import strategies as st

import lily
from lily import testing

# Both sides of every edge: a row, a block of K and V (256), a chunk (512 unless set), a snapshot (1,024).
EDGES = (1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025)


@dataclass
class Track:
    """A session and how to make it again."""

    session: lily.Session
    log: list[tuple] = field(default_factory=list)  # ("read", ids) and ("generate", count, options)

    def __len__(self) -> int:
        return sum(len(entry[1]) if entry[0] == "read" else entry[1] for entry in self.log)

    def add(self, *entry) -> None:
        if entry[0] == "generate" and not entry[1] or entry[0] == "read" and not len(entry[1]):
            return
        self.log.append(entry)

    def cut(self, n: int) -> None:
        kept = []
        for kind, what, *options in self.log:
            count = min(n, len(what) if kind == "read" else what)
            n -= count
            if count:
                kept.append((kind, what[:count] if kind == "read" else count, *options))
        self.log = kept


class Left(Exception):
    """Raised by a callback in the middle of the work."""


def plans(edges: tuple[int, ...], steps: int) -> st.SearchStrategy:
    sizes = st.one_of(st.integers(1, 40), st.sampled_from(edges))
    which = st.integers(0, 3)
    part = st.floats(0, 1)
    step = st.one_of(
        st.tuples(st.just("append"), which, sizes, st.integers(0, 2**32 - 1)),
        st.tuples(st.just("generate"), which, st.integers(1, 12), st.sampled_from([0, 0.9]), st.integers(0, 2**32 - 1)),
        st.tuples(st.just("stop"), which, st.integers(1, 6), st.integers(0, 2**32 - 1)),
        st.tuples(st.just("cancel"), which, sizes, st.integers(0, 2**32 - 1), part),
        st.tuples(st.just("fork"), which),
        st.tuples(st.just("rewind"), which, part),
        st.tuples(st.just("load"), which),
        st.tuples(st.just("neighbour"), which, st.integers(1, 40)),
        st.tuples(st.just("fail"), which, st.integers(0, 3), st.integers(0, 9)),
        st.tuples(st.just("raise"), which, st.integers(0, 4)),
    )
    return st.lists(step, min_size=2, max_size=steps)


class Work:
    """Runs a plan on a model."""

    def __init__(self, model: lily.Model, directory: Path, most_tokens: int) -> None:
        self.model, self.directory, self.most = model, directory, most_tokens
        self.tracks = [Track(model.session())]

    def ids(self, count: int, seed: int) -> np.ndarray:
        count = max(1, min(count, self.most - max(map(len, self.tracks))))
        return np.random.default_rng(seed).integers(0, self.model.config.vocab_size, count).astype(np.int32)

    def run(self, plan: list[tuple]) -> None:
        for name, which, *rest in plan:
            track = self.tracks[which % len(self.tracks)]
            if len(track) < self.most or name in ("rewind", "load"):
                getattr(self, name)(track, *rest)
            assert track.session.tokens[: len(track)] == track.session.tokens, (name, "tokens")
            assert not track.session._native.busy and self.model._native.in_flight == 0

    def append(self, track: Track, count: int, seed: int) -> None:
        ids = self.ids(count, seed)
        track.session.append(ids)
        track.add("read", ids)

    def generate(self, track: Track, count: int, temperature: float, seed: int) -> None:
        self._begun(track)
        options = {"temperature": temperature, "seed": seed, "ignore_eos": True}
        track.add("generate", len(track.session.generate(max_tokens=count, **options).tokens), options)

    def stop(self, track: Track, count: int, seed: int) -> None:
        """A stream that is left while further steps are in flight."""
        self._begun(track)
        options = {"temperature": 0.8, "seed": seed, "ignore_eos": True}
        stream = track.session.stream(max_tokens=count + 8, **options)
        for _, _ in zip(range(count), stream, strict=False):
            pass
        stream.close()
        track.add("generate", count, options)

    def cancel(self, track: Track, count: int, seed: int, part: float) -> None:
        """A reading that is given up: whole chunks stay."""
        ids, before = self.ids(count, seed), len(track.session)

        def leave(stage: str, done: int, total: int) -> None:
            if done >= part * total:
                raise Left

        try:
            track.session.append(ids, progress=leave)
        except Left:
            pass
        read = len(track.session) - before
        assert read >= int(part * len(ids))
        track.add("read", ids[:read])

    def fork(self, track: Track) -> None:
        copy = Track(track.session.fork(), list(track.log))
        self.tracks.append(copy)
        if len(self.tracks) > 4:
            self.check(self.tracks.pop(1))

    def rewind(self, track: Track, part: float) -> None:
        n = round(part * len(track))
        result = track.session.rewind(n)
        assert result.kept + result.reread == n
        track.cut(n)

    def load(self, track: Track) -> None:
        path = self.directory / "plan.lily"
        track.session.save(path)
        loaded = lily.Session.load(self.model, path)
        assert loaded._native.snapshots == track.session._native.snapshots
        track.session.close()
        track.session = loaded

    def neighbour(self, track: Track, count: int) -> None:
        """Another session reads and generates while this one does."""
        other = self.model.session()

        def work() -> None:
            other.append(self.ids(200, count))
            other.generate(max_tokens=count, ignore_eos=True, seed=count)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            self.append(track, count, count)
            self.generate(track, 4, 0.9, count)
        finally:
            thread.join()
        other.close()

    def fail(self, track: Track, step: int, stage: int) -> None:
        """The device fails in the middle; what was returned before stays."""
        self._begun(track)
        options = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
        before = len(track.session)
        testing.fail_at(self.model, step, stage)
        try:
            track.session.generate(max_tokens=6, **options)
        except lily.GPUError:
            pass
        finally:
            testing.fail_at(self.model, -1, 0)
        track.add("generate", len(track.session) - before, options)

    def _raising(self, after: int):
        words = -(-self.model.config.vocab_size // 32)

        def mask(ids: list[int]) -> np.ndarray:
            if len(ids) >= after:
                raise Left
            return np.full(words, 0xFFFFFFFF, np.uint32)

        return mask

    def __getattr__(self, name: str):
        if name == "raise":  # a word of the language
            return self.raise_in_mask
        raise AttributeError(name)

    def raise_in_mask(self, track: Track, after: int) -> None:
        """A token mask that raises in the middle of a generation."""
        self._begun(track)
        options = {"temperature": 0.8, "seed": 9, "ignore_eos": True}
        try:
            track.session.generate(max_tokens=8, token_mask=self._raising(after), **options)
            raise AssertionError("the mask was never called")
        except Left:
            pass
        track.add("generate", after, options)

    def _begun(self, track: Track) -> None:
        if not len(track.session):
            self.append(track, 3, 0)

    def check_all(self) -> None:
        while self.tracks:
            self.check(self.tracks.pop())

    def check(self, track: Track) -> None:
        """Equal in every bit to the plain run."""
        with track.session, self.model.session() as plain:
            for kind, what, *options in track.log:
                if kind == "read":
                    plain.append(what)
                else:
                    plain.generate(max_tokens=what, **options[0])
            assert plain.tokens == track.session.tokens
            assert plain.origins.tolist() == track.session.origins.tolist()
            if len(plain):
                assert_same(everything(track.session), everything(plain))


def run(model: lily.Model, directory: Path, plan: list[tuple], most_tokens: int) -> None:
    work = Work(model, directory, most_tokens)
    try:
        work.run(plan)
        work.check_all()
    finally:
        for track in work.tracks:
            track.session.close()
