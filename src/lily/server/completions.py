"""POST /v1/completions: prompts without a chat."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lily
from lily.results import Chunk, Timing, TokenLogprob, Usage
from lily.server.body import checked, json_object
from lily.server.chat_completions import (
    DONE,
    SAME_ANYWAY,
    TIERS,
    progress_object,
    sampling_options,
    timing_object,
    token_bias,
    usage_object,
)
from lily.server.errors import ApiError, bad_request
from lily.server.exchange import Server, event, exchange, new_id, prepare
from lily.server.fields import check_stream_options, only, without_effect
from lily.server.logprobs import bounded
from lily.server.schema import MAX_PROMPTS, CompletionRequest
from lily.stepping import Piece, Reading, Steps, TextSteps
from lily.tokenizer import Tokenizer


async def completions(request: Request) -> Response:
    """The endpoint."""
    server: Server = request.app.state.server
    body = checked(CompletionRequest, await json_object(request, server.settings))
    model = server.names.check(body.model)
    without_effect(body, SAME_ANYWAY)
    n = body.n or 1
    only(body, {"service_tier": TIERS, "suffix": ("",), "best_of": (n,)})
    check_stream_options(body)
    if body.echo and body.logprobs is not None:
        raise bad_request("and logprobs cannot be used together", "echo")
    options = sampling_options(body, server)
    options |= {"max_tokens": body.max_tokens, "stop": body.stop, "logit_bias": token_bias(body.logit_bias)}
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs or True
    prompts = _prompts(body.prompt)
    prepared = await prepare(server, lambda: _Prompts([TextSteps(server.model, prompt, options, n) for prompt in prompts], n))
    wanted = body.stream_options
    reply = CompletionReply(
        server, model, [_Choice(i, server.model.tokenizer if body.logprobs is not None else None) for i in range(n * len(prompts))], n,
        usage=bool(wanted and wanted.include_usage), progress=bool(wanted and wanted.include_progress), echo=prepared.texts(server.model.decode) if body.echo else None,
    )  # fmt: skip
    server.show_prompt(str(body.prompt))
    return await exchange(request, prepared, reply, stream=bool(body.stream))


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """One text or list of ids, or several."""
    several = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    if len(several) > MAX_PROMPTS:
        raise bad_request(f"has {len(several)} prompts, at most {MAX_PROMPTS} are taken", "prompt")
    for i, prompt in enumerate(several):
        path = f"prompt[{i}]" if several is given else "prompt"
        if prompt in ("", []):
            raise bad_request("is empty, expected at least one token", path)
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not ids and not isinstance(prompt, str):
            raise bad_request("must be text or a list of token ids", path)
    return several


class _Prompts:
    """Several prompts, one after the other; the answers to prompt i begin at index i * n."""

    def __init__(self, prepared: list[TextSteps], n: int) -> None:
        self._prepared, self._n = prepared, n
        self.prompt_tokens = max(one.prompt_tokens for one in prepared)

    def check_length(self) -> None:
        for one in self._prepared:
            one.check_length()

    def texts(self, decode: Callable[[list[int]], str]) -> list[str]:
        return [decode(one.prompt_ids) for one in self._prepared]

    def steps(self) -> Steps:
        for i, one in enumerate(self._prepared):
            for step in one.steps():
                yield Piece(step.index + i * self._n, step.delta) if isinstance(step, Piece) else step


class CompletionReply:
    """The answer as a `text_completion`, or as pieces of one."""

    def __init__(
        self, server: Server, model: str, choices: list[_Choice], n: int, *, usage: bool, progress: bool, echo: list[str] | None
    ) -> None:
        self._base = {
            "id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": model,
            "system_fingerprint": f"lily-{lily.__version__}",
        }  # fmt: skip
        self._choices, self._n, self._wants_usage, self._wants_progress, self._echo = choices, n, usage, progress, echo
        self._begun = time.perf_counter()
        self._usages: list[list[Usage]] = [[] for _ in range(len(choices) // n)]
        self._timing: Timing | None = None

    def opening(self) -> bytes:
        if self._echo is None:
            return b""
        return b"".join(self._chunk(choice.index, choice.begin(self._echo[choice.index // self._n])) for choice in self._choices)

    def add(self, step: Reading | Piece) -> bytes:
        if isinstance(step, Reading):
            if not self._wants_progress:
                return b""
            return event(self._base | {"choices": [], "prompt_progress": progress_object(step, self._begun)})
        chunk: Chunk = step.delta
        text, logprobs = self._choices[step.index].add(chunk)
        if chunk.finish_reason is not None:
            assert chunk.usage is not None
            self._usages[step.index // self._n].append(chunk.usage)
            self._timing = self._timing or chunk.timing
        return self._chunk(step.index, text, logprobs, chunk.finish_reason) if text or chunk.finish_reason is not None else b""

    def closing(self) -> bytes:
        return (event(self._base | {"choices": []} | self._totals()) if self._wants_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.to_openai()) + DONE

    def whole(self) -> dict[str, Any]:
        if self._echo is not None:
            for choice in self._choices:
                choice.text.insert(0, self._echo[choice.index // self._n])
        return self._base | {"choices": [choice.whole() for choice in self._choices]} | self._totals()

    def _totals(self) -> dict[str, Any]:
        assert self._timing is not None
        usages = [usage_object(usages) for usages in self._usages]
        total = usages[0]
        for usage in usages[1:]:
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                total[name] += usage[name]
            total["prompt_tokens_details"]["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        return {"usage": total, "timing": timing_object(self._timing)}

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event(self._base | {"choices": [choice]} | ({"usage": None} if self._wants_usage else {}))


class _Choice:
    """One answer; with a tokenizer also its log-probabilities, in the old form of lists side by side."""

    def __init__(self, index: int, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.text: list[str] = []
        self._tokenizer = tokenizer
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is still held back
        self._logprobs = _lists()
        self._length = 0
        self._reason: str | None = None

    def begin(self, text: str) -> str:
        """The prompt, when it is to be repeated."""
        self._length = len(text)
        return text

    def add(self, chunk: Chunk) -> tuple[str, dict[str, Any] | None]:
        self.text.append(chunk.text)
        self._reason = chunk.finish_reason
        if self._tokenizer is None:
            return chunk.text, None
        self._waiting += chunk.logprobs or []
        added = _lists()
        if chunk.text:
            for entry in self._waiting:
                if not self._tokenizer.is_special(entry.token):
                    self._append(added, entry, self._tokenizer)
            self._waiting = []
        for name, values in self._logprobs.items():
            values += added[name]
        return chunk.text, added

    def whole(self) -> dict[str, Any]:
        logprobs = self._logprobs if self._tokenizer is not None else None
        return {"index": self.index, "text": "".join(self.text), "logprobs": logprobs, "finish_reason": self._reason}

    def _append(self, lists: dict[str, list[Any]], entry: TokenLogprob, tokenizer: Tokenizer) -> None:
        text = tokenizer.decode([entry.token])
        lists["tokens"].append(text)
        lists["token_logprobs"].append(bounded(entry.logprob))
        lists["top_logprobs"].append({tokenizer.decode([token]): bounded(logprob) for token, logprob in entry.top})
        lists["text_offset"].append(self._length)
        self._length += len(text)


def _lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
