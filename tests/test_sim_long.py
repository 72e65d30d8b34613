"""The engine on the simulator across 32,768 tokens, where decode attention changes its form: the CPU's logits on both sides."""

from __future__ import annotations

import os

import numpy as np
import pytest
from checkpoints import GREEDY, tiny

import lily
from lily._engine import native

pytestmark = [
    pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="LILY_SIM is not set: no simulator of the Metal kernels"),
    pytest.mark.soak,
]
EDGE = 32_768


def three_steps(directory, device: str) -> list[np.ndarray]:
    """Logits after the step that sees 32,767 tokens and after the next two. The keys and values before are random: reading so many takes hours here."""
    random = np.random.default_rng(0)
    with lily.Model.from_pretrained(directory, device=device, progress=False) as model:
        image = native().export_session(model.prefill([5, 9, 11, 300])._native)
        blocks, block_bytes = EDGE // 256, image["kv"][0].nbytes
        kv = [random.standard_normal(blocks * block_bytes // 4, np.float32) for _ in image["kv"]]
        kv[1] *= 30  # the mean of so many values is small: it should count
        kv = [part.view(np.uint8) for part in kv]
        tokens = random.integers(0, 512, EDGE - 2, dtype=np.int32)
        grown = native().import_session(model._native, tokens, np.zeros(len(tokens), np.uint8), len(tokens), image["states"][:1], [], kv)
        session = lily.Session(model, grown)
        found = []
        for seen in (EDGE - 1, EDGE, EDGE + 1):
            session.generate(max_tokens=1, **GREEDY)
            found.append(session.logits())  # consumes the token
            assert len(session.tokens) == seen
        return found


def test_both_sides_agree_with_the_cpu(tmp_path, monkeypatch):
    directory = tiny(tmp_path, context=40_000, heads=8)
    wanted = three_steps(directory, "cpu:float32")
    default = three_steps(directory, "sim:float32")
    monkeypatch.setenv("LILY_KERNEL", "attn_split_long=general")
    general = three_steps(directory, "sim:float32")
    for found in (default, general):
        for a, b in zip(found, wanted, strict=True):
            assert abs(a - b).max() <= 1e-3
    # Below the edge there is one form. At it both cut 128 blocks alike, past it they do not.
    assert (default[0] == general[0]).all() and (default[1] == general[1]).all() and (default[2] != general[2]).any()
