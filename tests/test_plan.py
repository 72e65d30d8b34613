"""The plan against what runs: dispatches, stages and bytes; and the plan of the full-size model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import DENSE, FIXTURES, GREEDY, MOE, load, prompt, tiny

import lily
from lily._engine import native
from lily.config import ModelConfig
from lily.weights import abstract_weights

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
    found = native().testing.counters(loaded._native)
    return {name: found[name] for name in ("submissions", "dispatches", "stages")}


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


#: hidden size, layers, heads, key heads, linear key and value heads, then the width of a dense model or experts and theirs
SIZES = {
    "0.8b": (1024, 24, 8, 2, 16, 16, 3584), "2b": (2048, 24, 8, 2, 16, 16, 6144), "9b": (4096, 32, 16, 4, 16, 32, 12288),
    "27b": (5120, 64, 24, 4, 16, 48, 17408), "35b-a3b": (2048, 40, 16, 2, 16, 32, (256, 8, 512)),
    "122b-a10b": (3072, 48, 32, 2, 16, 64, (256, 8, 1024)), "397b-a17b": (4096, 60, 32, 2, 16, 64, (512, 10, 1024)),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_no_stage_for_a_gpu_takes_a_second_at_any_context(size, tmp_path):
    """macOS ends command buffers of some seconds, and they are cut between stages: priced for the smallest GPU, whatever the context."""
    hidden, layers, heads, key_heads, linear_keys, linear_values, width = SIZES[size]
    text = FULL_SIZE["text_config"] | {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads,
        "linear_num_key_heads": linear_keys, "linear_num_value_heads": linear_values,
    }  # fmt: skip
    config = FULL_SIZE | {"text_config": text}
    if isinstance(width, tuple):
        text |= {"num_experts": width[0], "num_experts_per_tok": width[1], "moe_intermediate_size": width[2]}
        text["shared_expert_intermediate_size"] = width[2]
    else:
        config["model_type"], text["model_type"], text["intermediate_size"] = "qwen3_5", "qwen3_5_text", width
        for name in [name for name in text if "expert" in name or name.startswith("moe_")]:
            del text[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = ModelConfig.from_file(tmp_path)
    chunks = set()
    for context in (4096, 32768, 262144):
        for rows in (16, 0):
            chunk, step, used = native().testing.longest_stages(config.spec(), abstract_weights(config), "metal", rows, context)
            assert 0 < chunk <= 1.0 and 0 < step <= 1.0
            chunks.add(used)
    # Wide products of the dense one, and 32 heads of the largest two, take too long in chunks of 2,048 rows.
    assert chunks == {16, 1024 if size in ("27b", "122b-a10b", "397b-a17b") else 2048}


@pytest.mark.parametrize("device", ["cpu", "sim", "metal"])
def test_the_full_size_step_stays_within_its_budget(full_size, device, monkeypatch):
    """The published engine needed 795 dispatches in 555 stages; ours at most 340 in 290, and the unfused twin as many as that within 5 %."""
    plan = lily.plan(full_size, device=device)
    assert 0 < plan.decode["stages"] <= 290 and plan.decode["stages"] <= plan.decode["dispatches"] <= 340
    assert plan.decode["dispatches"] == len(plan.decode["forward"]) + len(plan.decode["sample"])
    assert len(plan.decode["sample"]) <= 4
    monkeypatch.setenv("LILY_PLAN", "unfused")
    unfused = lily.plan(full_size, device=device)
    assert unfused.decode["dispatches"] == pytest.approx(795, rel=0.05) and unfused.decode["stages"] == pytest.approx(555, rel=0.05)
    page = (Path(__file__).parents[1] / "docs/metal-kernels.md").read_text()
    assert "has {dispatches} dispatches in {stages} stages".format(**plan.decode) in page
    assert "(`LILY_PLAN=unfused`) it has {dispatches} in {stages}".format(**unfused.decode) in page


def test_projections_that_read_the_same_input_are_one_dispatch_in_either_plan(full_size, monkeypatch):
    """q, k, v, z, b and a, and the router with the shared gate; gate and up of an expert are joined by a fusion alone."""
    for plan, kernel in (("fused", "gemv_norm"), ("unfused", "gemv")):
        monkeypatch.setenv("LILY_PLAN", plan)
        joined = [d["label"] for d in lily.plan(full_size).decode["forward"] if d["kernel"].startswith(kernel + "_q")]
        for label in ("layers.0.linear_attn.in_proj", "layers.3.self_attn.qkv_proj", "layers.0.mlp.gate"):
            assert joined.count(label) == 1
        assert not any(label.endswith((".q_proj", ".in_proj_z", ".shared_expert_gate")) for label in joined)


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


def test_a_plan_for_a_gpu_is_printed_with_what_was_forced(full_size, monkeypatch):
    functions = {d["metal"] for part in ("forward", "sample") for d in lily.plan(full_size, device="metal").decode[part]}
    assert {"gemv_norm_2048", "moe_gate_up_2048", "attn_split_h4_d256", "sample_draw"} <= functions
    monkeypatch.setenv("LILY_KERNEL", "attn_split=one_head")
    text = subprocess.run(
        [sys.executable, "-m", "lily", "plan", str(full_size), "--device", "metal"], capture_output=True, text=True, check=True
    ).stdout
    assert "Metal: " in text and "  attn_split_h1_d256, forced: a query head a threadgroup\n" in text


def test_a_loaded_model_plans_like_its_files():
    with load(MOE) as loaded:
        own, files = loaded._native.plan(), lily.plan(FIXTURES / MOE)
    assert own["decode"]["forward"] == files.decode["forward"] and own["memory"]["weights"] == files.weights


LONG = pytest.param(16000, marks=pytest.mark.soak)


@pytest.mark.parametrize("tokens", [1000, 4000])
@pytest.mark.parametrize("name", [MOE, DENSE])
def test_the_estimate_is_within_15_percent_of_the_measured_memory(name, tokens):
    with load(name) as loaded:
        check_estimate(lily.plan(FIXTURES / name), loaded, tokens)


@pytest.mark.parametrize("tokens", [1000, 2500, 5000, LONG])
def test_the_estimate_holds_where_the_context_outweighs_the_weights(tmp_path, tokens):
    """A model of 0.3 MB: nearly everything is K, V and snapshots."""
    directory = tiny(tmp_path, context=17_000)
    with lily.Model.from_pretrained(directory, progress=False) as loaded:
        check_estimate(lily.plan(directory), loaded, tokens)


def check_estimate(plan, loaded, tokens):
    estimate = plan.memory(tokens)
    with loaded.prefill([7] * (tokens - 8)) as session:
        stream = session.stream(max_tokens=8, **GREEDY)
        peak = max((next(stream), loaded.memory())[1].total for _ in range(8))
        measured = loaded.memory()
        assert estimate["total"] == pytest.approx(peak, rel=0.15)
        assert (estimate["weights"], estimate["kv"], measured.kv_bytes_per_token) == (
            measured.weights,
            measured.kv,
            plan.kv_bytes_per_token,
        )
        assert estimate["snapshots"] == len(session._native.snapshots) * plan.state_bytes
        assert estimate["workspace"] == pytest.approx(measured.workspace, rel=0.02)


def allocated(plan, tokens):
    """What the engine allocates for a session, token by token: K and V doubled when they are full, snapshots thinned as they age."""
    capacity, kept = 4, []
    for position in range(1, tokens + 1):
        while capacity * 256 < position:
            capacity *= 2
        if position % 1024 == 0 or position == tokens:
            kept = [*[p for p in kept if position // 1024 - p <= 4 * (p & -p)], position / 1024]
            kept = [int(p) if p == int(p) else p for p in kept]
    states = len(kept) + 5  # the empty one, one that is read and two that are written in turn, a spare
    workspace = next((nbytes for rows, nbytes in plan.workspace_by_rows if rows >= tokens), plan.workspace_bytes)
    return plan.weights + capacity * 256 * plan.kv_bytes_per_token + states * plan.state_bytes + workspace


@pytest.mark.parametrize("tokens", [1000, 1024, 4096, 5300 + 4096, 16_384, 32_768, 65_536, 65_537, 131_072])
def test_the_estimate_for_the_full_size_model_is_what_would_be_allocated(full_size, tokens):
    plan = lily.plan(full_size)
    assert plan.memory(tokens)["total"] == allocated(plan, tokens)


def test_an_estimate_grows_with_what_is_used_not_with_what_is_allowed(full_size):
    """30 tokens with up to 8,192 to come, and 5,300 with 4,096 to come, fit in 32 GB with 10 GB to spare; 262,144 tokens too."""
    plan = lily.plan(full_size)
    assert plan.memory(30 + 8192)["total"] < 22e9 and plan.memory(5300 + 4096)["total"] < 22e9
    assert plan.memory(30)["total"] < 20.2e9 and plan.memory(262_144)["total"] < 28e9


@pytest.mark.parametrize("longest", [16384, pytest.param(32768, marks=pytest.mark.soak)])
def test_the_workspace_does_not_grow_with_the_context(tmp_path, longest):
    """From a prompt of 4K tokens on only keys and values grow."""
    with lily.Model.from_pretrained(tiny(tmp_path, context=40_000), progress=False) as loaded:
        workspace = {}
        for tokens in (4096, longest):
            with loaded.prefill([5, 9, 11, 300] * (tokens // 4)) as session:
                session.generate(max_tokens=2, **GREEDY)
                workspace[tokens] = loaded.memory().workspace
                assert loaded.memory().kv >= tokens * loaded.memory().kv_bytes_per_token
        assert workspace[longest] < 1.1 * workspace[4096]


def test_the_plan_says_which_cpu_kernels_run_and_why(full_size, monkeypatch):
    best = native().testing.instruction_sets()[0]
    assert f"on this CPU: {best} for" in str(lily.plan(full_size)) and "best of this machine" in str(lily.plan(full_size))
    monkeypatch.setenv("LILY_KERNEL", "gdn_step=portable")
    forced = lily.plan(full_size)
    assert "on this CPU: portable for 1 kernels, forced by LILY_KERNEL" in str(forced)
    variants = {entry["cpu"] for entry in forced.decode["forward"] if entry["kernel"].startswith("gdn_step")}
    assert variants == {"portable"}


#: What LILY_KERNEL switches off for comparison: the kernel, the variant, the function that is launched or a part of the reason.
SWITCHES = [
    ("gemv", "read", "nothing is multiplied"),
    ("gemv_norm", "read", "nothing is multiplied"),
    ("gemv_residual", "read", "nothing is multiplied"),
    ("gate_up_norm", "read", "nothing is multiplied"),
    ("moe_gate_up", "read", "nothing is multiplied"),
    ("moe_down", "read", "nothing is multiplied"),
    ("attn_split", "one_head", "attn_split_h1_d256"),
    ("gemm", "tensor", "gemm_tensor_m32"),
    ("gemm", "tile16", "gemm_m16"),
    ("gemm_residual", "tensor", "gemm_residual_tensor_m32"),
    ("gemm_residual", "tile16", "gemm_residual_m16"),
    ("gate_up_rows", "tensor", "gate_up_rows_tensor_m32"),
    ("gate_up_rows", "tile16", "gate_up_rows_m16"),
    ("moe_gemm_rows", "tensor", "moe_gemm_rows_tensor_m32"),
    ("moe_gate_up_rows", "tensor", "moe_gate_up_rows_tensor_m32"),
    ("gdn_scan", "blocks", "through memory every 32 rows"),
    ("gdn_scan", "chunked", "gdn_scan_chunked_128"),
    ("moe_scan", "tile16", "tiles of 16 rows"),
]


@pytest.mark.parametrize("kernel,variant,found", SWITCHES)
def test_every_comparison_switch_changes_the_launch_and_says_why(full_size, kernel, variant, found, monkeypatch):
    def launches():
        plan = lily.plan(full_size, device="metal")
        steps = [*plan.decode["forward"], *plan.prefill["list"]]
        return [(d["metal"], d["metal_reason"]) for d in steps if re.fullmatch(kernel + r"(_(q|bf|f)\d.*)?", d["kernel"])]

    default = launches()
    assert default and not any(found in text for launch in default for text in launch)
    monkeypatch.setenv("LILY_KERNEL", f"{kernel}={variant}")
    forced = launches()
    assert len(forced) == len(default) and all(any(found in text for text in launch) for launch in forced)


def test_switches_of_the_recorder(full_size, monkeypatch):
    """Those that change which dispatches there are."""

    def prefill():
        return [d["kernel"] for d in lily.plan(full_size, device="metal").prefill["list"]]

    default = prefill()
    monkeypatch.setenv("LILY_KERNEL", "gemm=expand")
    assert sum(k.startswith("expand_rows") for k in prefill()) > 200 and not any(k.startswith("expand_rows") for k in default)
    monkeypatch.setenv("LILY_KERNEL", "moe_gate_up=ninth")
    decode = lily.plan(full_size, device="metal").decode
    assert (decode["dispatches"], decode["stages"]) == (266, 266)  # one less a layer than with the shared expert beside the router
    assert {d["metal_reason"] for d in decode["forward"] if d["kernel"].startswith("moe_gate_up")} == {
        "forced: the shared expert as a ninth"
    }
    monkeypatch.setenv("LILY_KERNEL", "attn_rows=cut256")
    assert prefill().count("attn_rows") == 8 * default.count("attn_rows") > 0  # a chunk of 2,048 rows has 8 blocks of keys
