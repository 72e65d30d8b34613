"""`lily.inspect`: whether a checkpoint on this disk is whole and sane, what is in it, and what is odd about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lily import hub
from lily.checkpoint import find_files, read_index, shortfalls
from lily.config import ModelConfig, read_json
from lily.errors import CheckpointError, LilyError
from lily.inspection_checks import check_values, contents, skipped_tensors
from lily.loading import check_vocabulary
from lily.planning import CONTEXTS, plan
from lily.template import ChatTemplate
from lily.tokenizer import Tokenizer
from lily.weights import load_weights


@dataclass(frozen=True)
class Inspection:
    """What `lily.inspect` found. `problems` keep the checkpoint from working, `remarks` say what is odd and what it means.

    `files` lists each weight file with its `bytes` and `missing` bytes (None: all), `tensors` each kind with its formats,
    `skipped` what text generation leaves out, `end_tokens` id and text, `memory` bytes by kind for each context length.
    What could not be found out is empty.

    >>> import lily
    >>> report = lily.inspect(lily.Model.demo().source)
    >>> report.ok, report.model["layers"], report.problems
    (True, 8, ())
    """

    source: str
    directory: str
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    files: tuple[dict[str, Any], ...]
    model: dict[str, Any]
    tensors: tuple[dict[str, Any], ...]
    skipped: dict[str, dict[str, int]]
    norms: dict[str, Any]
    end_tokens: dict[int, str]
    template: str | None
    memory: dict[int, dict[str, int]]

    @property
    def ok(self) -> bool:
        """Whether nothing was found that keeps the checkpoint from working."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def inspect(source: str | os.PathLike[str], *, revision: str | None = None) -> Inspection:
    """Look at a directory, or at the local copy of a Hub id; makes no network call and reads few of the weights' bytes.

    Raises `CheckpointError` only when there is nothing to look at; whatever is wrong with it is in the result.

    >>> import lily
    >>> sorted(lily.inspect(lily.Model.demo().source).memory)
    [4096, 32768, 131072]
    """
    hub.check_source(source, revision)
    directory = hub.local_directory(source)
    if directory is None:
        directory = hub.cached_snapshot(os.fspath(source), revision)
    if directory is None:
        raise CheckpointError(f"{source}: not on this disk; `lily pull {source}` downloads it", found=str(source), expected="a local copy")
    return _Inspector(str(source), directory).run()


