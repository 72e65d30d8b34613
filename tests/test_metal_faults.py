"""What the Metal device does when Metal says no: at every message that can fail, with every error a command buffer can end in, with a GPU that stays
silent. A typed error, nothing lost, no object left behind."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import DENSE, FIXTURES, GREEDY, assert_same, everything, load, prompt
from standin import NEEDS_STANDIN, Standin, standin  # noqa: F401

import lily
from lily import testing

pytestmark = NEEDS_STANDIN
IDS = prompt(DENSE, 7)
#: Messages that give an object, or nil.
AT_LOAD = ["newBufferWithLength:options:", "newResidencySetWithDescriptor:error:", "newCommandQueueWithMaxCommandBufferCount:", "contents"]
AT_FIRST_USE = [
    "newLibraryWithSource:options:error:",
    "newFunctionWithName:constantValues:error:",
    "newComputePipelineStateWithDescriptor:options:reflection:error:",
]
AT_RUN = ["commandBufferWithUnretainedReferences", "computeCommandEncoderWithDispatchType:", "newBufferWithLength:options:"]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The kernels are looked at elsewhere."""
    monkeypatch.setenv("LILY_SIM_CHECK", "0")


@pytest.fixture
def model(standin):  # noqa: F811
    with load(DENSE, "metal") as found:
        yield found


def objects(standin: Standin) -> dict[str, int]:  # noqa: F811
    gc.collect()
    classes = ["MTLBuffer", "MTLLibrary", "MTLFunction", "MTLComputePipelineState", "MTLComputePipelineDescriptor", "MTLCommandQueue"]
    classes += ["MTLResidencySet", "MTLResidencySetDescriptor", "MTLCommandBuffer", "MTLComputeCommandEncoder", "MTLCompileOptions"]
    classes += ["MTLFunctionConstantValues", "NSString", "NSError"]
    return {name: standin.alive(name) for name in classes}


def places(count: int) -> list[int]:
    """The first and the last of so many."""
    return sorted({0, count - 1})


def test_nothing_is_left_when_a_model_is_closed(standin):  # noqa: F811
    before = objects(standin)
    for _ in range(2):
        with load(DENSE, "metal") as model:
            model.generate(IDS, max_tokens=2, ignore_eos=True)
        assert objects(standin) == before


@pytest.mark.parametrize("selector", AT_LOAD)
def test_a_refusal_while_loading(selector, standin):  # noqa: F811
    load(DENSE, "metal").close()
    before, count = objects(standin), standin.sent(selector)
    for nth in places(count):
        standin.fault(selector, nth=nth)
        with pytest.raises((lily.DeviceError, lily.OutOfMemoryError)) as caught:
            load(DENSE, "metal")
        assert "Stand-in for Metal" in str(caught.value) or "fault was injected" in str(caught.value)
        assert objects(standin) == before
    load(DENSE, "metal").close()


@pytest.mark.parametrize("selector", AT_FIRST_USE)
def test_a_refusal_of_the_compiler(selector, standin):  # noqa: F811
    """The error has the compiler's own text. A library that was refused stays refused; the model's other programs work."""
    with load(DENSE, "metal") as model:
        model.generate(IDS, max_tokens=1, ignore_eos=True)
    before, count = objects(standin), standin.sent(selector)
    for nth in places(count):
        with load(DENSE, "metal") as model:
            standin.fault(selector, nth=nth)
            with pytest.raises(lily.DeviceError, match="a fault was injected"):
                model.generate(IDS, max_tokens=1, ignore_eos=True)
        assert objects(standin) == before


