"""A benchmark can be believed: what it runs, in which order, and what it refuses."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import lily
from lily.bench import harness, report
from lily.bench import limits as limits_module
from lily.bench.arms import Arm, Outcome, Setting, run
from lily.bench.cli import bench as bench_command
from lily.bench.limits import Limit
from lily.bench.llama import find, run_llama
from lily.bench.measure import BenchError, Sample, Shape, Spread, check_digests, check_possible, digest, order, prompt_ids
from lily.bench.sweep import LENGTHS, sweep
from lily.bench.work import work_of
from lily.model import DEMO

SETTING = Setting(DEMO, threads=1)


@pytest.fixture(scope="module")
def quick_limits():
    """Limits of this machine, taken once."""
    return limits_module.measure_all(working_sets=(1 << 20, 1 << 22), threads=1, seconds=0.01)


@pytest.fixture
def fixed_limits(monkeypatch, quick_limits):
    monkeypatch.setattr(limits_module, "measure_all", lambda **options: quick_limits)


class Script:
    """A runner that answers with given rates and remembers what it was asked."""

    def __init__(self, rates, digests=None):
        self.rates, self.digests, self.asked = rates, digests or {}, []

    def __call__(self, arm, shapes, setting):
        self.asked.append(str(arm))
        turn = self.asked.count(str(arm)) - 1
        prefill, decode = self.rates(str(arm), turn)
        found = self.digests.get(turn, "same")
        return Outcome([Sample(str(arm), s, s.prompt / prefill, s.steps / decode, found) for s in shapes], {"version": "scripted"})


def arms(*texts):
    return [Arm.parse(text) for text in texts]


def test_prompt_ids_follow_the_published_formula():
    expected = [((i * 2654435761) % 2**32) % 6144 for i in range(3000)]
    assert prompt_ids(3000, 6144).tolist() == expected


def test_arms_alternate_in_order_and_each_runs_once_a_round(fixed_limits):
    script = Script(lambda arm, turn: (10, 1))
    harness.measure(arms("lily", "lily@portable"), [Shape(8, 2)], SETTING, rounds=5, runner=script)
    first, second = ["lily", "lily@portable"], ["lily@portable", "lily"]
    assert script.asked == first + second + first + second + first
    assert order("abc", 0) == list("abc") and order("abc", 1) == list("cba")


def test_a_median_needs_five_runs():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 1.0, 5.0)
    with pytest.raises(BenchError, match="at least 5"):
        Spread.of([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match="at least 5"):
        harness.measure(arms("lily"), [Shape(8, 2)], SETTING, rounds=4, runner=Script(lambda arm, turn: (1, 1)))


def test_ids_that_do_not_repeat_are_refused(fixed_limits):
    with pytest.raises(BenchError, match="must repeat itself"):
        harness.measure(arms("lily"), [Shape(8, 2)], SETTING, runner=Script(lambda arm, turn: (10, 1), {3: "other"}))
    shape = Shape(8, 2)
    check_digests([Sample("a", shape, 1, 1, "x"), Sample("b", shape, 1, 1, "y"), Sample("c", shape, 1, 1, None)])


def test_a_rate_that_the_machine_cannot_reach_is_refused(fixed_limits):
    step = work_of(DEMO).step_bytes
    for rates, what in (((10, 1e15 / step), "decode"), ((1e12, 1), "prefill")):
        with pytest.raises(BenchError, match=f"{what}: .* at most"):
            harness.measure(arms("lily"), [Shape(8, 2)], SETTING, runner=Script(lambda arm, turn, r=rates: r))
    check_possible("at the ceiling", 100.0, 100.0)
    with pytest.raises(BenchError, match="the measurement is wrong"):
        check_possible("above it", 103.0, 100.0)


def test_one_impossible_run_of_five_is_enough_to_refuse(fixed_limits):
    with pytest.raises(BenchError, match="decode"):
        harness.measure(arms("lily"), [Shape(8, 2)], SETTING, runner=Script(lambda arm, turn: (10, 1e12 if turn == 2 else 1)))


def test_ratios_are_of_the_same_rounds_with_their_spread(fixed_limits):
    # Both arms are twice as fast in one round: the ratio does not see it.
    script = Script(lambda arm, turn: tuple((2 if arm == "lily" else 1) * (2 if turn == 1 else 1) * rate for rate in (10, 3)))
    found = harness.measure(arms("lily", "mlx-lm"), [Shape(8, 2)], SETTING, runner=script)
    assert [(r.what, r.peer) for r in found.ratios()] == [("prefill", "mlx-lm"), ("decode", "mlx-lm")]
    for ratio in found.ratios():
        assert (ratio.spread.median, ratio.spread.least, ratio.spread.greatest) == pytest.approx((2, 2, 2))


def test_llama_cpp_is_compared_in_its_best_mode_for_each_quantity(fixed_limits, tmp_path):
    rates = {"q4_0@repack": (5, 9), "q4_0@mapped": (4, 4), "q4_k@repack": (6, 5), "q4_k@mapped": (8, 3), "lily": (16, 18)}
    (tmp_path / "gguf").mkdir()
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(DEMO / name)
    for kind in ("q4_0", "q4_k"):
        (tmp_path / "gguf" / f"{kind}.gguf").touch()
    script = Script(lambda arm, turn: rates[arm.removeprefix("llama.cpp:")])
    found = harness.measure(arms("lily", "llama.cpp"), [Shape(8, 2)], Setting(tmp_path, 1), runner=script)
    assert found.arms == ["lily", "llama.cpp:q4_0@repack", "llama.cpp:q4_k@mapped"]  # each won something in the trial
    assert [(r.what, r.arm, r.spread.median) for r in found.ratios()] == [
        ("prefill", "llama.cpp:q4_k@mapped", pytest.approx(2)),
        ("decode", "llama.cpp:q4_0@repack", pytest.approx(2)),
    ]
    assert len(found.pilot) == 4 and all(len(found.of(arm, Shape(8, 2))) == 5 for arm in found.arms)


@pytest.mark.parametrize("text", ["", "vllm", "lily:", "llama.cpp:q8_0", "llama.cpp@fast", "mlx-lm:cpu"])
def test_what_is_no_arm_is_refused(text):
    if text == "lily:":
        assert Arm.parse(text) == Arm("lily")
        return
    with pytest.raises(ValueError, match="arm is"):
        Arm.parse(text)


def test_an_arm_that_does_not_run_says_why():
    with pytest.raises(BenchError, match=r"lily@fastest: its process ended with 1: .*LILY_KERNEL: variant 'fastest'"):
        run(Arm.parse("lily@fastest"), [Shape(8, 2)], SETTING)


def test_the_shipped_model_end_to_end(tmp_path):
    """Real processes: the ids are those that the library generates, and every figure is there."""
    runner = CliRunner()
    options = ["--arm", "lily", "--prompt", "24", "--steps", "4", "--threads", "1", "--json", "--output", str(tmp_path)]
    done = runner.invoke(bench_command, options, catch_exceptions=False)
    found = json.loads(done.stdout)
    samples = [sample for turn in found["samples"] for sample in turn]
    assert len(samples) == 5 and len({sample["digest"] for sample in samples}) == 1
    model = lily.Model.demo()
    ids = prompt_ids(24, model.config.vocab_size)
    assert samples[0]["digest"] == digest(model.generate(ids.tolist(), max_tokens=5, temperature=0, ignore_eos=True).tokens)
    (row,) = found["rows"]
    assert row["decode"]["least"] <= row["decode"]["median"] <= row["decode"]["greatest"]
    assert row["decode_bytes"] == pytest.approx(row["decode"]["median"] * (work_of(DEMO).step_bytes + 2048 * 26.5))
    assert 0 < row["decode_share"] and found["arms"]["lily"]["version"] == lily.__version__
    assert (tmp_path / "bench.md").read_text().startswith("| prompt | arm |")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


FAKE = """#!{python}
import json, sys
a = sys.argv[1:]
get = lambda name: a[a.index(name) + 1]
rows = []
for p in get("-p").split(","):
    if p != "0":
        rows.append(dict(n_prompt=int(p), n_gen=0, n_depth=0, avg_ns=int(p) * 10**7, build_number=7, build_commit="abc", cpu_info=" ".join(a)))
