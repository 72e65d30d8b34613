"""`lily selftest`: it runs every kernel, says how far it is from the CPU, and nothing that is wrong gets past it."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest

import lily
from lily._engine import native
from lily.cli import main
from lily.selftest import catalogue, linear, model, report, runner
from lily.selftest.device import OpenDevice, forced, setting, variants
from lily.selftest.measure import Near, Rms, Rounded, Same, differing
from lily.selftest.runner import FAILED, LEFT_OUT, PASSED, Options, run

SIM = os.environ.get("LILY_SIM")
needs_sim = pytest.mark.skipif(not SIM, reason="LILY_SIM is not set: no simulator of the Metal kernels")
#: Not compared with anything: it reads the weights and multiplies nothing.
MEASURED_ONLY = "read"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("LILY_THREADS", "1")


@pytest.fixture(scope="module")
def on_cpu():
    return run("cpu", Options(quick=True))


@pytest.fixture(scope="module")
def on_sim():
    if not SIM:
        pytest.skip("LILY_SIM is not set: no simulator of the Metal kernels")
    return run("sim", Options(quick=True))


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["selftest", *arguments])
    return left.value.code


def rows_of(found, kernel, status=None):
    return [row for row in found.rows if row.kernel == kernel and status in (None, row.status)]


# ---- what it covers


def test_every_kernel_with_a_metal_form_has_a_case():
    assert {spec.kernel for spec in catalogue.specs()} == set(native().testing.launch_kernels())


def test_every_kernel_of_a_chunk_or_a_step_has_a_case_of_the_real_widths():
    at_any_width = {"norm_final", "residual_step", "attn_combine"}  # their small cases are as wide as the model
    assert {spec.kernel for spec in catalogue.specs() if spec.real} == set(native().testing.launch_kernels()) - at_any_width


def test_every_variant_that_may_be_forced_is_compared():
    forced_by_cases = {form.variant for spec in catalogue.specs() if not spec.real for form in spec.build().forms}
    wanted = {f"{kernel}={name}" for kernel, names in variants().items() for name in names if name != MEASURED_ONLY}
    assert wanted <= forced_by_cases


def test_names_of_cases_are_unique():
    names = [spec.name for spec in catalogue.specs()]
    assert len(names) == len(set(names))


def test_variants_are_opened_in_few_devices_and_tensor_operations_alone():
    settings = {setting(f"{kernel}={name}") for kernel, names in variants().items() for name in names}
    plain = [[name for name in names if not name.startswith("tensor")] for names in variants().values()]
    assert len(settings) == 3 + max(map(len, plain))
    assert all("=tensor" not in text or len({part.split("=")[1] for part in text.split(",")}) == 1 for text in settings)


# ---- what it finds when all is well


def test_on_the_cpu_every_row_passes(on_cpu):
    assert on_cpu.ok and not on_cpu.having(FAILED)
    kernels = set(native().testing.launch_kernels()) & set(native().testing.kernels())
    assert {row.kernel for row in on_cpu.having(PASSED)} == kernels | {"model"}
    for row in on_cpu.having(PASSED):
        assert row.error.value <= row.error.bound
        assert row.kernel == "model" or (row.seconds > 0 and row.rate > 0)


def test_on_x86_the_other_instruction_sets_are_compared_bit_for_bit(on_cpu):
    others = [name for name in native().testing.instruction_sets()[1:] if name != "portable"]
    for name in others:
        found = [row for row in on_cpu.rows if row.form == name]
        assert {row.kernel for row in found} == {row.kernel for row in on_cpu.having(PASSED)} - {"model"}
        assert all(row.error.bound == 0 for row in found)


def test_on_the_simulator_every_kernel_and_variant_passes(on_sim):
    assert on_sim.ok, [row.text for row in on_sim.having(FAILED)]
    assert {row.kernel for row in on_sim.having(PASSED)} == {*native().testing.launch_kernels(), "model"}
    tested = {f"{row.kernel}={row.form}" for row in on_sim.having(PASSED) if row.form}
    for same_bits in ("gemm=tile16", "gemm=tile32", "gemm=expand", "attn_split=one_head", "gdn_scan=blocks", "attn_rows=cut256"):
        assert same_bits in tested
        assert all(row.error.bound == 0 for row in on_sim.rows if f"{row.kernel}={row.form}" == same_bits)
    for within_the_bar in ("gdn_scan=chunked", "gemm=tensor", "moe_gate_up_rows=tensor"):
        assert within_the_bar in tested
    assert all(row.seconds is None for row in on_sim.rows), "simulated time means nothing"


@needs_sim
def test_a_chunk_cut_into_three_parts_hands_on_the_rows_of_a_tile_that_is_not_full():
    found = run("sim", Options(quick=True, kernels=["attn_rows"]))
    assert [row.shape for row in rows_of(found, "attn_rows", PASSED) if row.form == "cut256"].count("7 rows from 520, 4/1 heads of 64") == 1
    assert found.ok


def test_what_is_left_out_is_named_with_its_reason(on_cpu, on_sim):
    for found in (on_cpu, on_sim):
        left_out = found.having(LEFT_OUT)
        assert {row.shape for row in left_out} >= {spec.shape for spec in catalogue.specs() if spec.real}
        text = report.summary(found)
        for row in left_out:
            assert (
                row.text
                and f"Left out ({row.text})" in text
                and (row.name in text or f"{row.kernel} " in text.split(f"Left out ({row.text})")[1])
            )
    assert not rows_of(on_cpu, "attn_split_long", PASSED)


@needs_sim
def test_the_simulator_leaves_out_what_takes_minutes():
    found = run("sim", Options(kernels=["attn_combine", "gate_up_rows", "gdn_step"]))
    slow = {spec.shape for spec in catalogue.specs() if spec.slow and spec.kernel == "gate_up_rows"}
    assert {row.shape for row in found.having(LEFT_OUT)} == slow and slow
    assert any("16/32 heads" in row.shape for row in rows_of(found, "gdn_step", PASSED)), "real widths that are affordable are run"


@pytest.mark.parametrize("device", ["cpu:float32", pytest.param("sim:float32", marks=needs_sim)])
def test_devices_that_keep_float32_are_tested_too(device):
    found = run(device, Options(quick=True, kernels=["gemm", "gemv_norm", "attn_split", "moe_gate_up"]))
    assert found.ok, [row.text for row in found.having(FAILED)]
    assert found.device["storage"] == "float32"


# ---- what it finds when something is wrong


def spoil(monkeypatch, kernel, change, device="cpu", kernels=None):
    """Changes what `kernel` writes on the device under test (LILY_KERNEL as `kernels`)."""
    original = OpenDevice.run

    def spoiled(self, arrays, launches, **options):
        found = original(self, arrays, launches, **options)
        if self.name == device and self.kernels == kernels and launches[-1].kernel == kernel:
            change(found)
        return found

    monkeypatch.setattr(OpenDevice, "run", spoiled)


def not_a_number(found):
    found.arrays["y"].reshape(-1)[3] = np.nan


def a_little_off(found):
    found.arrays["y"].reshape(-1)[3] += 1e-3 * np.abs(found.arrays["y"]).mean()


def never_written(found):
    found.arrays["y"].view(np.uint8)[:] = 0xFF


@pytest.mark.parametrize("change", [not_a_number, a_little_off, never_written])
def test_a_wrong_result_fails_its_row_and_the_command(monkeypatch, capsys, change):
    spoil(monkeypatch, "gemv", change)
    assert command("--device", "cpu", "--quick", "--kernel", "gemv", "--kernel", "residual_step") == 1
    out = capsys.readouterr().out
    found = run("cpu", Options(quick=True, kernels=["gemv", "residual_step"]))
    assert not found.ok
    assert not [row for row in rows_of(found, "gemv", PASSED) if not row.form]
    assert not rows_of(found, "residual_step", FAILED)
    for row in rows_of(found, "gemv", FAILED):
        assert f"FAILED {row.name}: {row.text}" in out


@needs_sim
def test_one_wrong_bit_of_a_variant_fails_its_row_alone(monkeypatch):
    def flip(found):
        found.arrays["y"].view(np.uint32)[0, 0] ^= 1

    spoil(monkeypatch, "gemm", flip, "sim", setting("gemm=tile32"))
    found = run("sim", Options(quick=True, kernels=["gemm"]))
    assert {row.form for row in found.having(FAILED)} == {"tile32"}
    assert all(row.error.value == 1 for row in found.having(FAILED))


def test_a_result_that_a_second_run_does_not_repeat_fails(monkeypatch):
    spoil(monkeypatch, "norm_final", lambda found: object.__setattr__(found, "repeats", False))
    found = run("cpu", Options(quick=True, kernels=["norm_final"]))
    assert [row.text for row in found.having(FAILED)] == ["a second run gave other bits"] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=needs_sim)])
def test_a_fault_on_the_device_fails_its_row_and_the_next_ones_run(monkeypatch, device):
    original = OpenDevice.run

    def faulty(self, arrays, launches, **options):
        if self.name == device and launches[-1].kernel == "norm_final" and len(arrays["h"]) == 128 and self.kernels is None:
            self.fail_at(0, 0)
        return original(self, arrays, launches, **options)

    monkeypatch.setattr(OpenDevice, "run", faulty)
    monkeypatch.setattr(runner, "_other_instruction_sets", list)
    found = run(device, Options(quick=True, kernels=["norm_final", "residual_step"]))
    (failed,) = found.having(FAILED)
    assert failed.shape == "128" and "GPUError" in failed.text and "injected" in failed.text
    assert len(found.having(PASSED)) == 3


def test_an_error_in_a_case_fails_its_row_alone(monkeypatch):
    def broken(*arguments):
        raise MemoryError("no room for the case")

    monkeypatch.setattr(linear, "swiglu_rows", broken)
    found = run("cpu", Options(quick=True, kernels=["swiglu_rows", "residual_step"]))
    assert [row.text for row in found.having(FAILED)] == ["MemoryError: no room for the case"]
    assert rows_of(found, "residual_step", PASSED)


@needs_sim
def test_a_device_that_gives_no_answer_is_asked_nothing_more(monkeypatch):
    original = OpenDevice.run

    def impatient(self, arrays, launches, **options):
        self.timeout_seconds = 0.001 if launches[-1].kernel == "gemv" and len(arrays["y"]) > 1000 else 600
        return original(self, arrays, launches, **options)

    monkeypatch.setattr(OpenDevice, "run", impatient)
    found = run("sim", Options(kernels=["gemv", "gemm", "model"]))
    (failed,) = found.having(FAILED)
    assert failed.shape == "32768 x 2048, 8g64" and "NoAnswerError" in failed.text and "no answer within" in failed.text
    after = found.rows[found.rows.index(failed) + 1 :]
    assert after and all(row.status == LEFT_OUT for row in after)
    assert after[0].text == f"the device has given no answer since {failed.name}"


def test_an_interrupt_ends_the_run_and_what_was_done_is_printed(monkeypatch, capsys):
    original = OpenDevice.run

    def interrupted(self, arrays, launches, **options):
        if launches[-1].kernel == "residual_step":
            raise KeyboardInterrupt
        return original(self, arrays, launches, **options)

    monkeypatch.setattr(OpenDevice, "run", interrupted)
    assert command("--device", "cpu", "--quick", "--kernel", "norm_final", "--kernel", "residual_step") == 130
    text = capsys.readouterr().out
    assert "Stopped before its end." in text and "norm_final" in text and "0 failed" in text


def test_a_form_that_a_device_lacks_is_left_out_only_for_tensor_operations(monkeypatch):
    def lacking(self, variant):
        raise lily.DeviceError("this GPU has no such thing")

    monkeypatch.setattr(runner.Variants, "get", lacking)
    bench_forms = [form for spec in catalogue.specs() if spec.name == "gemm 17 rows, 130 x 320" for form in spec.build().forms]
    monkeypatch.setattr(runner.Bench, "_forms", lambda self, case: bench_forms)
    found = run("cpu", Options(quick=True, kernels=["gemm_residual"]))
    assert {(row.form, row.status) for row in found.rows if row.form} == {
        ("tile16", FAILED),
        ("tile32", FAILED),
        ("simdgroup", FAILED),
        ("expand", FAILED),
        ("tensor", LEFT_OUT),
        ("tensor16", LEFT_OUT),
        ("tensor32", LEFT_OUT),
    }


def test_a_token_that_is_not_the_cpus_fails_unless_two_are_as_good_as_equal():
    logits = np.zeros((3, 8), np.float32)
    logits[0, 1], logits[1, 2], logits[1, 5] = 9, 4.0, 3.9
    cpu = model.Result(np.array([1, 2]), logits)
    assert model._behind(cpu, cpu).value == 0
    assert model._behind(model.Result(np.array([1, 5]), logits), cpu).ok
    for wrong in ([1, 3], [2, 2]):
        assert not model._behind(model.Result(np.array(wrong), logits), cpu).ok


@pytest.mark.parametrize("part", ["logits", "tokens"])
def test_a_model_that_computes_something_else_fails_its_row(monkeypatch, part):
    original = model._run

    def other(device, kernels, *rest):
        found = original(device, kernels, *rest)
        if (device, kernels) != ("cpu", None):
            return found
        changed = found.logits * np.float32(1.1) if part == "logits" else found.tokens + 1
        return dataclasses.replace(found, **{part: changed})

    monkeypatch.setattr(model, "_run", other)
    found = run("cpu", Options(quick=True, kernels=["model"]))
    (failed,) = found.having(FAILED)
    assert ("logits" if part == "logits" else "token 0 of") in failed.text


# ---- bounds


def test_bounds_tell_rounding_from_cutting_off_and_a_wrong_bit_from_a_right_one():
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    rounded, cut = lily.affine.to_bf16(values), (values.view(np.uint32) >> 16).astype(np.uint16)
    assert all(error.ok for error in Rounded().errors(rounded, rounded))
    assert not all(error.ok for error in Rounded().errors(cut, rounded))
    flipped = rounded.copy()
    flipped[7] ^= 1  # one value rounded the other way
    assert all(error.ok for error in Rounded().errors(flipped, rounded))
    assert not Same().errors(flipped, rounded)[0].ok and differing(flipped, rounded).value == 1
    assert Near().errors(values * np.float32(1 + 1e-6), values)[0].ok
    assert not Near().errors(values * np.float32(1 + 1e-4), values)[0].ok


@pytest.mark.parametrize("check", [Same(), Near(), Rms(1.0), Rounded()])
def test_what_only_one_of_two_wrote_is_an_error(check):
    dtype = np.uint16 if isinstance(check, Rounded) else np.float32
    blank = np.full(8, 0xFFFF if dtype == np.uint16 else np.nan, dtype)
    written = blank.copy()
    written[:4] = 1
    assert all(error.ok for error in check.errors(written, written))
    for got, want in ((written, blank), (blank, written)):
        assert not all(error.ok for error in check.errors(got, want))
    infinite = np.full(8, -np.inf, np.float32)
    if dtype == np.float32:
        assert all(error.ok for error in check.errors(infinite, infinite))
        assert not all(error.ok for error in check.errors(infinite, -infinite))


# ---- the command


def test_the_report_is_written_as_json_and_markdown(tmp_path, capsys):
    json_file, markdown = tmp_path / "report.json", tmp_path / "report.md"
    code = command("--device", "cpu", "--quick", "--kernel", "attn_*", "--json", str(json_file), "--output", str(markdown))
    assert code == 0
    out = capsys.readouterr().out
    found = json.loads(json_file.read_text())
    assert found["ok"] and found["failed"] == 0 and found["passed"] > 20 and found["version"] == lily.__version__
    assert found["device"]["name"] == "cpu" and found["options"]["kernels"] == ["attn_*"]
    text = markdown.read_text()
    summary = text.split("```")[1].strip()
    assert summary in out, "the last lines are what to paste"
    for fact in (lily.__version__, "Python", found["device"]["description"], f"{found['passed']} passed, 0 failed"):
        assert fact in summary
    table = [line for line in text.splitlines() if line.startswith("| attn_")]
    assert len(table) == found["passed"]
    assert "| kernel | shapes | error | bound | ms | GB/s | ok |" in text


def test_failing_rows_stand_in_full_in_the_summary_and_infinite_errors_are_legal_json(monkeypatch):
    spoil(monkeypatch, "gemv", not_a_number)
    found = run("cpu", Options(quick=True, kernels=["gemv"]))
    text = report.summary(found)
    for row in found.having(FAILED):
        assert f"FAILED {row.name}: {row.text}" in text
    json.loads(json.dumps(report.to_dict(found), allow_nan=False))


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["--device", "abacus"], 1, "abacus"),
        (["--device", "cuda"], 1, "here are: cpu"),
        (["--kernel", "gemmm"], 2, "no kernel is named 'gemmm'"),
        (["--quick", "--full"], 2, "exclude each other"),
        (["--nothing"], 2, "--nothing"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, arguments, code, words):
    assert command(*arguments) == code
    assert words in capsys.readouterr().err


def test_the_users_own_variant_is_obeyed_and_left_as_it_was(monkeypatch):
    monkeypatch.setenv("LILY_KERNEL", "gemv=portable")
    with forced("gemv=nothing"):
        assert os.environ["LILY_KERNEL"] == "gemv=nothing"
    assert os.environ["LILY_KERNEL"] == "gemv=portable"
    found = run("cpu", Options(quick=True, kernels=["gemv"]))
    assert found.ok
    assert all(row.error.value == 0 for row in found.having(PASSED)), "the portable form, held against itself"
    assert "LILY_KERNEL=gemv=portable" in report.summary(found)
    assert os.environ["LILY_KERNEL"] == "gemv=portable"
    monkeypatch.setenv("LILY_KERNEL", "gemv=abacus")
    assert not run("cpu", Options(quick=True, kernels=["gemv"])).ok


# ---- the extension's part


def dispatch(**changes):
    case = linear.gemv(16, 128)
    index = {name: i for i, name in enumerate(case.arrays)}
    return {**case.launches[0].to_dict(index), **changes}, list(case.arrays.values())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"args": b"short"}, "5 bytes of arguments, expected"),
        ({"kernel": "abacus"}, "no kernel is named 'abacus'"),
        ({"uses": []}, "no buffers"),
        ({"uses": [(99, "r")]}, "uses buffer 99 of 5"),
        ({"uses": [(-1, "r")]}, "uses buffer -1 of 5"),
        ({"uses": [(0, "x")]}, "access is 'x', expected r, w or b"),
        ({"indirect": 12}, "its grid is buffer 12"),
        ({"uses": "everything"}, "one holds another type"),
        ({"groups": -1}, "one holds another type"),
    ],
)
def test_a_dispatch_that_makes_no_sense_is_refused_before_it_runs(changes, words):
    device = native().selftest.Device("cpu")
    bad, buffers = dispatch(**changes)
    with pytest.raises(ValueError, match=words):
        device.run([bad], buffers)
    good, buffers = dispatch()
    assert device.run([good], buffers)["buffers"][1] is not None, "the device is still usable"


def test_a_closed_device_and_a_missing_one_are_errors():
    device = native().selftest.Device("cpu")
    good, buffers = dispatch()
    with pytest.raises(ValueError, match="no dispatches"):
        device.run([], buffers)
    with pytest.raises(ValueError, match="timeout_seconds"):
        device.run([good], buffers, timeout_seconds=0)
    device.close()
    with pytest.raises(ValueError, match="closed"):
        device.run([good], buffers)
    with pytest.raises(lily.DeviceError, match="abacus"):
        native().selftest.Device("abacus")
