"""From a directory or a Hub id to a complete local directory, with the network used only when it is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lily.checkpoint import INDEX, check_names, find_files, is_used, read_index, shortfalls
from lily.config import ModelConfig
from lily.errors import CheckpointError, LilyError
from lily.names import canonical
from lily.progress import Progress, Report, visible

_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
SMALL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX,
]  # fmt: skip
WEIGHT_PATTERNS = ["*.safetensors"]


def resolve(source: str | os.PathLike[str], *, revision: str | None = None, refresh: bool = False, progress: Progress = True) -> Path:
    """The directory that holds the checkpoint: `source` itself, or the local snapshot of a Hub id.

    A complete snapshot is used without any network call unless `refresh`. Otherwise config.json comes first and is
    checked, then the small files, whose index is checked, then the weights. Raises `CheckpointError`.
    """
    check_source(source, revision)
    directory = local_directory(source)
    if directory is not None:
        return directory
    repo = os.fspath(source)
    snapshot = None if refresh else local_snapshot(repo, revision)
    if snapshot is not None:
        return snapshot
    sizes: dict[str, int] = {}
    try:
        return _download(repo, revision, progress, sizes)
    except CheckpointError as error:
        broken = _describe_partial(repo, revision, sizes)
        if not broken:
            raise
        raise CheckpointError(f"{error}; {broken}", found=error.found, expected=error.expected, tensor=error.tensor) from error


def check_source(source: Any, revision: Any = None) -> None:
    """Raise `TypeError` or `ValueError` unless these can name a checkpoint and a revision of it."""
    if not isinstance(source, (str, os.PathLike)) or isinstance(os.fspath(source), bytes):
        raise TypeError(f"the checkpoint is {source!r}, expected a directory or a Hub id such as 'owner/name'")
    if revision is not None and not isinstance(revision, str):
        raise TypeError(f"revision is {revision!r}, expected the name of a branch or tag, a commit, or None")
    if revision == "" or "\0" in os.fspath(source) + (revision or ""):
        raise ValueError(f"{os.fspath(source)!r} at revision {revision!r}: no such name can exist")


def local_directory(source: str | os.PathLike[str]) -> Path | None:
    """`source` as a directory; None when it must be a Hub id. Raises `CheckpointError` when it can be neither."""
    check_source(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file, expected the directory that holds it", found=str(path))
    if isinstance(source, str) and _ID.match(source):
        return None
    raise CheckpointError(
        f"{source}: no such directory, and not a Hub id of the form owner/name",
        found=str(source), expected="a directory or owner/name",
    )  # fmt: skip


def local_snapshot(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot of a Hub id if every file that Lily needs is there. Makes no network call."""
    path = cached_snapshot(repo, revision)
    return path if path is not None and is_complete(path) else None


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot of a Hub id, complete or not; None without one. Makes no network call."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=SMALL_FILES + WEIGHT_PATTERNS)
    except Exception as error:  # not cached, or not with every file; the classes differ between versions of the library
        found = getattr(error, "snapshot_path", None)
    return None if found is None else Path(str(found))


def is_complete(directory: Path) -> bool:
    """Whether config, tokenizer and every listed weight file are there, each as long as its header says."""
    try:
        return not lacking(directory)
    except CheckpointError:
        return False


def lacking(directory: Path) -> dict[str, int | None]:
    """What a checkpoint directory lacks: for each file the missing bytes, None when all of it is missing."""
    result: dict[str, int | None] = {name: None for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()}
    present, absent = find_files(directory, read_index(directory))
    return result | dict.fromkeys(absent) | shortfalls(directory, present)


def _describe_partial(repo: str, revision: str | None, sizes: dict[str, int]) -> str | None:
    """In words, what the local copy of a Hub id lacks; None without one, or when it is whole. `sizes` are the Hub's, if known."""
    path = cached_snapshot(repo, revision)
    if path is None:
        return None
    try:
        missing = lacking(path)
    except CheckpointError as error:
        return str(error)
    absent = {name: f"all of its {sizes[name]}" if name in sizes else "all" for name in missing}
    listed = [f"{name} lacks {absent[name] if count is None else count} bytes" for name, count in missing.items()]
    return f"the local copy {path} is incomplete: {', '.join(listed)}" if listed else None


