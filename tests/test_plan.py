"""The plan against what runs: dispatches, stages and bytes; and the plan of the full-size model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from checkpoints import DENSE, FIXTURES, GREEDY, MOE, load, prompt, tiny

import lily
from lily._engine import native

FULL_SIZE = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "vocab_size": 248320,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
    },
}  # fmt: skip


@pytest.fixture
def full_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FULL_SIZE))
    return tmp_path


def counters(loaded):
    return native().testing.counters(loaded._native)


def executed(loaded, action):
    before = counters(loaded)
    action()
    return {name: value - before[name] for name, value in counters(loaded).items()}


@pytest.mark.parametrize("plan", ["fused", "unfused"])
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_a_decode_step_and_a_chunk_execute_what_the_plan_says(name, plan, monkeypatch):
    monkeypatch.setenv("LILY_PLAN", plan)
    planned = lily.plan(FIXTURES / name)
    with load(name) as loaded:
        loaded._native.set_chunk(planned.prefill["rows"])
        session = loaded.session()
        chunk = executed(loaded, lambda: session.append([7] * planned.prefill["rows"]))
        assert chunk == {"submissions": 1, "dispatches": planned.prefill["dispatches"], "stages": planned.prefill["stages"]}
        shorter, longer = (executed(loaded, lambda n=n: loaded.prefill(prompt(name, 64)).generate(max_tokens=n, **GREEDY)) for n in (8, 9))
        step = {key: longer[key] - shorter[key] for key in longer}
        assert step == {"submissions": 2, "dispatches": planned.decode["dispatches"], "stages": planned.decode["stages"]}


def test_the_full_size_step_stays_within_its_budget(full_size, monkeypatch):
    """The published engine needed 795 dispatches in 555 stages; ours at most 340 in 290."""
    plan = lily.plan(full_size)
    assert 0 < plan.decode["stages"] <= 290 and plan.decode["stages"] <= plan.decode["dispatches"] <= 340
    assert plan.decode["dispatches"] == len(plan.decode["forward"]) + len(plan.decode["sample"])
    assert len(plan.decode["sample"]) <= 4
    monkeypatch.setenv("LILY_PLAN", "unfused")
    assert lily.plan(full_size).decode["dispatches"] > 2 * plan.decode["dispatches"]


def test_the_full_size_bytes(full_size):
    """20 KiB of keys and values for each token, 61 MiB of state, 1.67 GB of weights read for a token."""
    plan = lily.plan(full_size)
    assert plan.kv_bytes_per_token == 10 * 2 * 2 * 256 * 2
    assert plan.state_bytes == pytest.approx(30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), rel=0.001)
    assert 19.3e9 < plan.weights < 19.7e9
    assert 1.67e9 < plan.bytes_per_token < 1.67e9 + 2 * plan.state_bytes + 0.03e9
    for tokens in (4096, 32768, 131072):
        memory = plan.memory(tokens)
        assert memory["kv"] == tokens * 20480 and memory["total"] == sum(v for k, v in memory.items() if k != "total")
    assert plan.tokens_per_second(lily.planning.CHIPS[0], 4096) < 614e9 / 1.67e9


def test_the_command_line_plans_a_directory_that_holds_only_a_config(full_size):
    command = [sys.executable, "-m", "lily", "plan", str(full_size)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    plan = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    wanted = lily.plan(full_size)
    assert plan["decode"]["dispatches"] == wanted.decode["dispatches"] and plan["decode"]["stages"] == wanted.decode["stages"]
    assert f"{wanted.decode['dispatches']} dispatches in {wanted.decode['stages']} stages" in text
    assert set(plan["memory"]) == {"4096", "32768", "131072"} and all(limit["source"] for limit in plan["limits"])


def test_a_loaded_model_plans_like_its_files():
    with load(MOE) as loaded:
        own, files = loaded._native.plan(), lily.plan(FIXTURES / MOE)
    assert own["decode"]["forward"] == files.decode["forward"] and own["memory"]["weights"] == files.weights


@pytest.mark.parametrize("tokens", [2056, 4000])
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_the_estimate_is_within_15_percent_of_the_measured_memory(name, tokens):
    estimate = lily.plan(FIXTURES / name).memory(tokens)
    with load(name) as loaded:
        session = loaded.prefill([7] * (tokens - 8))
        stream = session.stream(max_tokens=8, **GREEDY)
        peak = max((next(stream), loaded.memory())[1].total for _ in range(8))
        assert estimate["total"] == pytest.approx(peak, rel=0.15)
        assert loaded.memory().kv_bytes_per_token * tokens == estimate["kv"]


def test_the_workspace_does_not_grow_with_the_context(tmp_path):
    """Prompts of 4K and 32K tokens; only keys and values grow."""
    with lily.Model.from_pretrained(tiny(tmp_path, context=40_000), progress=False) as loaded:
        workspace = {}
        for tokens in (4096, 32768):
            with loaded.prefill([5, 9, 11, 300] * (tokens // 4)) as session:
                session.generate(max_tokens=2, **GREEDY)
                workspace[tokens] = loaded.memory().workspace
                assert loaded.memory().kv >= tokens * loaded.memory().kv_bytes_per_token
        assert workspace[32768] < 1.1 * workspace[4096]