@pytest.mark.parametrize("selector", AT_RUN)
def test_a_refusal_at_work(selector, model, standin):  # noqa: F811
    """The request fails, the session stays as it was, and the next request succeeds."""
    session = model.prefill(IDS)
    session.generate(max_tokens=2, **GREEDY)
    kept = everything(session)
    start = standin.sent(selector)
    probe = session.fork()
    probe.append([1, 2, 3])
    probe.generate(max_tokens=2, **GREEDY)
    wanted, count = everything(probe), standin.sent(selector) - start
    assert count
    # Memory comes from pools as well, so that only the first allocation is sure to be asked for.
    for nth in [0] if selector.startswith("newBuffer") else places(count):
        standin.fault(selector, nth=nth)
        with pytest.raises((lily.GPUError, lily.OutOfMemoryError, lily.DeviceError)):
            attempt = session.fork()
            attempt.append([1, 2, 3])
            attempt.generate(max_tokens=2, **GREEDY)
            everything(attempt)
        assert_same(kept, everything(session))
    again = session.fork()
    again.append([1, 2, 3])
    again.generate(max_tokens=2, **GREEDY)
    assert_same(wanted, everything(again))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "internal error"),
        (2, "too long"),
        (3, "memory that is not there"),
        (8, "memory is full"),
        (9, "given back"),
        (99, "not explain"),
    ],
)
def test_a_command_buffer_that_fails(code, words, model, standin):  # noqa: F811
    """Told on the thread that waits, with the stage and what Metal said (B012); in prefill, and in the middle of decoding with a step ahead."""
    session = model.prefill(IDS)
    kept = everything(session)
    standin.fault("MTLCommandBuffer commit", f"error:{code}")
    with pytest.raises(lily.GPUError, match=words) as caught:
        session.append([1, 2, 3])
    assert (
        caught.value.stage == 0
        and f"MTLCommandBufferErrorDomain code {code}" in caught.value.log
        and "from embed_tokens" in caught.value.log
    )
    assert_same(kept, everything(session))
    for nth in (0, 1, 2, 3):
        attempt = session.fork()
        standin.fault("MTLCommandBuffer commit", f"error:{code}", nth=nth)
        with pytest.raises(lily.GPUError):
            attempt.generate(max_tokens=6, **GREEDY)
        assert len(attempt) - len(session) <= 3  # what was read stays; the failed step and the one ahead are dropped
        after = attempt.tokens
        attempt.generate(max_tokens=2, **GREEDY)
        assert attempt.tokens[: len(after)] == after


@pytest.mark.parametrize("code", [4, 11])
def test_a_gpu_that_is_gone(code, standin):  # noqa: F811
    """Every later request fails at once and says why; a new model works when the GPU does."""
    with load(DENSE, "metal") as model:
        session = model.prefill(IDS)
        standin.fault("MTLCommandBuffer commit", f"error:{code}")
        with pytest.raises(lily.GPUError):
            session.append([1])
        for _ in range(2):
            with pytest.raises(lily.GPUError, match="restart it" if code == 4 else "gone"):
                session.append([1])
    with load(DENSE, "metal") as model:
        assert model.generate(IDS, max_tokens=1, ignore_eos=True).tokens


def test_a_gpu_that_does_not_answer(standin, monkeypatch):  # noqa: F811
    """After the time limit the request fails and the interpreter goes on; closing the model does not wait."""
    monkeypatch.setenv("LILY_METAL_TIMEOUT", "4")
    model = load(DENSE, "metal")
    session = model.prefill(IDS)
    standin.fault("MTLCommandBuffer commit", "hang")
    start = time.monotonic()
    with pytest.raises(lily.GPUError, match="has not answered for 4 seconds"):
        session.append([1, 2])
    assert 3 < time.monotonic() - start < 30
    with pytest.raises(lily.GPUError, match="has not answered"):
        session.append([1])
    session.close()
    model.close()


def test_a_gpu_that_answers_after_all(standin, monkeypatch):  # noqa: F811
    """What it may still have written to is kept until then and given back; the model works again, and so does loading another."""
    monkeypatch.setenv("LILY_METAL_TIMEOUT", "2")
    before, held = objects(standin), testing.native().testing.metal_bytes()
    with load(DENSE, "metal") as model:
        session = model.prefill(IDS)
        kept, wanted = everything(session), session.fork().generate(max_tokens=2, **GREEDY).tokens
        standin.fault("MTLCommandBuffer commit", "slow:4000")
        with pytest.raises(lily.GPUError, match="has not answered"):
            session.append([1, 2])
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert session.fork().generate(max_tokens=2, **GREEDY).tokens == wanted
                break
            except lily.GPUError:
                time.sleep(0.2)
        assert_same(kept, everything(session))
    assert objects(standin) == before
    with load(DENSE, "metal") as model:
        session = model.prefill(IDS)
        standin.fault("MTLCommandBuffer commit", "slow:4000")
        with pytest.raises(lily.GPUError, match="has not answered"):
            session.append([1, 2])
        session.close()
    deadline = time.monotonic() + 10  # closed before the answer: its memory comes back with it
    while objects(standin) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert objects(standin) == before and testing.native().testing.metal_bytes() == held