if get("-n") != "0":
    for d in get("-d").split(","):
        rows.append(dict(n_prompt=0, n_gen=int(get("-n")), n_depth=int(d), avg_ns=int(get("-n")) * 10**8))
print(json.dumps(rows))
"""


@pytest.fixture
def fake_llama_bench(tmp_path):
    program = tmp_path / "llama-bench"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "q4_k.gguf").touch()
    return program


def test_llama_cpp_is_measured_by_its_own_program(fake_llama_bench, tmp_path, monkeypatch):
    setting = Setting(tmp_path, threads=3, llama_bench=fake_llama_bench)
    outcome = run_llama(Arm.parse("llama.cpp:q4_k@mapped"), [Shape(8, 4), Shape(32, 4)], setting)
    assert [(s.shape.prompt, s.prefill_rate, s.decode_rate, s.digest) for s in outcome.samples] == [
        (8, pytest.approx(100), pytest.approx(10), None),
        (32, pytest.approx(100), pytest.approx(10), None),
    ]
    assert outcome.about["version"].startswith("build 7 (abc), sha256 ")
    assert "-t 3 -r 1 -o json --repack 0 -ngl 0" in outcome.about["cpu_info"]
    monkeypatch.setenv("LILY_LLAMA_BENCH", str(fake_llama_bench))
    assert find() == fake_llama_bench
    monkeypatch.setenv("LILY_LLAMA_BENCH", str(tmp_path / "nothing"))
    with pytest.raises(BenchError, match="is no program"):
        find()
    with pytest.raises(BenchError, match="is missing"):
        run_llama(Arm.parse("llama.cpp:q4_0@mapped"), [Shape(8, 4)], setting)


def test_the_sweep_stops_at_its_budget_and_says_what_it_left_out(fixed_limits, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("lily.bench.sweep.time.monotonic", lambda: clock[0])

    def runner(arm, shapes, setting):
        clock[0] += shapes[0].prompt / 100
        rate = 3.0 if str(arm) == "lily" else 1.5 if shapes[0].prompt == 256 else 1.0
        return Outcome([Sample(str(arm), s, s.prompt / (2 * rate), s.steps / rate, "same") for s in shapes], {})

    # 256 tokens take 25.6 s for two arms and five rounds, 512 take 51.2, 1,024 would take more than what is left.
    found = sweep(arms("lily", "mlx-lm"), SETTING, budget=120, steps=2, max_context=32768, runner=runner)
    assert [shape.prompt for shape in found.bench.shapes] == [256, 512]
    assert found.left_out == [length for length in LENGTHS if length > 512]
    assert found.mean_ratios() == {"mlx-lm": {"prefill": pytest.approx(2.5), "decode": pytest.approx(2.5)}}
    assert "Not run, they did not fit" in found.to_markdown() and json.dumps(found.to_dict())
    assert report.plot(found.bench) is not None


def test_the_published_sweep_has_ten_lengths():
    assert len(LENGTHS) == 10 and (LENGTHS[0], LENGTHS[-1]) == (256, 131072)


def test_limits_are_positive_and_repeat_roughly(quick_limits):
    assert {"read", "lookup", "fma"} <= set(limits_module.kinds())
    for limit in quick_limits:
        assert 0 < limit.median <= limit.best <= limit.ceiling, limit
    with pytest.raises(ValueError, match="cannot be measured"):
        limits_module.measure("warp")
    both = quick_limits[0].merged(quick_limits[0])
    assert both.windows == quick_limits[0].windows * 2 and isinstance(both, Limit)


def test_a_read_rate_is_real(quick_limits):
    """numpy reads the same bytes; it cannot be faster than twice the measured ceiling."""
    import time

    import numpy as np

    data = np.ones(1 << 17, np.uint64)  # 1 MiB
    best = 1e9
    for _ in range(50):
        begin = time.thread_time()
        data.sum()
        best = min(best, time.thread_time() - begin)
    assert data.nbytes / best < 2 * next(limit.ceiling for limit in quick_limits if limit.kind == "read")


def test_the_limits_command_prints_rates_and_kernels(monkeypatch):
    monkeypatch.setattr(limits_module, "MOST_BYTES", 1 << 24)
    done = CliRunner().invoke(bench_command, ["limits", "--prompt", "8", "--steps", "2", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert {entry["kind"] for entry in found["limits"]} >= {"read", "lookup", "fma"}
    assert any(kernel["kernel"].startswith("gemv") for kernel in found["profile"]["kernels"]["decode"])


def test_a_wrong_arm_on_the_command_line_is_wrong_usage():
    done = CliRunner().invoke(bench_command, ["--arm", "vllm"])
    assert done.exit_code == 2 and "arm is 'vllm'" in done.output


def test_reports_name_no_directory_of_the_machine(fixed_limits):
    found = harness.measure(arms("lily"), [Shape(8, 2)], SETTING, runner=Script(lambda arm, turn: (10, 1)))
    assert str(Path(DEMO).parent) not in json.dumps(report.to_dict(found)) + report.to_markdown(found)
