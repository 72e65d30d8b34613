"""The small oracle checkpoints under data/fixtures: loaded models, what is expected of them, and variants made on the fly."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import lily
from lily.testing import state

DATA = Path(__file__).parent / "data"
FIXTURES = DATA / "fixtures"
MOE, DENSE, MIXED, ORIGINAL = "a_moe_q4g64", "c_dense_q4g64_tied", "d_moe_mixed_g32", "e_moe_bf16_hf"
NAMES = (MOE, DENSE, MIXED, ORIGINAL)
PROMPTS = (1, 7, 64, 300)
DEVICES = ("cpu", "cpu:float32")
GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1.0, "ignore_eos": True}


@lru_cache
def model(name: str, device: str = "cpu") -> lily.Model:
    """A model that tests share; they leave it as it is."""
    return load(name, device)


def load(name: str, device: str = "cpu", **options) -> lily.Model:
    """A model of one's own."""
    return lily.Model.from_pretrained(FIXTURES / name, device=device, progress=False, **options)


@lru_cache
def expected(name: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / name / "expected.safetensors")


def prompt(name: str, length: int) -> np.ndarray:
    return expected(name)[f"prompt_{length}"]


def relative_rms(values, reference) -> float:
    return float(np.sqrt(np.square(values - reference).mean() / np.square(reference).mean()))


def only(model: lily.Model, token: int) -> np.ndarray:
    """A token mask that allows one id."""
    mask = np.zeros(-(-model.config.vocab_size // 32), np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask


def force(session: lily.Session, token: int) -> None:
    """Generate this token whatever the logits say; it is then pending."""
    session.generate(max_tokens=1, ignore_eos=True, token_mask=lambda _: only(session._model, int(token)))


def decode_rows(session: lily.Session, ids) -> np.ndarray:
    """Logits `[n, vocab]` after each of `ids`, all but the session's first token fed through decode steps."""
    rows = []
    for token in ids:
        if len(session) == 0:
            session.append([int(token)])
        else:
            force(session, token)
        rows.append(session.logits())
    return np.stack(rows)


def everything(session: lily.Session) -> dict[str, np.ndarray]:
    """All that a session's future depends on, with its logits."""
    logits = session.logits()
    return {**state(session), "logits": logits, "tokens": np.array(session.tokens), "origins": session.origins}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    """Equal in every bit."""
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes(), name


def sharded_with_junk(target: Path) -> Path:
    """Fixture b: the weights of a in three shards, among vision and multi-token-prediction tensors.

    The data of one shard starts at an odd offset, as in real files.
    """
    source = FIXTURES / MOE
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and "index" not in path.name:
            shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    config["vision_config"] = {"depth": 2, "hidden_size": 32, "model_type": "qwen3_5_moe"}
    (target / "config.json").write_text(json.dumps(config))

    tensors = _read(source / "model.safetensors")
    random = np.random.default_rng(0)

    def junk(*shape):
        bits = random.normal(0, 0.1, shape).astype(np.float32).view(np.uint32) >> 16
        return "BF16", list(shape), bits.astype(np.uint16).tobytes()

    tensors |= {f"vision_tower.blocks.{i}.attn.qkv.weight": junk(96, 32) for i in range(2)}
    tensors |= {"vision_tower.patch_embed.proj.weight": junk(32, 2, 4, 4, 3), "vision_tower.merger.norm.weight": junk(32)}
    mtp = "language_model.mtp"
    tensors |= {f"{mtp}.{name}.weight": junk(256) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    tensors |= {f"{mtp}.fc.weight": junk(256, 512), f"{mtp}.layers.0.input_layernorm.weight": junk(256)}

    shards = [sorted(tensors)[i::3] for i in range(3)]
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        _write(target / file, {name: tensors[name] for name in names}, odd=i == 1)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(len(data) for _, _, data in tensors.values())}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def _read(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def _write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], *, odd: bool) -> None:
    header, at = {"__metadata__": {"format": "mlx"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (len(text) % 2 != odd)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def tiny(target: Path, *, context: int, vocab: int = 512, heads: int = 1) -> Path:
    """A dense model of random bf16 weights with one layer of each kind and one key head of 256 dims: fast at long prompts."""
    hidden, head, key = 64, 256, 16
    config = {
        "model_type": "qwen3_5", "hidden_size": hidden, "num_hidden_layers": 2, "vocab_size": vocab, "intermediate_size": 64,
        "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": head, "tie_word_embeddings": True,
        "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": key, "linear_value_head_dim": key,
        "layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": context,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    shutil.copyfile(FIXTURES / DENSE / "tokenizer.json", target / "tokenizer.json")
    shutil.copyfile(FIXTURES / DENSE / "tokenizer_config.json", target / "tokenizer_config.json")
    random = np.random.default_rng(0)
    shapes = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    for i, mixer in enumerate((
        {"linear_attn.in_proj_qkv": (3 * key, hidden), "linear_attn.in_proj_z": (key, hidden), "linear_attn.in_proj_a": (1, hidden),
         "linear_attn.in_proj_b": (1, hidden), "linear_attn.conv1d": (3 * key, 4, 1), "linear_attn.norm": (key,),
         "linear_attn.out_proj": (hidden, key)},
        {"self_attn.q_proj": (2 * heads * head, hidden), "self_attn.k_proj": (head, hidden), "self_attn.v_proj": (head, hidden),
         "self_attn.o_proj": (hidden, heads * head), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,)},
    )):  # fmt: skip
        parts = mixer | {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        parts |= {"mlp.gate_proj": (64, hidden), "mlp.up_proj": (64, hidden), "mlp.down_proj": (hidden, 64)}
        shapes |= {f"layers.{i}.{part}.weight": shape for part, shape in parts.items()}
    shapes |= {"layers.0.linear_attn.A_log": (1,), "layers.0.linear_attn.dt_bias": (1,)}
    tensors = {}
    for name, shape in shapes.items():
        values = 1 + random.normal(0, 0.1, shape) if name.endswith("norm.weight") else random.normal(0, shape[-1] ** -0.5, shape)
        bits = values.astype(np.float32).view(np.uint32) >> 16
        tensors[f"language_model.model.{name}"] = ("BF16", list(shape), bits.astype(np.uint16).tobytes())
    _write(target / "model.safetensors", tensors, odd=False)
    return target