def test_sleep_is_not_silence(standin, monkeypatch):  # noqa: F811
    """A Mac that sleeps with a command buffer on its GPU goes on after waking: the time asleep does not count."""
    monkeypatch.setenv("LILY_METAL_TIMEOUT", "2")
    with load(DENSE, "metal") as model:
        session = model.prefill(IDS)
        wanted = session.fork().generate(max_tokens=2, **GREEDY).tokens
        standin.fault("MTLCommandBuffer commit", "slow:4000")
        timers = [threading.Timer(0.5 * i, standin.set, kwargs={"slept": 0.5 * i}) for i in range(1, 9)]
        for timer in timers:
            timer.start()
        assert session.generate(max_tokens=2, **GREEDY).tokens == wanted


def test_a_slow_gpu_is_waited_for(model, standin):  # noqa: F811
    """Another process has the GPU, or the machine is short of power: slow, not wrong."""
    session = model.prefill(IDS)
    wanted = session.fork().generate(max_tokens=3, **GREEDY).tokens
    standin.fault("MTLCommandBuffer commit", "slow:300")
    assert session.generate(max_tokens=3, **GREEDY).tokens == wanted


def test_an_interrupt_reaches_a_slow_prefill(model, standin, monkeypatch):  # noqa: F811
    """Ctrl-C ends the wait; the session keeps whole chunks only."""
    import _thread

    session = model.prefill(IDS)
    kept = everything(session)
    standin.fault("MTLCommandBuffer commit", "slow:800")
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        session.append([1, 2, 3])
    assert_same(kept, everything(session))


def test_no_gpu_no_crash(standin):  # noqa: F811
    """B074: the import works where no GPU is visible, and asking for one says what is wrong."""
    standin.set(gpu=0)
    assert "metal" not in [device.name for device in lily.devices()]
    with pytest.raises(lily.DeviceError, match="no Metal GPU is visible"):
        load(DENSE, "metal")


def test_a_mac_without_a_gpu_says_so_once_and_uses_the_cpu(standin, monkeypatch, caplog):  # noqa: F811
    standin.set(gpu=0)
    monkeypatch.setattr(lily.loading.sys, "platform", "darwin")
    with load(DENSE, "auto") as model:
        assert model.device.kind == "cpu"
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "no Metal device: no Metal GPU is visible to this process (a virtual machine, a sandbox or a remote login may hide it). Running on the CPU"
    ]


def test_the_mac_stays_awake_while_there_is_work(standin, monkeypatch):  # noqa: F811
    """B076: idle sleep is held off from the first submission until a little after the last, and while weights are read."""
    begin, end = "beginActivityWithOptions:reason:", "endActivity:"
    with load(DENSE, "metal") as model:
        assert standin.sent(begin) == standin.sent(end) == 1
        model.generate(IDS, max_tokens=2, ignore_eos=True)
        assert standin.sent(begin) == 2 and standin.sent(end) == 1
        deadline = time.monotonic() + 5
        while standin.sent(end) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert standin.sent(end) == 2 and standin.alive("NSActivity") == 0
        model.generate(IDS, max_tokens=1, ignore_eos=True)
    assert standin.sent(begin) == standin.sent(end) == 3
    monkeypatch.setenv("LILY_KEEP_AWAKE", "off")
    with load(DENSE, "metal") as model:
        model.generate(IDS, max_tokens=1, ignore_eos=True)
    assert standin.sent(begin) == 3


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"os": 1307}, "macOS 14 or later, this is macOS 13.7"),
        ({"family": 5}, "is of Apple family 5, expected 7"),
        ({"unified": 0}, "expected 7"),
        ({"threadgroup_memory": 16384}, "16384 bytes"),
    ],
)
def test_a_mac_that_is_too_old(properties, words, standin):  # noqa: F811
    """B077: told before anything is loaded."""
    standin.set(**properties)
    with pytest.raises(lily.DeviceError, match=words):
        load(DENSE, "metal")