class _Inspector:
    """Collects what is found; every step adds its problems and lets the next one run."""

    def __init__(self, source: str, directory: Path) -> None:
        self.source, self.directory = source, directory
        self.problems: list[str] = []
        self.remarks: list[str] = []
        self.found: dict[str, Any] = {
            "files": (), "model": {}, "tensors": (), "skipped": {}, "norms": {}, "end_tokens": {}, "template": None, "memory": {},
        }  # fmt: skip

    def run(self) -> Inspection:
        config: ModelConfig | None = None
        try:
            config = ModelConfig.from_file(self.directory)
        except CheckpointError as error:
            self.problems.append(str(error))
        whole = self._try(self._files)
        if config is not None:
            self._try(lambda: self._model(config))
            self._try(lambda: self._text(config))
            if whole:
                self._try(lambda: self._weights(config))
        return Inspection(self.source, str(self.directory), tuple(dict.fromkeys(self.problems)), tuple(self.remarks), **self.found)

    def _try(self, step: Any) -> Any:
        try:
            return step()
        except LilyError as error:
            self.problems.append(str(error))
            return None

    def _files(self) -> bool:
        present, absent = find_files(self.directory, read_index(self.directory))
        short = shortfalls(self.directory, present)
        reports = [{"name": path.name, "bytes": path.stat().st_size, "missing": short.get(path.name, 0)} for path in present]
        self.found["files"] = (*reports, *({"name": name, "bytes": 0, "missing": None} for name in absent))
        self.problems += [f"{name} lacks {count:,} bytes: download it again" for name, count in short.items()]
        others = sorted({path.name for path in self.directory.glob("*.safetensors")} - {path.name for path in present})
        if others:
            self.remarks.append(f"{', '.join(others)}: not part of the model, not read")
        if absent and not short:
            try:
                load_weights(self.directory, ModelConfig.from_file(self.directory))
            except CheckpointError:
                self.problems.append(f"{', '.join(absent)}: named by the index or by the other files, and not there")
                return False
            self.remarks.append(
                f"the index names {len(absent)} files that are not there, but the others hold every tensor: the index is stale"
            )
        return not short

    def _model(self, config: ModelConfig) -> None:
        kind = f"{config.num_experts} experts, {config.experts_per_token} a token" if config.is_moe else "dense"
        self.found["model"] = {
            "type": config.model_type, "layers": config.num_layers, "attention_layers": config.layer_types.count("full_attention"),
            "hidden": config.hidden_size, "feed_forward": kind, "vocabulary": config.vocab_size, "tied": config.tied,
            "context": config.max_context,
        }  # fmt: skip

    def _text(self, config: ModelConfig) -> None:
        tokenizer = Tokenizer.from_directory(self.directory)
        self._try(lambda: check_vocabulary(tokenizer, config))
        path = self.directory / "generation_config.json"
        generation = read_json(path) if path.is_file() else {}
        text_config = config.raw.get("text_config")
        ends = tokenizer.end_tokens(generation, config.raw, text_config if isinstance(text_config, dict) else {})
        self.found["end_tokens"] = {end: tokenizer.decode([end]) for end in sorted(ends)}
        if not ends:
            self.problems.append("no end token in generation_config.json, config.json or the tokenizer: an answer never ends")
        listed = _end_ids(generation)
        if listed and ends - listed:
            texts = ", ".join(repr(tokenizer.decode([end])) for end in sorted(ends - listed))
            self.remarks.append(
                f"generation_config.json leaves out {texts}, which ends an answer too: Lily stops there, other engines may not"
            )
        template = ChatTemplate.from_directory(self.directory)
        if template is None:
            self.remarks.append("no chat template: generate works, chat does not")
            return
        self.found["template"] = "chat_template.jinja" if (self.directory / "chat_template.jinja").is_file() else "tokenizer_config.json"
        template.render([{"role": "user", "content": "Hello"}])

    def _weights(self, config: ModelConfig) -> None:
        weights = load_weights(self.directory, config)
        self.found["tensors"] = tuple(contents(weights))
        self.found["model"]["parameters"] = sum(row["parameters"] for row in self.found["tensors"])
        self.found["skipped"] = skipped_tensors([self.directory / file["name"] for file in self.found["files"] if file["missing"] == 0])
        for name, entry in self.found["skipped"].items():
            self.remarks.append(f"{entry['tensors']} {name} tensors ({_size(entry['bytes'])}) are not used for text")
        self.found["norms"], problems, remarks = check_values(weights, config)
        self.problems += problems
        self.remarks += remarks
        counted = plan(self.directory)
        self.found["memory"] = {tokens: counted.memory(tokens) for tokens in CONTEXTS}


def _end_ids(generation: dict[str, Any]) -> set[int]:
    value = generation.get("eos_token_id")
    return set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()


def _lines(report: Inspection) -> Iterator[str]:
    yield f"{report.source}: {'whole and sane' if report.ok else f'{len(report.problems)} problems'}"
    yield from (f"  problem: {text}" for text in report.problems)
    yield from (f"  note: {text}" for text in report.remarks)
    if report.model:
        model = report.model
        parameters = f", {model['parameters'] / 1e9:.3f} B parameters" if "parameters" in model else ""
        yield f"{model['type']}: {model['layers']} layers ({model['attention_layers']} attention), {model['feed_forward']}{parameters}"
    if report.files:
        missing = sum(1 for file in report.files if file["missing"] != 0)
        yield f"{len(report.files)} weight files, {_size(sum(file['bytes'] for file in report.files))}, {missing} incomplete"
    for row in report.tensors:
        yield f"  {row['kind']:<18}{row['format']:<24}{row['tensors']:>6} tensors  {_size(row['bytes']):>12}"
    if report.norms:
        yield f"norms stored as {report.norms['stored_as']}, mean {report.norms['mean']:.3f}"
    if report.end_tokens:
        yield "end tokens " + ", ".join(f"{token} {text!r}" for token, text in report.end_tokens.items())
    yield f"chat template {report.template or 'none'}"
    for tokens, memory in report.memory.items():
        yield f"memory at {tokens // 1024:>3}K tokens {_size(memory['total']):>12}"


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 10**9 else f"{count / 1e6:,.2f} MB"
