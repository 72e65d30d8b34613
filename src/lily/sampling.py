"""Sampling settings: checked when made, inherited field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from lily.errors import CheckpointError, SamplingError

_MAX_SEED = (1 << 64) - 1
_OFF: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Every field may be None: it is then inherited, from the request's `sampling`, then
    from the checkpoint's generation_config.json, then from greedy decoding.

    - `temperature`: at least 0; 0 is greedy.
    - `top_k`: keep the k most likely tokens; 0 keeps all.
    - `top_p`: above 0, at most 1; keep the smallest set that reaches this probability; 1 keeps all.
    - `min_p`: 0 to 1; drop tokens below this fraction of the likeliest; 0 keeps all.
    - `repetition_penalty`: above 0, over all tokens of the session; 1 is none.
    - `presence_penalty`, `frequency_penalty`: over this request's output; 0 is none.
    - `logit_bias`: `{token id: added to its logit}`.
    - `seed`: 0 to 2**64 - 1; same seed, same text; None draws a fresh one for each request.

    The order is penalties and bias, temperature, top-k, top-p, min-p. A bad value raises `SamplingError` naming it.

    >>> import lily
    >>> calm = lily.Sampling(temperature=0.5, top_p=0.9, seed=1)
    >>> model = lily.Model.demo()
    >>> first, second = (model.generate("Once", max_tokens=8, sampling=calm) for _ in range(2))
    >>> first.text == second.text
    True
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "temperature": _number("temperature", self.temperature, low=0.0),
            "top_k": _integer("top_k", self.top_k, high=(1 << 31) - 1),
            "top_p": _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True),
            "min_p": _number("min_p", self.min_p, low=0.0, high=1.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True),
            "presence_penalty": _number("presence_penalty", self.presence_penalty),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty),
            "logit_bias": _bias(self.logit_bias),
            "seed": _integer("seed", self.seed, high=_MAX_SEED),
        }
        for name, value in checks.items():
            object.__setattr__(self, name, value)

    @classmethod
    def greedy(cls) -> Sampling:
        """Always the likeliest token: temperature 0 and every filter and penalty off, whatever the checkpoint says.

        >>> import lily
        >>> lily.Sampling.greedy().temperature
        0.0
        """
        return cls(**_OFF, logit_bias={})

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Sampling:
        """The checkpoint's defaults. With `do_sample` a missing temperature is 1; without it decoding stays greedy."""
        names = set(_OFF) & set(config)
        try:
            result = cls(**{name: config[name] for name in names})
        except SamplingError as error:
            raise CheckpointError(f"generation_config.json: {error}", tensor=error.field) from error
        if config.get("do_sample") is False:
            return replace(result, temperature=0.0)
        if config.get("do_sample") is True and result.temperature is None:
            return replace(result, temperature=1.0)
        return result

    def over(self, base: Sampling) -> Sampling:
        """This setting where it says something, `base` where it does not."""
        return replace(base, **{name: value for name, value in self._items() if value is not None})

    def resolved(self) -> Sampling:
        """No field left open: what nobody set is off, and the seed is a fresh one."""
        import secrets

        base = Sampling(**_OFF, logit_bias={}, seed=self.seed if self.seed is not None else secrets.randbits(64))
        return self.over(base)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON can hold them."""
        return dict(self._items())

    def _items(self) -> list[tuple[str, Any]]:
        return [(entry.name, getattr(self, entry.name)) for entry in fields(self)]


_LARGEST = 1e30
_SMALLEST = 1e-30


def _number(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _bad(name, value, "a number")
    number = float(value)
    # The device computes in float32: far outside this range a value would turn into zero or infinity there.
    representable = math.isfinite(number) and abs(number) <= _LARGEST and (number >= low + _SMALLEST or not open_low)
    if not representable or not low <= number <= high:
        bounds = [f"{'above' if open_low else 'at least'} {low:g}"] if low > -math.inf else []
        bounds += [f"at most {min(high, _LARGEST):g}"]
        raise _bad(name, value, f"a finite number {', '.join(bounds)}")
    return number


def _integer(name: str, value: Any, *, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) <= high:
        raise _bad(name, value, f"an integer from 0 to {high}")
    return int(value)


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _bad("logit_bias", value, "a mapping from token id to a number")
    result: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise _bad("logit_bias", token, "token ids as keys")
        number = _number(f"logit_bias[{token}]", bias)
        if number is None:
            raise _bad(f"logit_bias[{token}]", bias, "a number")
        result[int(token)] = number
    return result


def _bad(name: str, value: Any, expected: str) -> SamplingError:
    return SamplingError(f"{name} is {repr(value)[:60]}, expected {expected}", field=name.split("[")[0])
