"""The options of one generation request, checked before any work is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from lily.errors import SamplingError
from lily.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np

    TokenMask = Callable[[list[int]], np.ndarray[Any, Any]]

MAX_LOGPROBS = 20
SAMPLING_FIELDS = tuple(entry.name for entry in fields(Sampling))
F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """The keyword arguments of `generate` and `stream`."""

    max_tokens: int | None
    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    logprobs: int | bool
    ignore_eos: bool
    token_mask: TokenMask | None
    sampling: Sampling | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None


_DEFAULTS: dict[str, Any] = {name: None for name in Options.__annotations__} | {"logprobs": 0, "ignore_eos": False}


def takes_options(function: F) -> F:
    """Show the options one by one in the signature of a function that takes them as `**options`."""
    return show_options(function, _DEFAULTS, Options.__annotations__)


def show_options(function: F, defaults: Mapping[str, Any], annotations: Mapping[str, Any]) -> F:
    """Put keyword arguments in the place of `**options` in a function's signature."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_annotation(annotations[name]))
        for name, default in defaults.items()
    ]
    function.__signature__ = signature.replace(parameters=own + extra)  # type: ignore[attr-defined]
    return function


def _annotation(annotation: Any) -> Any:
    return getattr(annotation, "__forward_arg__", annotation)


@dataclass(frozen=True)
class Request:
    """Checked options; no field of `sampling` is open. `logprobs`: -1 none, 0 the chosen token's, n also n others."""

    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int
    ignore_eos: bool
    token_mask: TokenMask | None
    sampling: Sampling

    @classmethod
    def make(cls, defaults: Sampling, vocab_size: int, options: Mapping[str, Any]) -> Request:
        """Raises `TypeError`, `ValueError` or `SamplingError`, naming the option."""
        options = dict(options)
        _check_kv_bits(options.pop("kv_bits", None))
        unknown = set(options) - set(_DEFAULTS)
        if unknown:
            raise TypeError(f"unknown option {sorted(unknown)[0]!r}, expected some of {', '.join(_DEFAULTS)}")
        given = _DEFAULTS | options
        if given["ignore_eos"] not in (True, False):
            raise TypeError(f"ignore_eos is {given['ignore_eos']!r}, expected True or False")
        if given["token_mask"] is not None and not callable(given["token_mask"]):
            raise TypeError("token_mask must be callable: token_mask(ids) -> uint32 array of one bit for each token")
        return cls(
            max_tokens=_max_tokens(given["max_tokens"], given["max_new_tokens"]),
            stop=_stops(given["stop"]),
            logprobs=_logprobs(given["logprobs"]),
            ignore_eos=bool(given["ignore_eos"]),
            token_mask=given["token_mask"],
            sampling=_sampling(given, defaults, vocab_size),
        )

    def with_seed_of(self, index: int) -> Request:
        """The same settings for answer number `index` to one prompt: the seed is `index` further."""
        if index == 0:
            return self
        seed = ((self.sampling.seed or 0) + index) % (1 << 64)
        return replace(self, sampling=replace(self.sampling, seed=seed))

    def native(self) -> dict[str, Any]:
        """The settings in the engine's form."""
        return self.sampling.to_dict() | {"logprobs": self.logprobs, "masked": self.token_mask is not None}


def _check_kv_bits(value: Any) -> None:
    """Callers of other engines ask for a quantised cache of K and V by this name."""
    if value is not None and (type(value) is not int or value != 16):
        raise ValueError(
            f"kv_bits is {value!r}, expected 16 or None: K and V are bfloat16. In this model the recurrent layers feed on "
            "attention's errors, and fewer than 8 bits are known to break its answers"
        )


def _max_tokens(value: Any, alias: Any) -> int | None:
    if value is not None and alias is not None:
        raise TypeError("max_tokens and max_new_tokens mean the same; give one of them")
    value = alias if value is None else value
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"max_tokens is {value!r}, expected an integer or None")
    if value < 0:
        raise ValueError(f"max_tokens is {value}, expected 0 or more")
    return int(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for stop in stops:
        if not isinstance(stop, str):
            raise TypeError(f"stop holds {stop!r}, expected strings")
        if not stop:
            raise ValueError("stop holds an empty string, which would match at once")
    return stops


def _logprobs(value: Any) -> int:
    if value is True or value is False or value is None:
        return 0 if value else -1
    if not isinstance(value, Integral) or not 0 <= int(value) <= MAX_LOGPROBS:
        raise SamplingError(f"logprobs is {value!r}, expected 0 to {MAX_LOGPROBS}, or True", field="logprobs")
    return int(value) if value else -1


def _sampling(given: Mapping[str, Any], defaults: Sampling, vocab_size: int) -> Sampling:
    base = given["sampling"]
    if base is not None and not isinstance(base, Sampling):
        raise TypeError(f"sampling is {type(base).__name__}, expected lily.Sampling")
    own = Sampling(**{name: given[name] for name in SAMPLING_FIELDS})
    result = own.over(base.over(defaults) if base is not None else defaults).resolved()
    outside = [token for token in result.logit_bias or () if token >= vocab_size]
    if outside:
        raise SamplingError(f"logit_bias names token {outside[0]}, but ids end at {vocab_size - 1}", field="logit_bias")
    return result
