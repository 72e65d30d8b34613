"""`lily eval`: how close to float32 a model's predictions are, teacher-forced, beside those of MLX-LM on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.bench.limits import memory_bytes

if TYPE_CHECKING:
    from lily.model import Model

Array = np.ndarray[Any, Any]
#: ids of one window -> float32 logits [rows, vocab], piece after piece
Source = Callable[[Array], Iterator[Array]]

WINDOW = 1024
POSITIONS = 4096
_FLOAT32_GROWTH = 8  # of a 4-bit checkpoint
_PIECE = 256  # rows at a time, so that a large vocabulary needs little memory
# The published engine against MLX-LM, teacher-forced: share of positions with the same top token, and change of perplexity.
PUBLISHED_AGREEMENT = 0.9635
PUBLISHED_PERPLEXITY_CHANGE = 0.0004
BAR_PERPLEXITY_CHANGE = 0.001


@dataclass(frozen=True)
class Side:
    """One engine's predictions and their distance from the reference's at the same positions."""

    name: str
    perplexity: float
    perplexity_change: float  # relative, from the reference's
    agreement: float  # share of positions with the reference's top token
    divergence: float  # mean KL divergence from the reference's distribution, nats
    logprob_distance: float  # mean absolute difference of the target's log-probability


@dataclass(frozen=True)
class Evaluation:
    """Sides measured against `reference`; `between` is the share of positions where the first two sides have the same top token.

    `bars` says for the first side whether it meets the project's two: the published agreement, and perplexity within 0.1 %.
    """

    reference: str
    reference_perplexity: float
    positions: int
    window: int
    sides: tuple[Side, ...]
    between: float | None

    @property
    def bars(self) -> dict[str, bool]:
        """Which bars the first side meets."""
        first = self.sides[0]
        return {"agreement": first.agreement >= PUBLISHED_AGREEMENT, "perplexity": abs(first.perplexity_change) <= BAR_PERPLEXITY_CHANGE}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it, with the published figures."""
        published = {"agreement": PUBLISHED_AGREEMENT, "perplexity_change": PUBLISHED_PERPLEXITY_CHANGE}
        return asdict(self) | {"bars": self.bars, "published": published}

    def __str__(self) -> str:
        lines = [
            f"{self.positions} positions in windows of {self.window}, compared with {self.reference}, perplexity {self.reference_perplexity:.4f}",
            "",
            f"{'':<24}{'same top token':>16}{'perplexity':>12}{'change':>10}{'divergence':>12}{'|dlogp|':>10}",
        ]
        lines += [
            f"{s.name:<24}{s.agreement:>16.2%}{s.perplexity:>12.4f}{s.perplexity_change:>+10.3%}{s.divergence:>12.2e}{s.logprob_distance:>10.2e}"
            for s in self.sides
        ]
        lines.append(f"{'published, see below':<24}{PUBLISHED_AGREEMENT:>16.2%}{'':>12}{PUBLISHED_PERPLEXITY_CHANGE:>+10.3%}")
        if self.between is not None:
            lines.append(f"{self.sides[0].name} and {self.sides[1].name} have the same top token on {self.between:.2%}")
        met = ", ".join(f"{name} {'met' if ok else 'NOT met'}" for name, ok in self.bars.items())
        lines += [
            "",
            f"bars for {self.sides[0].name}: same top token on at least {PUBLISHED_AGREEMENT:.2%}, perplexity within {BAR_PERPLEXITY_CHANGE:.1%}: {met}",
            "published: the original engine against MLX-LM, on other text and the 35B model",
        ]
        return "\n".join(lines)


