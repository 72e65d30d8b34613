"""The shipped model on the device under test, from a prompt to tokens, beside the same model on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.model import Model
from lily.selftest.device import forced, setting, user_kernels, variants
from lily.selftest.measure import Error, Rms, differing

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

NAME = "model"
PROMPT = "Once upon a time"
SHORT_TOKENS, TOKENS = 3, 12
#: Two blocks of keys, and a chunk of many tiles.
LONG_PROMPT = 300
#: Of the logits against float32: the bar of the test suite for checkpoints with experts. A choice between two experts that are
#: nearly equal moves the logits of one token by 0.07; without one they are 0.002 apart.
LOGITS_BOUND = 0.07
#: How far behind the CPU's token another may lie: both devices' logits are up to 0.15 from float32's.
TIE = 0.3
#: Variants whose results are within the bar but not the same bits.
OTHER_BITS = ("chunked", "tensor", "read", "general")


@dataclass(frozen=True)
class ModelCheck:
    what: str
    form: str
    run: Callable[[], list[Error]]


@dataclass(frozen=True)
class Result:
    """The tokens that greedy decoding adds, and the logits `[1 + tokens, vocab]` after the prompt and after each of them."""

    tokens: Array
    logits: Array


def checks(device: str, *, gpu: bool, small: bool) -> Iterator[ModelCheck]:
    """The prompt and a few tokens; unless `small` a longer prompt, the unfused plan and every variant that promises equal bits."""
    reference = ("cpu:float32" if device.endswith(":float32") else "cpu", None if gpu else "*=portable")
    tokens = SHORT_TOKENS if small else TOKENS
    _result = lru_cache(_run)  # the checks share what they compare with

    def against_cpu(prompt: int, kernels: str | None = None) -> list[Error]:
        found = _result(device, kernels or user_kernels(), prompt, tokens)
        cpu, exact = _result(*reference, prompt, tokens), _result("cpu:float32", None, prompt, tokens)
        same = _common(found.tokens, exact.tokens) + 1  # as long as both read the same tokens
        (error,) = Rms(LOGITS_BOUND).errors(found.logits[:same], exact.logits[:same])
        return [_behind(found, cpu), Error(error.value, error.bound, error.unit, "logits")]

    def same_bits(kernels: str | None, plan: str | None = None) -> list[Error]:
        found, default = _result(device, kernels, LONG_PROMPT, tokens, plan), _result(device, user_kernels(), LONG_PROMPT, tokens)
        return [
            Error(differing(getattr(found, name), getattr(default, name)).value, 0, "values differ", name) for name in ("tokens", "logits")
        ]

    yield ModelCheck(f"prompt and {tokens} greedy tokens", "", lambda: against_cpu(0))
    if small:
        return
    yield ModelCheck(f"{LONG_PROMPT} tokens and {tokens} greedy tokens", "", lambda: against_cpu(LONG_PROMPT))
    yield ModelCheck(f"{LONG_PROMPT} tokens", "unfused plan", lambda: same_bits(user_kernels(), "unfused"))
    if not gpu:
        return
    for kernel, names in variants().items():
        for name in names:
            if name not in OTHER_BITS:
                yield ModelCheck(f"{LONG_PROMPT} tokens", f"{kernel}={name}", lambda v=f"{kernel}={name}": same_bits(v))
    for name in ("gdn_scan=chunked", "gemm=tensor"):
        form = name.split("=")[1]
        yield ModelCheck(f"{LONG_PROMPT} tokens", form, lambda v=name: against_cpu(LONG_PROMPT, setting(v) if "tensor" in v else v))


def _common(mine: Array, theirs: Array) -> int:
    """How many tokens are the same from the first on."""
    differ = np.flatnonzero(mine != theirs)
    return int(differ[0]) if differ.size else len(mine)


def _behind(found: Result, cpu: Result) -> Error:
    """Greedy tokens are the CPU's up to the end, or to where two are as good as equal: how far behind the CPU's the first other one lies."""
    at = _common(found.tokens, cpu.tokens)
    gap = 0.0 if at == len(found.tokens) else float(cpu.logits[at].max() - cpu.logits[at][found.tokens[at]])
    return Error(gap, TIE, "of a logit", f"token {at} of {found.tokens.tolist()}, on the CPU {cpu.tokens.tolist()}")


def _run(device: str, kernels: str | None, prompt: int, tokens: int, plan: str | None = None) -> Result:
    """`prompt` tokens of a fixed text, 0 for the short one."""
    with forced(kernels), _planned(plan), Model.demo(device=device) as model:
        ids = model.encode(PROMPT) if prompt == 0 else _long(model, prompt)
        session = model.prefill(ids)
        added: list[int] = []
        logits = [session.logits()]
        for _ in range(tokens):
            added += session.generate(max_tokens=1, temperature=0, ignore_eos=True).tokens
            logits.append(session.logits())
        return Result(np.array(added, np.int64), np.stack(logits))


def _long(model: Model, count: int) -> list[int]:
    text = " ".join(f"{PROMPT} there was a dog with {n} bones." for n in range(count))
    return list(model.encode(text)[:count])


@contextmanager
def _planned(plan: str | None) -> Iterator[None]:
    before = os.environ.get("LILY_PLAN")
    if plan is not None:
        os.environ["LILY_PLAN"] = plan
    try:
        yield
    finally:
        if plan is not None:
            if before is None:
                del os.environ["LILY_PLAN"]
            else:
                os.environ["LILY_PLAN"] = before
