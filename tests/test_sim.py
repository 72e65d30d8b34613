"""The Metal kernels through the engine, run by the simulator with every access, barrier and hazard checked.

`LILY_SIM` names the simulator's library; without one these tests are skipped. The bars are those of the CPU.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from checkpoints import (
    DENSE,
    FIXTURES,
    GREEDY,
    MIXED,
    MOE,
    NAMES,
    ORIGINAL,
    assert_same,
    decode_rows,
    everything,
    expected,
    load,
    prompt,
    relative_rms,
)

import lily
from lily._engine import native

pytestmark = pytest.mark.skipif(not os.environ.get("LILY_SIM"), reason="LILY_SIM is not set: no simulator of the Metal kernels")
SHORT = 7
SOAK = pytest.mark.soak
#: The mixed and the original form take as long again; .ci/soak runs them.
BOTH = [MOE, DENSE, pytest.param(MIXED, marks=SOAK), pytest.param(ORIGINAL, marks=SOAK)]


@pytest.fixture(scope="module")
def loaded():
    """One model of a kind, kept for the module."""
    found: dict[tuple[str, str], lily.Model] = {}

    def get(name: str, device: str) -> lily.Model:
        if (name, device) not in found:
            found[name, device] = load(name, device)
        return found[name, device]

    yield get
    for model in found.values():
        model.close()


def reference(name, length):
    return expected(name)[f"logits_ref_{length}"]


@pytest.mark.parametrize("name", BOTH)
def test_float32_logits_equal_the_reference(name, loaded):
    """Bar 1: within 1e-3 of the float32 reference, through prefill and through decode steps, and the same greedy text."""
    model = loaded(name, "sim:float32")
    ids = prompt(name, SHORT)
    wanted = reference(name, SHORT)
    assert abs(model.logits(ids, last_only=False)[-len(wanted) :] - wanted).max() <= 1e-3
    assert abs(decode_rows(model.session(), ids) - wanted).max() <= 1e-3
    tokens = model.prefill(ids).generate(max_tokens=6, **GREEDY).tokens
    assert tokens == expected(name)[f"greedy_ref_{SHORT}"].tolist()[:6]


@pytest.mark.parametrize("name", BOTH)
def test_as_shipped_within_the_bar(name, loaded):
    """Bar 2: relative RMS of the bf16 form, beside that of the published implementation; prompts of 64 tokens."""
    wanted, published = reference(name, 64), expected(name)["logits_mlx_64"]
    found = loaded(name, "sim").logits(prompt(name, 64), last_only=False)[-len(wanted) :]
    error = relative_rms(found, wanted)
    assert error <= (0.04 if name == DENSE else 0.07)
    assert error <= relative_rms(published, wanted) + 0.005


TENSOR = ",".join(f"{kernel}=tensor" for kernel in ("gemm", "gemm_residual", "gate_up_rows", "moe_gemm_rows", "moe_gate_up_rows"))


@pytest.mark.parametrize("name", [DENSE, pytest.param(MOE, marks=SOAK)])
def test_products_through_matmul2d_meet_the_bar(name, monkeypatch):
    """The form for GPUs with matrix units, chosen by LILY_KERNEL: bar 2."""
    wanted = reference(name, SHORT)
    monkeypatch.setenv("LILY_KERNEL", TENSOR)
    launched = {d["metal"] for d in lily.plan(FIXTURES / name, device="sim").prefill["list"] if "_m32" in d["metal"]}
    assert launched and all("_tensor" in function for function in launched)
    with load(name, "sim") as model:
        found = model.logits(prompt(name, SHORT), last_only=False)[-len(wanted) :]
    assert relative_rms(found, wanted) <= (0.04 if name == DENSE else 0.07)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_long_prompts_and_texts(name, loaded):
    model = loaded(name, "sim:float32")
    wanted = reference(name, 300)
    assert abs(model.logits(prompt(name, 300), last_only=False)[-len(wanted) :] - wanted).max() <= 1e-3
    tokens = model.prefill(prompt(name, 64)).generate(max_tokens=32, **GREEDY).tokens
    assert tokens == expected(name)["greedy_ref_64"].tolist()
    shipped = loaded(name, "sim")
    found = shipped.logits(prompt(name, 300), last_only=False)[-len(wanted) :]
    assert relative_rms(found, wanted) <= (0.04 if name == DENSE else 0.07)


def work(name: str, monkeypatch, **environment: str) -> dict[str, np.ndarray]:
    """A prompt read, three tokens generated and two more read, in a model of its own: all that the future depends on."""
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with load(name, "sim") as model:
        session = model.prefill(prompt(name, 64)[:20])
        session.generate(max_tokens=3, **GREEDY)
        session.append([5, 6])
        result = everything(session)
    for key in environment:
        monkeypatch.delenv(key)
    return result


@pytest.mark.parametrize("name", [MOE, pytest.param(DENSE, marks=SOAK)])
def test_the_unfused_plan_gives_the_same_bits(name, monkeypatch):
    assert_same(work(name, monkeypatch), work(name, monkeypatch, LILY_PLAN="unfused"))


@pytest.mark.parametrize("schedule", [pytest.param("serial", marks=SOAK), "shuffle:3"])
def test_the_order_of_work_changes_nothing(schedule, monkeypatch):
    """Neither that of the dispatches of a stage nor that of threads, simdgroups and threadgroups."""
    assert_same(work(MIXED, monkeypatch), work(MIXED, monkeypatch, LILY_SCHEDULE=schedule, LILY_SIM_SEED="11"))


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("moe_scan=tile16", marks=SOAK),
        pytest.param("moe_scan=tile32", marks=SOAK),
        pytest.param("gemm=tile16", marks=SOAK),
        pytest.param("gemm=expand", marks=SOAK),
        pytest.param("attn_split=one_head", marks=SOAK),
        "gdn_scan=blocks",
        pytest.param("moe_gate_up=ninth", marks=SOAK),
    ],
)
def test_variants_give_the_same_bits(kernel, monkeypatch):
    assert_same(work(MOE, monkeypatch), work(MOE, monkeypatch, LILY_KERNEL=kernel))


@pytest.mark.soak
def test_attention_cut_by_keys_gives_the_same_bits(monkeypatch):
    """A chunk that meets two blocks of keys in one dispatch, and in two that hand on what they have."""
    ids = prompt(DENSE, 300)
    found = []
    for forced in (None, "attn_rows=cut256"):
        if forced:
            monkeypatch.setenv("LILY_KERNEL", forced)
        with load(DENSE, "sim") as model:
            session = model.prefill(ids[:250])
            session.append(ids[250:270])
            found.append(everything(session))
    assert_same(*found)


def test_a_missing_barrier_is_named(monkeypatch):
    """Two stages merged into one: the simulator says which kernels touch the same memory."""
    stages = lily.plan(FIXTURES / DENSE, device="sim").prefill["stages"]
    caught = 0
    with load(DENSE, "sim") as model:
        for barrier in range(0, stages - 1, 5):
            native().testing.set_schedule(model._native, f"stages:drop:{barrier}")
            try:
                model.prefill(prompt(DENSE, SHORT))
            except lily.DeviceError as e:
                assert "race" in str(e).lower(), str(e)
                caught += 1
        assert caught >= (stages - 1) // 5 - 1


@pytest.mark.parametrize("name", [ORIGINAL])
def test_an_unknown_variant_is_refused(name, monkeypatch):
    monkeypatch.setenv("LILY_KERNEL", "gemm=tile48")
    with load(name, "sim") as model, pytest.raises(lily.DeviceError, match="gemm=tile48, expected one of: tile16, tile32"):
        model.prefill([1, 2, 3])
