"""What the Metal device tells Metal: message by message for a decode step and a prefill chunk, and what must hold of any such list."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter

import pytest
from checkpoints import DATA, GREEDY, MOE, load, prompt
from standin import NEEDS_STANDIN, standin  # noqa: F401

import lily
from lily import msl
from lily._engine import native

pytestmark = NEEDS_STANDIN
GOLDEN = DATA / "metal"


def dispatches(messages: list[str]) -> int:
    return sum("dispatchThreadgroups" in line for line in messages)


@pytest.fixture
def model(standin, monkeypatch):  # noqa: F811
    monkeypatch.setenv("LILY_SIM_CHECK", "0")
    with load(MOE, "metal") as found:
        yield found


@pytest.fixture
def step(model, standin) -> list[str]:  # noqa: F811
    """The messages of one decode step: the forward pass and the sampler."""
    session = model.prefill(prompt(MOE, 7))
    session.fork().generate(max_tokens=3, **GREEDY)
    session.generate(max_tokens=1, **GREEDY)  # its token is pending, and the next one decodes it
    with standin.recorded() as messages:
        session.generate(max_tokens=1, **GREEDY)
    return messages


@pytest.fixture
def chunk(model, standin) -> list[str]:  # noqa: F811
    """The messages of one prefill chunk of seven tokens."""
    model.prefill(prompt(MOE, 7)).close()
    with standin.recorded() as messages:
        session = model.prefill(prompt(MOE, 7))
    session.close()
    return messages


@pytest.mark.parametrize("name", ["step", "chunk"])
def test_the_messages_are_those_of_last_time(name, request):
    """Made from our own output: a change of a plan or of a kernel's launch is seen, not judged. LILY_UPDATE_GOLDEN=1 writes it anew."""
    # Memory is given back by whichever thread is the last to hold it.
    kept = [line for line in request.getfixturevalue(name) if not line.endswith(" release") and "removeAllocation:" not in line]
    text = "\n".join(kept) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LILY_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", ["step", "chunk"])
def test_a_barrier_stands_between_stages_and_nowhere_else(name, model, request):
    """One pass for each command buffer; as many dispatches and barriers as the plan says."""
    messages = request.getfixturevalue(name)
    count = Counter(line.removeprefix("Encoder ") for line in messages)
    passes = sum("computeCommandEncoderWithDispatchType: 1" in line for line in messages)  # 1: concurrent
    assert (
        passes
        == count["endEncoding"]
        == sum(line == "CommandBuffer commit" for line in messages)
        == sum("addCompletedHandler" in line for line in messages)
    )
    plan = model._native.plan()["decode" if name == "step" else "prefill"]
    assert passes >= (2 if name == "step" else 1)
    assert (dispatches(messages), count["memoryBarrierWithScope: 1"] + passes) == (plan["dispatches"], plan["stages"])


def test_no_message_is_sent_twice_in_a_row(step):
    """A pipeline or a buffer that is already set is not set again."""
    for before, after in zip(step, step[1:], strict=False):
        assert before != after or "dispatch" in after or "setBytes" in after


@pytest.mark.parametrize(("setting", "ahead"), [("2", True), ("1", False)])
def test_the_next_step_is_on_the_way_while_one_runs(setting, ahead, standin, monkeypatch):  # noqa: F811
    """Committed before the one before it has ended; with LILY_METAL_IN_FLIGHT=1 the host waits for each."""
    monkeypatch.setenv("LILY_METAL_IN_FLIGHT", setting)
    with load(MOE, "metal") as model:
        session = model.prefill(prompt(MOE, 7))
        session.generate(max_tokens=2, **GREEDY)
        standin.fault("MTLCommandBuffer commit", "slow:1000", nth=1)
        start, seen = standin.sent("MTLCommandBuffer commit"), []
        timer = threading.Timer(0.8, lambda: seen.append(standin.sent("MTLCommandBuffer commit") - start))
        timer.start()
        session.generate(max_tokens=3, **GREEDY)
        timer.join()
    # The second command buffer runs: without run-ahead it is the last, with it the next step's two follow.
    assert seen[0] == 2 if not ahead else seen[0] >= 4


