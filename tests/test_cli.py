"""The command line: results on stdout, everything else on stderr, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import lily
from lily import cli, planning
from lily.testing import scripted

STEP = {"kernel": "k", "label": "l", "stage": 0, "bytes_read": 1, "bytes_written": 1, "cpu": "avx512", "cpu_reason": "best of this machine"}
PLAN = {
    "decode": {"dispatches": 3, "stages": 2, "bytes": 1_650_000_000, "forward": [STEP], "sample": [STEP]},
    "prefill": {"rows": 512, "dispatches": 5, "stages": 4, "list": [STEP]},
    "memory": {"weights": 19_500_000_000, "state_bytes": 64_000_000, "kv_bytes_per_token": 20_480, "workspace_bytes": 1000},
}


class FakeNative:
    @staticmethod
    def plan(spec, weights, device):
        assert spec["hidden_size"] == 256 and device == "auto" and not any("parts" in weight for weight in weights)
        return PLAN

    @staticmethod
    def devices():
        return [{"name": "cpu", "kind": "cpu", "description": "a CPU", "isa": "avx2", "threads": 2, "memory_bytes": 1 << 30}]


@pytest.fixture
def run(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as caught:
            cli.main(list(args))
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


@pytest.fixture
def model(monkeypatch):
    """What `lily generate` loads; `asked` notes with which options."""
    made = scripted("It was red.\n\nThe end")
    made.asked = {}

    def load(*source, **options):
        made.asked = {"source": source, **options}
        return made

    monkeypatch.setattr(lily.Model, "demo", load)
    monkeypatch.setattr(lily.Model, "from_pretrained", load)
    return made


def test_generate_writes_the_text_and_nothing_else(run, model):
    assert run("generate", "What colour?") == (0, "It was red.\n\nThe end\n", "")
    assert model.asked["source"] == () and model.asked["device"] == "auto"


def test_generate_takes_the_same_settings_as_the_library(run, model):
    code, out, _ = run("generate", "x", "-m", "some/model", "--stop", "red", "--max-tokens", "5", "--max-context", "64",
                       "--temperature", "0.5", "--seed", "3", "--top-k", "1", "--json")  # fmt: skip
    answer = json.loads(out)
    assert code == 0 and answer["text"] == "It was " and answer["finish_reason"] == "stop"
    assert answer["sampling"]["temperature"] == 0.5 and answer["sampling"]["seed"] == 3
    assert model.asked["source"] == ("some/model",) and model.asked["max_context"] == 64
    assert set(answer) >= {"tokens", "usage", "timing", "logprobs", "prompt", "model"}


def test_generate_reads_the_prompt_from_standard_input(run, model, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Zürich".encode()), encoding="utf-8"))
    code, out, _ = run("generate", "-", "--json")
    assert code == 0 and json.loads(out)["prompt"] == "Zürich"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "x", "--top-p", "7"), "Error: top_p is 7.0"),
        (("generate", ""), "Error: the prompt is empty"),
        (("plan", "no/such/place"), "Error: no/such/place: no such directory"),
    ],
)
def test_an_error_is_one_line_on_stderr(run, model, args, message):
    code, out, err = run(*args)
    assert code == 1 and out == "" and err.startswith(message) and err.count("\n") == 1


def test_wrong_usage_exits_two(run):
    assert run("generate")[0] == 2 and run("nonsense")[0] == 2 and run("generate", "x", "--seed", "a")[0] == 2


def test_ctrl_c_exits_130(run, model, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(model, "stream", interrupted, raising=False)
    assert run("generate", "x")[0] == 130


def test_plan_as_text_and_json(run, monkeypatch):
    monkeypatch.setattr(planning, "native", lambda: FakeNative)
    source = str(lily.model.DEMO)
    code, out, err = run("plan", source)
    assert code == 0 and err == "" and "3 dispatches in 2 stages" in out and "M5 Max" in out and "128K" in out
    plan = json.loads(run("plan", source, "--json")[1])
    assert (plan["decode"]["dispatches"], plan["decode"]["stages"]) == (3, 2)
    assert plan["bytes_per_token"] == 1_650_000_000 and set(plan["memory"]) == {"4096", "32768", "131072"}
    assert plan["memory"]["4096"]["kv"] == 4096 * 20_480
    assert sum(v for k, v in plan["memory"]["4096"].items() if k != "total") == plan["memory"]["4096"]["total"]
    m5 = plan["limits"][0]
    assert m5["tokens_per_second"]["4096"] == pytest.approx(614e9 / (1.65e9 + 4096 * 20_480), rel=1e-3) and m5["source"]


def test_a_plan_needs_only_a_config(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "native", lambda: FakeNative)
    path = tmp_path / "config.json"
    path.write_bytes((lily.model.DEMO / "config.json").read_bytes())
    for source in (path, tmp_path, str(tmp_path)):
        assert lily.plan(source).weights == 19_500_000_000


def test_devices_and_version(run, monkeypatch):
    monkeypatch.setattr(lily.device, "native", lambda: FakeNative)
    assert run("devices")[1] == "cpu: a CPU (avx2, 2 threads, 1 GiB, bfloat16)\n"
    assert json.loads(run("devices", "--json")[1])["devices"][0]["name"] == "cpu"
    assert run("version")[1].strip() == run("--version")[1].strip() == lily.__version__


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0 and all(name in out for name in ("generate", "plan", "devices", "version"))


def test_importing_lily_is_light():
    heavy = "{'huggingface_hub', 'tokenizers', 'jinja2', 'tqdm', 'click', 'numpy'}"
    code = f"import lily, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
