"""What requests return: plain values that print as what a reader wants to see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lily.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np

    from lily.tool_calls import ToolCall, ToolCallDelta


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token before temperature, and the likeliest alternatives as `(id, logprob)`, best first.

    >>> import lily
    >>> entry = lily.Model.demo().generate("The", max_tokens=1, temperature=0, logprobs=2).logprobs[0]
    >>> entry.token == entry.top[0][0] and entry.logprob <= 0
    True
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `prompt_tokens` is everything that stood before the answer, `reused_tokens` the part
    of it that was already in the session.

    >>> import lily
    >>> lily.Model.demo().generate([1, 2, 3], max_tokens=0).usage.prompt_tokens
    3
    """

    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True)
class Timing:
    """Seconds spent reading the prompt, generating, and until the first token (None when none came).

    >>> import lily
    >>> lily.Model.demo().generate("The", max_tokens=4).timing.prefill_seconds > 0
    True
    """

    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float | None
    read_tokens: int
    generated_tokens: int

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens read in a second; 0 when none were."""
        return self.read_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens generated in a second; 0 when none were."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def __str__(self) -> str:
        first = "none" if self.first_token_seconds is None else f"{self.first_token_seconds:.2f} s"
        return (
            f"read {self.read_tokens} tokens at {self.prefill_tokens_per_second:.1f}/s, generated "
            f"{self.generated_tokens} at {self.decode_tokens_per_second:.1f}/s, first token after {first}"
        )


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream: one token and the text that it completes (often none: part of a character, or text that may
    become a stop string). The last chunk has `finish_reason`, `usage`, `timing`, any text that was held back, and the
    `stop_string` that ended the text, if one did.

    >>> import lily
    >>> chunks = list(lily.Model.demo().stream("The", max_tokens=3, temperature=0))
    >>> chunks[-1].finish_reason, sum(len(chunk.tokens) for chunk in chunks) <= 3
    ('length', True)
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    stop_string: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Generation:
    """A finished answer. `tokens` includes the end token, `text` does not; `logprobs` align with `tokens` (None unless
    asked for). `finish_reason` is "stop", "length" or "cancelled". `sampling` holds the settings used, the seed too.

    >>> import lily
    >>> answer = lily.Model.demo().generate("The", max_tokens=4, temperature=0)
    >>> str(answer) == answer.text, answer.finish_reason
    (True, 'length')
    """

    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    usage: Usage
    timing: Timing
    sampling: Sampling = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        timing = asdict(self.timing) | {
            "prefill_tokens_per_second": self.timing.prefill_tokens_per_second,
            "decode_tokens_per_second": self.timing.decode_tokens_per_second,
        }
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "logprobs": None if self.logprobs is None else [asdict(entry) for entry in self.logprobs],
            "usage": asdict(self.usage) | {"total_tokens": self.usage.total_tokens},
            "timing": timing,
            "sampling": self.sampling.to_dict(),
        }

    def _repr_html_(self) -> str:
        import html

        body = f'<div style="white-space:pre-wrap">{html.escape(self.text)}</div>'
        return f"{body}<small>{html.escape(str(self.timing))}; {self.finish_reason}</small>"


@dataclass(frozen=True)
class Message:
    """An answer of `Model.chat`; it may be put into the list of messages of the next call as it is.

    `reasoning` holds the thoughts (None when there are none), `tool_calls` the finished calls. `finish_reason` is "stop",
    "length" or "tool_calls". The text of a call that was cut off is in `unfinished_call`, and nowhere else. `tokens` and
    `logprobs` are those of the whole answer, thoughts included; `reuse` says what was taken from the store, `stop_string`
    which stop string ended the answer, if one did.

    >>> import lily
    >>> reply = lily.Model.demo().chat([{"role": "user", "content": "What is a young dog called?"}], temperature=0, thinking=False)
    >>> reply.content, reply.finish_reason
    ('A young dog is called a puppy.', 'stop')
    """

    content: str
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    usage: Usage
    timing: Timing
    tokens: list[int] = field(repr=False)
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    unfinished_call: str | None = None
    reuse: Reuse | None = None
    sampling: Sampling | None = field(default=None, repr=False)
    stop_string: str | None = None

    def __str__(self) -> str:
        return self.content

    def to_message(self) -> dict[str, Any]:
        """The answer in OpenAI's form, for the messages of the next call."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message

    def _repr_html_(self) -> str:
        import html

        thoughts = f'<div style="white-space:pre-wrap;opacity:0.6">{html.escape(self.reasoning)}</div>' if self.reasoning else ""
        calls = "".join(f"<code>{html.escape(str(call.to_dict()['function']))}</code><br>" for call in self.tool_calls)
        body = f'<div style="white-space:pre-wrap">{html.escape(self.content)}</div>{calls}'
        return f"{thoughts}{body}<small>{html.escape(str(self.timing))}; {self.finish_reason}</small>"