@pytest.mark.parametrize(
    ("properties", "words"),
    [({"max_threads": 64}, "threads"), ({"simdgroup_width": 16}, "simdgroups of 16"), ({"static_memory": 40000}, "40000")],
)
def test_a_kernel_that_does_not_fit(properties, words, standin):  # noqa: F811
    standin.set(**properties)
    with load(DENSE, "metal") as model, pytest.raises(lily.DeviceError, match=words):
        model.prefill(IDS)


def test_macos_14_has_no_residency_sets(standin):  # noqa: F811
    standin.set(residency=0, math_mode=0, os=1400)
    with load(DENSE, "metal") as model:
        assert model.generate(IDS, max_tokens=1, ignore_eos=True).tokens
    assert standin.sent("addAllocation:") == 0 and standin.sent("setFastMathEnabled:") > 0


def test_a_model_that_the_working_set_does_not_hold(standin):  # noqa: F811
    """Refused with the numbers before anything is read; the advice names macOS's own limit."""
    standin.set(working_set=1 << 20)
    before = standin.sent("newBufferWithLength:options:")
    with pytest.raises(lily.OutOfMemoryError, match="iogpu.wired_limit_mb") as caught:
        load(DENSE, "metal")
    assert caught.value.available == 1 << 20 < caught.value.needed
    assert standin.sent("newBufferWithLength:options:") == before


def test_models_share_the_working_set(standin):  # noqa: F811
    with load(DENSE, "metal") as first:
        first.prefill(IDS)
        held = testing.native().testing.metal_bytes()
        standin.set(working_set=held + (1 << 20))
        with pytest.raises(lily.OutOfMemoryError, match="of which this process holds") as caught:
            load(DENSE, "metal", memory_limit=held + (1 << 20))
        assert caught.value.available <= 1 << 20
        assert first.generate(IDS, max_tokens=1, ignore_eos=True).tokens


def test_weights_go_into_buffers_no_larger_than_the_gpu_takes(standin):  # noqa: F811
    with load(DENSE, "metal") as model:
        wanted = model.logits(IDS)
    standin.set(max_buffer=2 << 20)
    with load(DENSE, "metal", max_context=512) as model:
        np.testing.assert_array_equal(model.logits(IDS), wanted)


def test_a_file_that_was_cut(standin, tmp_path, monkeypatch):  # noqa: F811
    """A checkpoint that changes between its check and its reading is an error, not a crash."""
    copy = tmp_path / "model"
    shutil.copytree(FIXTURES / DENSE, copy)
    weights = copy / "model.safetensors"

    def cut(*arguments):
        os.truncate(weights, weights.stat().st_size // 2)
        return native.Model(*arguments)

    native = lily.loading.native()
    monkeypatch.setattr(lily.loading, "native", lambda: SimpleNamespace(Model=cut, devices=native.devices))
    with pytest.raises(lily.CheckpointError, match="bytes"):
        lily.Model.from_pretrained(copy, device="metal", progress=False)


def test_loading_can_be_interrupted(standin):  # noqa: F811
    before = objects(standin)

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lily.Model.from_pretrained(FIXTURES / DENSE, device="metal", progress=stop)
    assert objects(standin) == before


def test_command_buffers_stay_short(standin, monkeypatch):  # noqa: F811
    """On a GPU that takes long for each dispatch the device cuts its work until every command buffer is near the slice, whatever the estimate was."""
    monkeypatch.setenv("LILY_METAL_SLICE", "0.25")
    standin.set(seconds_per_dispatch=0.05)
    with load(DENSE, "metal") as model:
        session = model.prefill(IDS)
        session.append([1, 2])
        with standin.recorded() as messages:
            session.append([3, 4])
    runs, count = [], 0
    for line in messages:
        count += "dispatchThreadgroups" in line
        if line == "CommandBuffer commit":
            runs.append(count)
            count = 0
    assert len(runs) > 5 and max(runs) * 0.05 <= 1