def windows(ids: Sequence[int], window: int = WINDOW, positions: int = POSITIONS) -> list[Array]:
    """Windows of `window + 1` ids, spread evenly over the text, enough for `positions` predictions; int32 each.

    A text that is too short gives all it has. Raises `ValueError` for fewer than two ids.
    """
    whole = np.asarray(ids, np.int32)
    if len(whole) < 2:
        raise ValueError("evaluation needs at least two tokens: it predicts each from those before it")
    starts = list(range(0, max(len(whole) - window, 1), window))
    wanted = min(len(starts), -(-positions // window))
    chosen = [starts[i * len(starts) // wanted] for i in range(wanted)]
    return [whole[start : start + window + 1] for start in chosen]


def compare(
    chunks: Sequence[Array],
    reference: tuple[str, Source],
    sides: Sequence[tuple[str, Source]],
    report: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate every side and the reference on the same windows, each from an empty state.

    Raises `ValueError` when one of them gives other shapes than the reference.
    """
    total = sum(len(ids) - 1 for ids in chunks)
    done = agreed = 0
    likelihood = 0.0
    sums = np.zeros((len(sides), 4))  # log-likelihood, agreement, divergence, distance
    for ids in chunks:
        sources = [source(ids[:-1]) for _, source in (reference, *sides)]
        at = 1
        for pieces in zip(*sources, strict=True):
            expected = _log_softmax(pieces[0])
            targets = ids[at : at + len(expected)]
            rows = np.arange(len(expected))
            own = expected[rows, targets]
            likelihood += own.sum()
            tops = []
            for i, piece in enumerate(pieces[1:]):
                if piece.shape != expected.shape:
                    raise ValueError(f"{sides[i][0]} gave logits {list(piece.shape)}, {reference[0]} {list(expected.shape)}")
                found = _log_softmax(piece)
                theirs = found[rows, targets]
                tops.append(found.argmax(axis=1))
                divergence = (np.exp(expected) * (expected - found)).sum()
                sums[i] += theirs.sum(), (tops[-1] == expected.argmax(axis=1)).sum(), divergence, np.abs(theirs - own).sum()
            if len(tops) > 1:
                agreed += int((tops[0] == tops[1]).sum())
            at += len(expected)
            done += len(expected)
            if report is not None:
                report(done, total)
    perplexity = float(np.exp(-likelihood / done))
    return Evaluation(
        reference[0], perplexity, done, max(len(ids) - 1 for ids in chunks),
        tuple(_side(name, sums[i] / done, perplexity) for i, (name, _) in enumerate(sides)),
        agreed / done if len(sides) > 1 else None,
    )  # fmt: skip


def _side(name: str, means: Array, reference: float) -> Side:
    perplexity = float(np.exp(-means[0]))
    return Side(name, perplexity, perplexity / reference - 1, float(means[1]), float(means[2]), float(means[3]))


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def lily_source(model: Model) -> Source:
    """Lily's logits, through the prefill path."""

    def rows(ids: Array) -> Iterator[Array]:
        with model.session() as session:
            for start in range(0, len(ids), _PIECE):
                yield session._native.append_rows(np.ascontiguousarray(ids[start : start + _PIECE], np.int32), "logits", None)

    return rows


def mlx_source(directory: Path, *, float32: bool) -> Source:
    """MLX-LM's logits for a checkpoint directory, as it ships or with activations, scales and sums in float32.

    In float32 the weights are turned into floats first where a quarter of the memory holds them: the same numbers, read faster.

    Raises `ImportError` without mlx-lm (extra `bench`).
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import dequantize_model, load_model

    model, _ = load_model(directory)
    if float32:
        model.set_dtype(mx.float32)
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        if stored * _FLOAT32_GROWTH < memory_bytes() / 4:
            model = dequantize_model(model)

    def rows(ids: Array) -> Iterator[Array]:
        cache = make_prompt_cache(model)
        for start in range(0, len(ids), _PIECE):
            yield np.array(model(mx.array(ids[None, start : start + _PIECE]), cache=cache)[0].astype(mx.float32))

    return rows


def against_mlx(model: Model, chunks: Sequence[Array], report: Callable[[int, int], None] | None = None) -> Evaluation:
    """The model and MLX-LM as it ships, both against MLX-LM in float32. Its CPU backend sums in bf16, so float32 is the reference."""
    if model._directory is None:
        raise ValueError("a model that was not loaded from files cannot be compared with MLX-LM")
    reference = mlx_source(model._directory, float32=True)
    sides = [(f"lily on {model.device.name}", lily_source(model)), ("mlx-lm as shipped", mlx_source(model._directory, float32=False))]
    return compare(chunks, ("mlx-lm in float32", reference), sides, report)


def read_text(path: Path, domain: str | None = None) -> str:
    """A text file, or the texts of a .jsonl file (fields `text` and, for `domain`, `domain`), each followed by `<|endoftext|>`.

    Raises `ValueError` when nothing is left.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        if domain is not None:
            raise ValueError(f"{path} has no domains; only a .jsonl file has")
        return content
    lines = [json.loads(line) for line in content.splitlines() if line.strip()]
    texts = [line["text"] for line in lines if domain is None or line.get("domain") == domain]
    if not texts:
        raise ValueError(f"{path} holds no text" + (f" of domain {domain!r}" if domain else ""))
    return "".join(text + "<|endoftext|>" for text in texts)
