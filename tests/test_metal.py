"""The Metal device through the engine: on a Mac the GPU itself, elsewhere its own code over a stand-in that runs every command buffer on the
simulator, with accesses, barriers and hazards checked. Nothing here knows which of the two it meets.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from checkpoints import DENSE, GREEDY, MIXED, MOE, ORIGINAL, assert_same, decode_rows, everything, expected, load, prompt, relative_rms

import lily
from lily import testing

pytestmark = pytest.mark.skipif(
    not any(device.kind == "metal" for device in lily.devices()), reason="no Metal device: neither a Mac's GPU nor LILY_SIM"
)
SOAK = pytest.mark.soak
SHORT = 7
MAC = sys.platform == "darwin"


@pytest.mark.parametrize(
    "name", [MOE, pytest.param(DENSE, marks=SOAK), pytest.param(MIXED, marks=SOAK), pytest.param(ORIGINAL, marks=SOAK)]
)
def test_float32_logits_equal_the_reference(name):
    """Bar 1: within 1e-3 of the float32 reference through prefill and through decode steps, and the same greedy text."""
    wanted, ids = expected(name)[f"logits_ref_{SHORT}"], prompt(name, SHORT)
    with load(name, "metal:float32") as model:
        assert abs(model.logits(ids, last_only=False)[-len(wanted) :] - wanted).max() <= 1e-3
        assert abs(decode_rows(model.session(), ids) - wanted).max() <= 1e-3
        assert model.prefill(ids).generate(max_tokens=4, **GREEDY).tokens == expected(name)[f"greedy_ref_{SHORT}"].tolist()[:4]


@pytest.mark.parametrize(
    "name", [DENSE, pytest.param(MOE, marks=SOAK), pytest.param(MIXED, marks=SOAK), pytest.param(ORIGINAL, marks=SOAK)]
)
def test_as_shipped_within_the_bar(name):
    """Bar 2: relative RMS of the bf16 form, beside that of the published implementation; prompts of 64 tokens."""
    wanted, published = expected(name)["logits_ref_64"], expected(name)["logits_mlx_64"]
    with load(name, "metal") as model:
        error = relative_rms(model.logits(prompt(name, 64), last_only=False)[-len(wanted) :], wanted)
    assert error <= (0.04 if name == DENSE else 0.07)
    assert error <= relative_rms(published, wanted) + 0.005


@pytest.fixture(scope="module", autouse=True)
def nothing_to_complain_about():
    """Off a Mac the stand-in looks on; what it has to say at the end fails the module."""
    if MAC:
        yield
        return
    from standin import Standin

    found = Standin()
    found.reset()
    yield
    assert not found.complaints()


def work(name: str, monkeypatch, device: str = "metal", **environment: str) -> dict[str, np.ndarray]:
    """A prompt read, three tokens generated and two more read, in a model of its own: all that the future depends on."""
    with monkeypatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        with load(name, device) as model:
            session = model.prefill(prompt(name, 64)[:20])
            session.generate(max_tokens=3, **GREEDY)
            session.append([5, 6])
            return everything(session)


@pytest.fixture(scope="module")
def plain():
    """What `work` gives with nothing forced."""
    with pytest.MonkeyPatch.context() as patch:
        return work(MOE, patch)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"LILY_METAL_ENCODER": "serial"}, id="a serial encoder", marks=SOAK),
        pytest.param({"LILY_METAL_IN_FLIGHT": "1"}, id="a wait for each command buffer", marks=SOAK),
        pytest.param({"LILY_METAL_SLICE": "1e-6"}, id="a command buffer for each stage"),
        pytest.param({"LILY_INDIRECT": "host"}, id="grids read by the host", marks=SOAK),
        pytest.param({"LILY_PLAN": "unfused"}, id="the unfused plan", marks=SOAK),
        pytest.param({"LILY_SCHEDULE": "serial"}, id="one dispatch after the other", marks=SOAK),
        pytest.param({"LILY_SCHEDULE": "shuffle:5", "LILY_SIM_SEED": "3"}, id="shuffled", marks=SOAK),
    ],
)
def test_how_work_is_submitted_changes_no_bit(environment, plain, monkeypatch):
    assert_same(plain, work(MOE, monkeypatch, **environment))


@pytest.mark.skipif(MAC, reason="compares the stand-in's road with the simulator's; on a GPU lily selftest compares kernels")
def test_the_same_bits_as_the_simulator(plain, monkeypatch):
    assert_same(plain, work(MOE, monkeypatch, device="sim"))


def test_a_trace_and_a_profile(monkeypatch):
    """Dispatches looked at one by one, and stages timed one by one."""
    ids = prompt(DENSE, SHORT)[:3]
    with load(DENSE, "metal:float32") as model, load(DENSE, "cpu:float32") as cpu:
        found, wanted = testing.trace(model, ids), testing.trace(cpu, ids)
        assert found.keys() == wanted.keys()
        for name in wanted:
            # Queries, keys and values are columns of one array: what the others have not written yet is left out.
            seen = np.isfinite(found[name]) if name.endswith(("q_proj.out", "k_proj.out")) else np.ones(found[name].shape, bool)
            assert seen.any() and np.allclose(found[name][seen], wanted[name][seen], rtol=1e-3, atol=1e-4), name
        profile = model.profile(ids, steps=1)
        assert profile.dispatches and all(dispatch.seconds >= 0 for dispatch in profile.dispatches)


def test_an_injected_fault_loses_nothing():
    with load(DENSE, "metal") as model:
        session = model.prefill(prompt(DENSE, SHORT))
        before = everything(session)
        testing.fail_at(model, 0, 2)
        with pytest.raises(lily.GPUError) as caught:
            session.append([1, 2])
        assert caught.value.stage == 2
        assert_same(before, everything(session))
        session.append([1, 2])


def test_what_the_environment_asks_is_checked(monkeypatch):
    for name, value in [
        ("LILY_METAL_ENCODER", "fast"),
        ("LILY_METAL_IN_FLIGHT", "3"),
        ("LILY_METAL_SLICE", "-1"),
        ("LILY_METAL_TENSOR", "yes"),
        ("LILY_INDIRECT", "x"),
    ]:
        monkeypatch.setenv(name, value)
        with pytest.raises(lily.DeviceError, match=f"{name} is '{value}', expected"):
            load(DENSE, "metal")
        monkeypatch.delenv(name)


def test_closing_returns_the_memory():
    import gc

    def held() -> int:
        return sum(v for v in [testing.native().testing.metal_bytes()])

    gc.collect()
    before = held()
    model = load(DENSE, "metal")
    session = model.prefill([1, 2, 3])
    assert held() > before
    session.close()
    model.close()
    del session, model
    gc.collect()
    assert held() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_is_refused():
    """In a child process an open model, an open session and a new model raise before any message to Metal; nothing hangs."""
    with load(DENSE, "metal") as model:
        session = model.prefill([1, 2])
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            told = []
            before = {} if MAC else _sent()
            for attempt in (
                lambda: model.prefill([1, 2]),
                lambda: session.append([3]),
                lambda: session.generate(max_tokens=1),
                lambda: load(DENSE, "metal"),
            ):
                try:
                    attempt()
                    told.append("no error")
                except lily.DeviceError as error:
                    told.append("fork" if "fork" in str(error) else str(error))
                except BaseException as error:
                    told.append(repr(error))
            told.append("silent" if MAC or _sent() == before else "spoke")
            os.write(write, "|".join(told).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        assert os.read(read, 4096).decode() == "fork|fork|fork|fork|silent"
        assert model.generate([1, 2], max_tokens=1, ignore_eos=True).tokens


def _sent() -> dict[str, int]:
    from standin import Standin

    return Standin().all_sent()
