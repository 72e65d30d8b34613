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
from lily.progress import Progress, visible

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
    directory = local_directory(source)
    if directory is not None:
        return directory
    repo = os.fspath(source)
    snapshot = None if refresh else local_snapshot(repo, revision)
    return snapshot if snapshot is not None else _download(repo, revision, progress)


def local_directory(source: str | os.PathLike[str]) -> Path | None:
    """`source` as a directory; None when it must be a Hub id. Raises `CheckpointError` when it can be neither."""
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
    except Exception:  # not cached; the classes differ between versions of the library
        return None
    return Path(str(found))


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


def find_config(source: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The config.json of a file path, a directory or a Hub id; from the Hub it alone is downloaded."""
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


def _download(repo: str, revision: str | None, progress: Progress) -> Path:
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        # Asks the Hub itself: the download functions fall back to an old cached copy without a word.
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    sizes = {item.rfilename: item.size or 0 for item in info.siblings or []}
    if "config.json" not in sizes:
        raise CheckpointError(f"{repo}: the repository has no config.json", expected="config.json")
    config = ModelConfig.from_file(_fetch_config(repo, revision))
    directory = _fetch(repo, revision, [name for name in SMALL_FILES if name in sizes], sizes, progress=False)
    if "tokenizer.json" not in sizes:
        raise CheckpointError(f"{repo}: the repository has no tokenizer.json", expected="tokenizer.json")
    _fetch(repo, revision, _weight_files(repo, directory, config, sizes), sizes, progress=progress)
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
    from tqdm.auto import tqdm

    class Silent(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))

    bars = None if progress is True and visible() else Silent
    batches = [[name] for name in files] if callable(progress) else [files]
    done, total = 0, sum(sizes[name] for name in files)
    with _hub_errors(repo, revision):
        for batch in batches:
            path = snapshot_download(repo, revision=revision, allow_patterns=batch, tqdm_class=bars)
            done += sum(sizes[name] for name in batch)
            if callable(progress):
                progress("download", done, total)
    return Path(str(path))


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Say in one sentence what went wrong between here and the Hub."""
    try:
        yield
    except LilyError:
        raise
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "GatedRepoError" in kinds:
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
