"""What sessions cost, measured: python tests/measure_sessions.py [--model DIRECTORY] [overhead | fork | reuse | reopen]...

The arms of a comparison alternate; figures are medians of at least five with the range beside them. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from checkpoints import DENSE, FIXTURES, _write

import lily
from lily._engine import native


def seconds(work, clock=time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def show(name: str, values: list[float], unit: str = "s") -> None:
    print(f"{name}: median {statistics.median(values):.4g} {unit} (best {min(values):.4g}, worst {max(values):.4g}, n = {len(values)})")


def ids(model: lily.Model, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count)


def overhead(model: lily.Model, rounds: int, with_marks: bool = True, tokens: int = 4096) -> None:
    """A prompt of 4,096 tokens with and without the regular snapshots, and with 8 marks besides.

    In seconds of processor time: the wall clock of a shared machine differs by more between two equal runs than what is looked for.
    """
    prompt = ids(model, tokens).astype(np.int32)
    marks = {
        "without snapshots": (False, []),
        "with snapshots": (True, []),
        "with snapshots and marks": (True, [100 + 400 * i for i in range(8)]),
    }
    if not with_marks:
        del marks["with snapshots and marks"]
    times: dict[str, list[float]] = {name: [] for name in marks}
    ratios: dict[str, list[float]] = {name: [] for name in marks}
    for turn in range(rounds + 1):  # the first warms up
        names = list(marks) if turn % 2 else list(marks)[::-1]
        took = {}
        for name in names:
            on, at = marks[name]
            native().testing.set_regular_snapshots(model._native, on)
            with model.session() as session:
                took[name] = seconds(lambda session=session, at=at: session._native.append(prompt, None, at), time.process_time)
                wanted = tokens // 1024 if on else 1
                assert len(session._native.snapshots) >= wanted
        if turn:
            for name in names:
                times[name].append(took[name])
                ratios[name].append(took[name] / took["without snapshots"])
    native().testing.set_regular_snapshots(model._native, True)
    for name in marks:
        show(f"prefill of {tokens} tokens {name}", times[name])
    for name in list(marks)[1:]:
        show(f"  ratio {name} / without, of the same round", ratios[name], "")
        print(
            f"  ratio of the medians {statistics.median(times[name]) / statistics.median(times['without snapshots']):.4f}, of the best {min(times[name]) / min(times['without snapshots']):.4f}"
        )


def fork(model: lily.Model) -> None:
    session = model.prefill(ids(model, 4096))
    before, forks, times = model.memory(), [], []
    for _ in range(200):
        times.append(1e3 * seconds(lambda: forks.append(session.fork())))
    after = model.memory()
    show("fork of 4,096 tokens", times, "ms")
    print(f"  memory of 200 forks: {after.total - before.total} bytes ({after.requests - before.requests} of step records)")


def reuse(model: lily.Model) -> None:
    """Tokens read by the second turn, and after a change at token 7,000 of 8,000."""
    if model.template is not None:
        chat = [
            {"role": "system", "content": "Be brief. " + "shelf 3 holds 4 jars. " * 200},
            {"role": "user", "content": "What is on shelf 3?"},
        ]
        for reuse_generated in (True, False):
            model.sessions.clear()
            first = model.chat(chat, temperature=0, max_tokens=16, thinking=False)
            second = model.chat(
                [*chat, first, {"role": "user", "content": "And shelf 4?"}], max_tokens=0, thinking=False, reuse_generated=reuse_generated
            )
            new = second.usage.prompt_tokens - first.usage.prompt_tokens
            print(
                f"turn 2, reuse_generated={reuse_generated}: read {second.reuse.read} of {second.usage.prompt_tokens} tokens, {new} of them new"
            )
    session = model.prefill(ids(model, 8000))
    result = session.rewind(7000)
    session.append(ids(model, 1000, 1))
    print(f"a change at token 7,000 of 8,000: kept {result.kept}, computed again {result.reread} besides the 1,000 new ones")


def states_of_35b(target: Path, context: int = 40960, vocab: int = 512) -> Path:
    """The K/V and state shapes of the 35B model, 40 layers, around projections of width 64: random weights, 20 MB."""
    hidden, head, heads, key_heads, nk, nv, d = 64, 256, 2, 2, 16, 32, 128
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(40)]
    config = {
        "model_type": "qwen3_5", "hidden_size": hidden, "num_hidden_layers": 40, "vocab_size": vocab, "intermediate_size": 64,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head, "tie_word_embeddings": True,
        "linear_num_key_heads": nk, "linear_num_value_heads": nv, "linear_key_head_dim": d, "linear_value_head_dim": d,
        "layer_types": kinds, "max_position_embeddings": context,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(FIXTURES / DENSE / name, target / name)
    channels = 2 * nk * d + nv * d
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    for i, kind in enumerate(kinds):
        if kind == "linear_attention":
            parts = {
                "linear_attn.in_proj_qkv": (channels, hidden), "linear_attn.in_proj_z": (nv * d, hidden), "linear_attn.in_proj_a": (nv, hidden),
                "linear_attn.in_proj_b": (nv, hidden), "linear_attn.conv1d": (channels, 4, 1), "linear_attn.norm": (d,),
                "linear_attn.out_proj": (hidden, nv * d),
            }  # fmt: skip
            shapes |= {f"layers.{i}.linear_attn.{name}": (nv,) for name in ("A_log", "dt_bias")}
        else:
            parts = {
                "self_attn.q_proj": (2 * head * heads, hidden), "self_attn.k_proj": (head * key_heads, hidden),
                "self_attn.v_proj": (head * key_heads, hidden), "self_attn.o_proj": (hidden, head * heads),
                "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
            }  # fmt: skip
        parts |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        parts |= {"mlp.gate_proj": (64, hidden), "mlp.up_proj": (64, hidden), "mlp.down_proj": (hidden, 64)}
        shapes |= {f"layers.{i}.{part}.weight": shape for part, shape in parts.items()}
    random, tensors = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        values = 1 + random.normal(0, 0.1, shape) if name.endswith("norm.weight") else random.normal(0, shape[-1] ** -0.5, shape)
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        tensors[f"language_model.model.{name}"] = ("BF16", list(shape), bits.tobytes())
    _write(target / "model.safetensors", tensors, odd=False)
    return target


def reopen(_: lily.Model | None = None, tokens: int = 32768, rounds: int = 9) -> None:
    """Saving a session of 32K tokens of the 35B model's sizes, random bytes, and loading it from the page cache."""
    random = np.random.default_rng(1)
    noise = random.integers(0, 256, 1 << 20, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder, lily.Model.from_pretrained(states_of_35b(Path(folder)), progress=False) as model:
        memory = model.memory()
        assert (memory.kv_bytes_per_token, round(memory.state_bytes / 2**20)) == (20480, 61)
        row = memory.kv_bytes_per_token // 20 * tokens  # ten attention layers, K and V
        for places in ([tokens], [8192, 16384, 20480, 24576, 26624, 28672, 29696, 30720, 31744, tokens]):
            states = [np.resize(noise, memory.state_bytes) for _ in places]
            kv = [np.resize(noise, row) for _ in range(20)]
            points = [(place, i, True) for i, place in enumerate(places)]
            made = native().import_session(
                model._native, random.integers(0, 512, tokens).astype(np.int32), np.zeros(tokens, np.uint8), tokens, states, points, kv
            )
            session, path = lily.Session(model, made), Path(folder) / "s.lily"
            print(
                f"{len(places)} snapshots: saved in {seconds(lambda s=session, p=path: s.save(p)):.2f} s, {path.stat().st_size / 1e9:.3f} GB"
            )
            session.close()
            times = []
            for _ in range(rounds):
                model._native.trim()
                opened = []
                times.append(seconds(lambda p=path, o=opened: o.append(lily.Session.load(model, p))))
                opened[0].close()
            show("  loaded", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a directory; the shipped model when left out")
    parser.add_argument("--rounds", type=int, default=7, help="of the overhead")
    parser.add_argument("--no-marks", action="store_true", help="leave out the third arm of the overhead")
    parser.add_argument("what", nargs="*", default=["overhead", "fork", "reuse", "reopen"])
    options = parser.parse_args()
    model = lily.Model.demo(progress=False) if options.model is None else lily.Model.from_pretrained(options.model, progress=False)
    for name in options.what:
        print(f"== {name}")
        works = {"overhead": lambda m: overhead(m, options.rounds, not options.no_marks), "fork": fork, "reuse": reuse, "reopen": reopen}
        works[name](model)


if __name__ == "__main__":
    main()
