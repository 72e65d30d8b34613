"""Who reads the grid of a grouped product: the device, or for comparison the host, which waits for the device in the middle of a chunk."""

from __future__ import annotations

import os

import pytest
from checkpoints import DENSE, GREEDY, MOE, assert_same, everything, load, prompt

from lily._engine import native
from lily.errors import DeviceError

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="LILY_SIM is not set: no simulator of the Metal kernels")


def work(name: str, monkeypatch, reader: str | None):
    """Two chunks read and two tokens generated in a model of its own: all that the future depends on, and the device's counters."""
    if reader is None:
        monkeypatch.delenv("LILY_INDIRECT", raising=False)
    else:
        monkeypatch.setenv("LILY_INDIRECT", reader)
    with load(name, "sim") as model:
        session = model.prefill(prompt(name, 64)[:20])
        session.append([5, 6])
        session.generate(max_tokens=2, **GREEDY)
        return everything(session), native().testing.counters(model._native)


def test_grids_that_the_host_reads_back_give_the_same_bits_and_are_counted(monkeypatch):
    device, counted = work(MOE, monkeypatch, None)
    assert counted["host_reads"] == 0
    host, counted_host = work(MOE, monkeypatch, "host")
    assert_same(device, host)
    with load(MOE, "cpu") as model:
        layers = model.config.num_layers
    # Two chunks; in every layer the experts' gate/up and down.
    assert counted_host == {**counted, "host_reads": 2 * layers * 2}


def test_without_experts_nothing_is_read_back(monkeypatch):
    assert work(DENSE, monkeypatch, "host")[1]["host_reads"] == 0


def test_the_device_reads_its_grids_when_asked_to(monkeypatch):
    assert work(MOE, monkeypatch, "device")[1]["host_reads"] == 0


def test_another_reader_is_refused(monkeypatch):
    monkeypatch.setenv("LILY_INDIRECT", "never")
    with pytest.raises(DeviceError, match="LILY_INDIRECT is 'never', expected device or host"):
        load(DENSE, "sim")
