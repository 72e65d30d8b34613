"""`Model.score` and `Model.rank`: how likely texts are, through the prefill path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.errors import ContextOverflowError
from lily.loading import check_positive
from lily.prompts import to_ids
from lily.results import Ranked, Score

if TYPE_CHECKING:
    from lily.model import Model
    from lily.prompts import Prompt


def score(model: Model, prompt: Prompt, window: int | None) -> Score:
    """Log-probability of every token but the first; see `Model.score`."""
    ids = model._ids(prompt)
    if len(ids) < 2:
        raise ValueError("score needs at least two tokens: it predicts each from those before it")
    check_positive("window", window)
    step = window if window is not None else len(ids)
    pieces = []
    for start in range(0, len(ids) - 1, step):
        with model.session() as session:
            # The last id of a window is only predicted: its own row predicts nothing.
            pieces.append(session._native.append_rows(ids[start : start + step + 1], "score", None)[:-1])
    return Score(np.concatenate(pieces).astype(np.float32, copy=False))


def rank(model: Model, prompt: Prompt, choices: Sequence[Prompt]) -> list[Ranked]:
    """The choices, likeliest first; see `Model.rank`. Everything is checked before anything is read."""
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence):
        raise TypeError(f"choices is {type(choices).__name__}, expected a list of texts or of lists of ids")
    if not choices:
        raise ValueError("choices is empty, expected at least one continuation")
    ids = model._ids(prompt)
    options = [_choice_ids(model, i, choice) for i, choice in enumerate(choices)]
    needed = len(ids) + max(len(option) for option in options)
    if needed > model.max_context:
        raise ContextOverflowError(
            f"the prompt and its longest choice have {needed} tokens, the context holds {model.max_context}",
            tokens=needed, limit=model.max_context,
        )  # fmt: skip
    with model.session() as shared:
        # The prompt's last token is read once for each choice: its row predicts the choice's first token.
        if len(ids) > 1:
            shared._native.append(ids[:-1], None)
        totals = [_logprob(shared, np.concatenate([ids[-1:], option])) for option in options]
    order = sorted(range(len(totals)), key=lambda i: (-totals[i], i))
    return [Ranked(choices[i], totals[i], i) for i in order]


def _choice_ids(model: Model, index: int, choice: Prompt) -> Any:
    try:
        return to_ids(choice, model.tokenizer, model.config.vocab_size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"choice {index}: {error}") from error


def _logprob(shared: Any, ids: Any) -> float:
    """Log-probability of all of `ids` but the first, after the shared session."""
    with shared.fork() as session:
        rows = session._native.append_rows(ids, "score", None)
    return float(rows[:-1].sum(dtype=np.float64))