def find_config(source: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The config.json of a file path, a directory or a Hub id; from the Hub it alone is downloaded."""
    check_source(source, revision)
    path = Path(source).expanduser()
    if path.is_file():
        return path
    directory = local_directory(source)
    if directory is None:
        repo = os.fspath(source)
        directory = local_snapshot(repo, revision)
        if directory is None:
            return _fetch_config(repo, revision)
    return directory / "config.json"


def _fetch_config(repo: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    with _hub_errors(repo, revision):
        return Path(str(hf_hub_download(repo, "config.json", revision=revision)))


def _download(repo: str, revision: str | None, progress: Progress, sizes: dict[str, int]) -> Path:
    """Fills `sizes`, by file name, as soon as the Hub has said them."""
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        # Asks the Hub itself: the download functions fall back to an old cached copy without a word.
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    sizes.update((item.rfilename, item.size or 0) for item in info.siblings or [])
    if "config.json" not in sizes:
        raise CheckpointError(f"{repo}: the repository has no config.json", expected="config.json")
    config = ModelConfig.from_file(_fetch_config(repo, revision))
    directory = _fetch(repo, revision, [name for name in SMALL_FILES if name in sizes], sizes, progress=False)
    if "tokenizer.json" not in sizes:
        raise CheckpointError(f"{repo}: the repository has no tokenizer.json", expected="tokenizer.json")
    weights = _weight_files(repo, directory, config, sizes)
    _fetch(repo, revision, weights, sizes, progress=progress)
    _mend(repo, revision, directory, {name: sizes[name] for name in weights})
    return directory


def _weight_files(repo: str, directory: Path, config: ModelConfig, sizes: dict[str, int]) -> list[str]:
    """The weight files to download, after the index was compared with the architecture."""
    index = read_index(directory)
    if index is None:
        every = [name for name in sizes if name.endswith(".safetensors") and "/" not in name]
        files = [name for name in every if name.startswith("model")] or every
    else:
        check_names({canonical(name) for name in index if is_used(name, config)}, config, repo)
        files = sorted(set(index.values()))
    absent = [name for name in files if name not in sizes]
    if absent or not files:
        raise CheckpointError(f"{repo}: weight files are missing in the repository: {absent or 'all'}", expected=absent)
    return files


def _fetch(repo: str, revision: str | None, files: list[str], sizes: dict[str, int], *, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    total = sum(sizes[name] for name in files)
    bars = None if progress is True and visible() else _counter(progress if callable(progress) else None, total)
    with _hub_errors(repo, revision):
        path = snapshot_download(repo, revision=revision, allow_patterns=files, tqdm_class=bars)
    if callable(progress):
        progress("download", total, total)
    return Path(str(path))


def _counter(report: Report | None, total: int) -> Any:
    """A silent progress bar for the library that passes bytes on to `report`."""
    from tqdm.auto import tqdm

    class Counter(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counted = kwargs.get("initial") or 0
            self._counts = report is not None and kwargs.get("unit") == "B"
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            if self._counts and report is not None:
                self._counted += int(n or 0)
                report("download", min(self._counted, total), total)

    return Counter


def _mend(repo: str, revision: str | None, directory: Path, sizes: dict[str, int]) -> None:
    """Download again what has another size than on the Hub: the library trusts any file that is there."""
    from huggingface_hub import hf_hub_download

    def wrong() -> dict[str, int]:
        return {name: size - (directory / name).stat().st_size for name, size in sizes.items() if (directory / name).stat().st_size != size}

    for name in wrong():
        with _hub_errors(repo, revision):
            hf_hub_download(repo, name, revision=revision, force_download=True)
    if left := wrong():
        listed = ", ".join(f"{name} lacks {count} bytes" for name, count in left.items())
        raise CheckpointError(f"{repo}: the download in {directory} is incomplete: {listed}", found=left, expected=sizes)


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Say in one sentence what went wrong between here and the Hub."""
    try:
        yield
    except LilyError:
        raise
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "OfflineModeIsEnabled" in kinds:
            what = "not complete on this disk, and HF_HUB_OFFLINE forbids to download it"
        elif "GatedRepoError" in kinds:
            what = "access is restricted; accept its terms on the Hub and log in with `hf auth login`"
        elif "RepositoryNotFoundError" in kinds:
            what = "no such repository on the Hub, or it is private (log in with `hf auth login`)"
        elif "RevisionNotFoundError" in kinds:
            what = f"the repository has no revision {revision!r}"
        elif "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
            what = f"a needed file is not there ({error})"
        else:
            reason = str(error).strip() or type(error).__name__
            what = f"the Hub could not be reached and no complete local copy is used ({reason.splitlines()[0]})"
        raise CheckpointError(f"{repo}: {what}", found=repo) from error