@pytest.mark.parametrize("storage", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_sources_are_those_that_the_checks_read(storage):
    """The text for Apple's compiler, made by the engine, is the rewriter's, token by token."""

    def tokens(text: str) -> str:
        text = re.sub(r"#line[^\n]*|//[^\n]*|#include\s*<[^>]*>", "", text)
        return re.sub(r"\s+", "", text).replace(";;", ";")

    found = {name: (text, functions) for name, text, functions, _ in native().testing.metal_sources(storage == "float32")}
    files = {f"metal/{path.relative_to(msl.kernel_root()).as_posix()}": path for path in msl.kernel_files()}
    assert found.keys() == files.keys()
    for name, path in files.items():
        assert tokens(found[name][0]) == tokens(msl.rewrite(path, "apple", storage=storage)), name
        assert found[name][1] == [i["host_name"] for i in msl.describe(path)["instantiations"]], name


@pytest.fixture
def matrix_units(standin, monkeypatch):  # noqa: F811
    """A stand-in for an M5."""
    monkeypatch.setenv("LILY_SIM_CHECK", "0")
    standin.set(os=2602, family=10)
    native().testing.forget_tensor_choice()
    yield standin
    native().testing.forget_tensor_choice()


def products(messages: list[str]) -> set[str]:
    """The kernels of matrix products that were set."""
    return {line.split()[3].split(":")[0] for line in messages if "setComputePipelineState: pipeline g" in line and "gdn" not in line}


def test_a_gpu_with_matrix_units_uses_them(matrix_units, monkeypatch, caplog):
    """The library of tensor operations is asked for, checked on the GPU, and then does the products of prefill; the log says so."""
    caplog.set_level("INFO", logger="lily")
    ids = prompt(MOE, 64)[:20]
    with load(MOE, "metal") as model:
        assert "tensor operations: on (self-check passed, equal bits from both tile sizes)" in model.device.description
        with matrix_units.recorded() as messages:
            found = model.logits(ids)
    assert products(messages) >= {"gemm_tensor_m32", "gate_up_rows_tensor_m32"} and "gemm_m32" not in products(messages)
    assert "tensor operations: on" in caplog.text
    assert "tensor operations: on" in next(d.description for d in lily.devices() if d.name == "metal")
    monkeypatch.setenv("LILY_METAL_TENSOR", "off")
    with load(MOE, "metal") as model:
        assert "switched off by LILY_METAL_TENSOR" in model.device.description
        with matrix_units.recorded() as messages:
            plain = model.logits(ids)
    assert not any("tensor" in name for name in products(messages))
    assert abs(found - plain).max() <= 0.02 * abs(plain).max()


def test_one_kernel_may_be_kept_from_them(matrix_units, monkeypatch):
    monkeypatch.setenv("LILY_KERNEL", "gemm=simdgroup")
    with load(MOE, "metal") as model, matrix_units.recorded() as messages:
        model.logits(prompt(MOE, 64)[:20])
    assert {"gemm_m32", "gate_up_rows_tensor_m32"} <= products(messages)


def test_tiles_that_differ_in_bits_leave_one_tile(matrix_units):
    """The promise of a session is that a chunk's size changes nothing: a GPU that breaks it between tiles gets one of them."""
    matrix_units.set(wrong_tensor=1)
    with load(MOE, "metal") as model:
        assert "tiles of 16 and 32 rows differ in bits" in model.device.description
        with matrix_units.recorded() as messages:
            model.logits(prompt(MOE, 7))
    used = products(messages)
    assert "gemm_tensor_m32" in used and not any(name.endswith("m16") for name in used)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"wrong_tensor": 2}, "self-check failed"), ({"os": 2600}, "macOS 26.2"), ({"family": 9}, "no matrix units")],
)
def test_matrix_units_that_are_not_to_be_trusted(change, reason, matrix_units):
    matrix_units.set(**change)
    with load(MOE, "metal") as model:
        assert "tensor operations: off" in model.device.description and reason in model.device.description
        with matrix_units.recorded() as messages:
            model.logits(prompt(MOE, 7))
    assert not any("tensor" in name for name in products(messages))


def test_a_tensor_library_that_does_not_compile_takes_nothing_down(matrix_units):
    """A newer system may refuse its source: the other kernels are in libraries of their own."""
    matrix_units.fault("newLibraryWithSource:options:error:")  # the first that is asked for
    with load(MOE, "metal") as model:
        assert "metal/tensor/gemm_tensor.metal was refused by the Metal compiler" in model.device.description
        assert model.generate(prompt(MOE, 7), max_tokens=1, ignore_eos=True).tokens


def test_a_self_check_that_hangs_leaves_the_model_alone(matrix_units, monkeypatch):
    """It runs on a device of its own."""
    monkeypatch.setenv("LILY_METAL_TIMEOUT", "4")
    matrix_units.fault("MTLCommandBuffer commit", "slow:5000")
    with load(MOE, "metal") as model:
        assert "tensor operations: off" in model.device.description and "has not answered" in model.device.description
        assert model.generate(prompt(MOE, 7), max_tokens=1, ignore_eos=True).tokens


def test_devices_tell_what_they_are(standin):  # noqa: F811
    standin.set(low_power=1)
    shown = [str(device) for device in lily.devices() if device.kind == "metal"]
    assert all("Stand-in for Metal, simulated, macOS 15.5" in text and "low power mode is on" in text for text in shown)
    assert "this GPU has no matrix units" in shown[0]
