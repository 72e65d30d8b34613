"""A model whose recurrence runs in the chunkwise form, chosen by LILY_KERNEL: the bar of the sequential form holds."""

from __future__ import annotations

import os

import pytest
from checkpoints import MOE, expected, load, prompt

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="LILY_SIM is not set: no simulator of the Metal kernels")


@pytest.mark.soak
def test_float32_logits_equal_the_reference(monkeypatch):
    """Within 1e-3 of the float32 reference, in one chunk and cut inside of a block."""
    monkeypatch.setenv("LILY_KERNEL", "gdn_scan=chunked")
    ids, wanted = prompt(MOE, 64), expected(MOE)["logits_ref_64"]
    with load(MOE, "sim:float32") as model:
        assert abs(model.logits(ids, last_only=False)[-len(wanted) :] - wanted).max() <= 1e-3
        session = model.prefill(ids[:40])
        session.append(ids[40:])
        assert abs(session.logits() - wanted[-1]).max() <= 1e-3