@dataclass(frozen=True)
class MessageDelta:
    """A piece of a streamed answer: one token, and the content, thoughts and pieces of calls that it completes (often none).

    The pieces add up to the finished `Message`. The last one has `finish_reason`, `usage`, `timing` and the whole `message`.
    `thinking` says whether its token belongs to the thoughts, `order` has the pieces as they follow each other in the text:
    ("reasoning", text), ("content", text) and ("call", delta).

    >>> import lily
    >>> deltas = list(lily.Model.demo().stream_chat([{"role": "user", "content": "Hi"}], max_tokens=3))
    >>> deltas[-1].finish_reason, deltas[-1].message.reasoning == "".join(delta.reasoning for delta in deltas)
    ('length', True)
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    message: Message | None = None
    thinking: bool = False
    order: list[tuple[str, Any]] = field(default_factory=list, repr=False, compare=False)

    def __str__(self) -> str:
        return self.content


@dataclass(frozen=True)
class Score:
    """How well the model predicts a text. `logprobs` is float32 `[n-1]`: entry i is log p(token i+1 | all before it).

    >>> import lily
    >>> score = lily.Model.demo().score("The cat sat on the mat.")
    >>> score.perplexity > 1
    True
    """

    logprobs: np.ndarray[Any, Any]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        return math.exp(-float(self.logprobs.mean(dtype="float64")))

    def __str__(self) -> str:
        return f"perplexity {self.perplexity:.3f} over {len(self.logprobs)} tokens"


@dataclass(frozen=True)
class Reuse:
    """What a request did with what was there: tokens `reused`, and tokens `read` (or decoded again). When the nearest session of
    the store went another way, `differs_at` is the first token that differed and `message` the index of the message that it
    belongs to (None for the tools and the beginning of the answer).

    >>> import lily
    >>> model = lily.Model.demo()
    >>> reply = model.chat([{"role": "user", "content": "Hi"}], max_tokens=1)
    >>> reply.reuse.reused, reply.reuse.differs_at
    (0, None)
    """

    reused: int
    read: int
    differs_at: int | None = None
    message: int | None = None


@dataclass(frozen=True)
class Rewind:
    """What `Session.rewind` did: tokens whose state was `kept`, and tokens that were computed again (`reread`).

    >>> import lily
    >>> session = lily.Model.demo().prefill([5, 6, 7])
    >>> session.rewind(2)
    Rewind(kept=0, reread=2)
    """

    kept: int
    reread: int


@dataclass(frozen=True)
class Ranked:
    """One choice of `Model.rank`: as it was given, the sum of its tokens' log-probabilities, and its place in the list.

    >>> import lily
    >>> [entry.index for entry in lily.Model.demo().rank("The sky is", [" xylophone", " blue"])]
    [1, 0]
    """

    choice: str | Sequence[int]
    logprob: float
    index: int


@dataclass(frozen=True)
class Memory:
    """Bytes held by a model, by kind. `limit` is None when there is none; `kv_bytes_per_token` and `state_bytes` say
    what a token and a recurrent state cost.

    >>> import lily
    >>> memory = lily.Model.demo().memory()
    >>> 0 < memory.weights <= memory.total
    True
    """

    weights: int
    kv: int
    states: int
    workspace: int
    requests: int
    snapshots: int
    total: int
    limit: int | None
    kv_bytes_per_token: int
    state_bytes: int

    def __str__(self) -> str:
        parts = ("weights", "kv", "states", "snapshots", "workspace", "requests")
        listed = ", ".join(f"{name} {_mib(getattr(self, name))}" for name in parts)
        return f"{_mib(self.total)} of {_mib(self.limit) if self.limit else 'no limit'}: {listed}"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
