"""`Model.rank`: how likely each of several continuations is, after a prompt that is read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.errors import ContextOverflowError
from lily.prompts import to_ids
from lily.results import Ranked

if TYPE_CHECKING:
    from lily.model import Model
    from lily.prompts import Prompt


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
