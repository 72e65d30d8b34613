"""The model: loaded weights, their tokenizer and template, and everything one asks of them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lily import hub
from lily.asynchronous import AsyncMethods
from lily.chat import ChatMethods
from lily.config import ModelConfig, read_json
from lily.device import DeviceInfo, device_info
from lily.errors import TemplateError
from lily.generation import Run, collect
from lily.loading import check_options, check_vocabulary, open_engine
from lily.profile import ProfileMethods
from lily.progress import Progress, Report, reporting
from lily.prompts import is_batch, to_ids
from lily.request import Request, takes_options
from lily.results import Chunk, Generation, Memory, Ranked, Score
from lily.sampling import Sampling
from lily.scoring import rank, score
from lily.session import Session
from lily.session_file import model_digest
from lily.staging import staged
from lily.template import ChatTemplate
from lily.tokenizer import Tokenizer
from lily.weights import load_weights

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from lily.prompts import Prompt
    from lily.request import Options

DEMO = Path(__file__).parent / "data" / "demo"


class Model(ChatMethods, AsyncMethods, ProfileMethods):
    """A loaded model. Use `Model.from_pretrained` or `Model.demo`; it is a context manager and works from any thread.

    >>> import lily
    >>> with lily.Model.demo() as model:
    ...     text = str(model.generate("Once upon a time", max_tokens=8, temperature=0))
    >>> len(text) > 0
    True
    """

    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    #: The checkpoint's sampling defaults, from generation_config.json.
    defaults: Sampling
    #: Ids that end an answer: the union of what the configurations and the tokenizer say.
    end_tokens: frozenset[int]
    #: What was loaded: a directory or a Hub id.
    source: str
    _native: Any
    _sessions: weakref.WeakSet[Session]  # open ones, closed with the model
    _directory: Path | None
    _digest: str | None
    _quantize: int | None
    _progress: Progress

    def __init__(self) -> None:
        raise TypeError("use lily.Model.from_pretrained(directory_or_id) or lily.Model.demo()")

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        device: str = "auto",
        max_context: int | None = None,
        memory_limit: int | None = None,
        quantize: int | None = None,
        refresh: bool = False,
        progress: Progress = True,
    ) -> Model:
        """Load a directory or a Hub id such as `"mlx-community/Qwen3.6-35B-A3B-4bit"`.

        A complete local snapshot makes no network call unless `refresh`; otherwise the configuration is checked before
        any weight is downloaded. `device` is a name from `lily.devices()` or "auto". `max_context` is in tokens
        (default: what the checkpoint allows), `memory_limit` in bytes. `quantize` (4 or 8) packs unquantised matrices to
        that many bits, exactly as MLX does in groups of 64 with 8-bit routers, into a temporary file (in TMPDIR) that is
        gone when the model is. `progress` is True (a bar on a terminal), False, or a callable `(stage, done, total)`.

        Raises `CheckpointError`, `DeviceError`, `OutOfMemoryError`, `ValueError`.

        >>> import lily
        >>> model = lily.Model.from_pretrained(lily.Model.demo().source, max_context=512, progress=False)
        >>> model.max_context
        512
        """
        check_options(
            device=device, max_context=max_context, memory_limit=memory_limit, quantize=quantize, refresh=refresh, progress=progress
        )
        directory = hub.resolve(source, revision=revision, refresh=refresh, progress=progress)
        config = ModelConfig.from_file(directory)
        if max_context is not None and max_context > config.max_context:
            raise ValueError(f"max_context is {max_context}, but the checkpoint allows {config.max_context} tokens")
        weights = load_weights(directory, config)
        path = directory / "generation_config.json"
        parts: dict[str, Any] = {
            "config": config,
            "tokenizer": Tokenizer.from_directory(directory),
            "template": ChatTemplate.from_directory(directory),
            "generation_config": read_json(path) if path.is_file() else {},
            "source": str(source),
            "progress": progress,
        }
        check_vocabulary(parts["tokenizer"], config)
        limit = max_context if max_context is not None else config.max_context
        with reporting(progress) as report, staged(weights, quantize=quantize, memory_limit=memory_limit, report=report) as ready:
            engine = open_engine(config.spec(), ready, device, limit, memory_limit, report)
        model = cls._from_native(engine, **parts)
        model._directory, model._quantize = directory, quantize
        return model

    @classmethod
    def demo(cls, **options: Any) -> Model:
        """The small model that ships with the package: no download. Takes the options of `from_pretrained`.

        >>> import lily
        >>> lily.Model.demo().config.vocab_size
        6144
        """
        return cls.from_pretrained(DEMO, **options)

    @classmethod
    def _from_native(
        cls,
        engine: Any,
        *,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        generation_config: Mapping[str, Any] | None = None,
        source: str = "",
        progress: Progress = False,
    ) -> Model:
        """A model around any object with the engine's interface; the tests pass a scripted one."""
        self = object.__new__(cls)
        given = dict(generation_config or {})
        self._native = engine
        self._sessions = weakref.WeakSet()
        self._directory = None
        self._digest = None
        self._quantize = None
        self._progress = progress
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = Sampling.from_generation_config(given)
        self.end_tokens = tokenizer.end_tokens(given, config.raw, config.raw.get("text_config") or {})
        self.source = source
        return self

    @property
    def digest(self) -> str:
        """A SHA-256 that tells checkpoints apart: configuration, tensor names, shapes and the start of each tensor's data.

        >>> import lily
        >>> len(lily.Model.demo().digest)
        64
        """
        if self._digest is None:
            if self._directory is None:
                raise ValueError("a model that was not loaded from files has no digest")
            loaded_as = {"quantize": self._quantize} if self._quantize else {}
            self._digest = model_digest(self._directory, {**self.config.raw, **loaded_as})
        return self._digest

    @property
    def max_context(self) -> int:
        """The most tokens a session may hold.

        >>> import lily
        >>> lily.Model.demo(max_context=1024).max_context
        1024
        """
        return self._native.max_context

    @property
    def device(self) -> DeviceInfo:
        """The device that runs the model.

        >>> import lily
        >>> lily.Model.demo(device="cpu").device.name
        'cpu'
        """
        return device_info(self._native.device)

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Unpack[Options]) -> list[Generation]: ...
    @takes_options
    def generate(self, prompt: Any, **options: Any) -> Any:
        """Continue a prompt (text or ids); a list of prompts gives a list of answers.

        - `max_tokens` (alias `max_new_tokens`): None runs to the end token or the context limit; 0 only reads.
        - `stop`: a string or several, matched on the text; the answer ends before the first.
        - `logprobs`: True gives each token's own, n up to 20 also the n likeliest alternatives.
        - `ignore_eos`: go on past end tokens.
        - `token_mask(ids) -> uint32 [ceil(vocab / 32)]`: called before each token with the ids generated so far; a set
          bit allows the token.
        - `sampling` and the fields of `Sampling` (`temperature`, `top_k`, ...): each None is inherited.

        Raises `SamplingError`, `ContextOverflowError`, `OutOfMemoryError`, `GPUError`, `ValueError`, `TypeError`; the
        model stays usable after each.

        >>> import lily
        >>> model = lily.Model.demo()
        >>> answer = model.generate("The cat", max_tokens=4, temperature=0)
        >>> len(answer.tokens), answer.finish_reason
        (4, 'length')
        """
        prompts = prompt if is_batch(prompt) else [prompt]
        # All are checked before the first runs; each has its own request, so its own seed when none is given.
        requests = [(self._ids(one), self._request(options)) for one in prompts]
        answers = [collect(self._stream(ids, request), request) for ids, request in requests]
        return answers if is_batch(prompt) else answers[0]

    @takes_options
    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Chunk]:
        """Like `generate`, one chunk for each token. Closing the iterator, or Ctrl-C, stops the device cleanly.

        >>> import lily
        >>> for chunk in lily.Model.demo().stream("Once upon a time", max_tokens=4, temperature=0):
        ...     text = chunk.text
        >>> chunk.usage.generated_tokens
        4
        """
        return self._stream(self._ids(prompt), self._request(options))

    def _stream(self, ids: np.ndarray[Any, Any], request: Request, report: Report | None = None) -> Generator[Chunk, None, None]:
        session = self._native.session()
        try:
            yield from Run(self, session, ids, request).chunks(report)
        finally:
            session.close()

    def session(self) -> Session:
        """An empty session.

        >>> import lily
        >>> len(lily.Model.demo().session())
        0
        """
        return Session(self, self._native.session())

    def prefill(self, prompt: Prompt, *, progress: Progress = None) -> Session:
        """A session that has read `prompt` and is ready to generate. `progress` None means as at loading.

        >>> import lily
        >>> session = lily.Model.demo().prefill("Once upon a time")
        >>> session.generate(max_tokens=2).finish_reason
        'length'
        """
        session = self.session()
        session.append(prompt, progress=self._progress if progress is None else progress)
        return session

    def logits(self, ids: Prompt, *, last_only: bool = True) -> np.ndarray[Any, Any]:
        """Raw logits, float32: `[vocab]` of the token after the last, or `[n, vocab]` after every position.

        >>> import lily
        >>> lily.Model.demo().logits([1, 2, 3], last_only=False).shape
        (3, 6144)
        """
        rows = self._ids(ids)
        with self.session() as session:
            if last_only:
                session._native.append(rows, None)
                return session.logits()
            return session._native.append_rows(rows, "logits", None)

    def score(self, prompt: Prompt, *, window: int | None = None) -> Score:
        """Log-probability of every token but the first, through the prefill path.

        With `window=w` (w below the context limit), window i predicts `ids[w*i+1 : w*i+w+1]` from an empty state; None
        is the whole text at once. Raises `ValueError` for fewer than two tokens.

        >>> import lily
        >>> lily.Model.demo().score([5, 6, 7, 8, 9], window=2).logprobs.shape
        (4,)
        """
        return score(self, prompt, window)

    def rank(self, prompt: Prompt, choices: Sequence[Prompt]) -> list[Ranked]:
        """Continuations of a prompt, likeliest first, by the sum of their tokens' log-probabilities; ties by index.

        The prompt is read once. Prompt and choices are turned into ids apart, so a word at the border never merges with
        the prompt's last one: write the space that belongs to a choice at its beginning (" Paris"), or give ids. Sums
        favour short choices; divide by the number of tokens where that matters. Raises `ValueError` for an empty choice,
        `ContextOverflowError` before any work when the longest does not fit.

        >>> import lily
        >>> ranked = lily.Model.demo().rank("Once upon a", [" time", " xylophone"])
        >>> ranked[0].choice, ranked[0].index, ranked[0].logprob > ranked[1].logprob
        (' time', 0, True)
        """
        return rank(self, prompt, choices)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added around it.

        >>> import lily
        >>> model = lily.Model.demo()
        >>> model.decode(model.encode("Hello"))
        'Hello'
        """
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        >>> import lily
        >>> lily.Model.demo().decode([])
        ''
        """
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Messages as the prompt that the checkpoint was trained on: text, or ids with `tokenize`.

        Other arguments (`enable_thinking=False`, ...) become variables of the template. Raises `TemplateError`.

        >>> import lily
        >>> model = lily.Model.demo()
        >>> prompt = model.apply_chat_template([{"role": "user", "content": "Hi"}], enable_thinking=False)
        >>> prompt.startswith("<|im_start|>user")
        True
        """
        if self.template is None:
            raise TemplateError(f"{self.source or 'this checkpoint'} has no chat template; use generate with a text")
        text = self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text) if tokenize else text

    def memory(self) -> Memory:
        """Exact bytes by kind.

        >>> import lily
        >>> lily.Model.demo().memory().kv_bytes_per_token
        2048
        """
        counts = self._native.memory()
        return Memory(**{name: counts.get(name) for name in Memory.__dataclass_fields__})  # type: ignore[arg-type]

    def close(self) -> None:
        """Close all sessions and give all memory back. May be called twice; other calls then raise `ValueError`.

        >>> import lily
        >>> model = lily.Model.demo()
        >>> model.close()
        """
        if self._store is not None:
            self._store._close()
        for session in list(self._sessions):
            session.close()
        self._native.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = f"{self.config.num_experts} experts" if self.config.is_moe else "dense"
        return f"Model({self.source!r}, {self.config.num_layers} layers, {kind}, context {self.config.max_context})"

    def _repr_html_(self) -> str:
        import html

        try:
            memory, where = str(self.memory()), self.device.name
        except ValueError:
            memory, where = "closed", "no device"
        return f"<b>{html.escape(self.source)}</b> on {html.escape(where)}<br><small>{html.escape(memory)}</small>"

    def _ids(self, prompt: Prompt) -> np.ndarray[Any, Any]:
        return to_ids(prompt, self.tokenizer, self.config.vocab_size)

    def _request(self, options: Mapping[str, Any]) -> Request:
        return Request.make(self.defaults, self.config.vocab_size, options)
