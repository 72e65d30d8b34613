"""Sessions kept on disk for reuse: immutable files in a directory of bounded size, the least recently used deleted first."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily import session_file
from lily.errors import LilyError, OutOfMemoryError
from lily.prefix import Prefix

if TYPE_CHECKING:
    from lily.model import Model

_log = logging.getLogger(__name__)

DEFAULT_LIMIT = 8 << 30
_SUFFIX = ".lily"
_STALE_SECONDS = 3600  # what was being written so long ago was left by a process that died


@dataclass(frozen=True)
class Stored:
    """A file and what is in it."""

    path: Path
    prefix: Prefix


class SessionCache:
    """The directory of one model, inside a directory that several models and processes may share.

    Files are written once, under a name made of their contents, and never changed; a session that is loaded is a copy. What is
    damaged, or vanishes because another process deleted it, is passed over.
    """

    def __init__(self, model: Model, directory: Path, limit: int) -> None:
        self._model = model
        self._root = directory
        self.limit = limit
        bound = json.dumps(session_file.binding(model), sort_keys=True).encode()
        import hashlib

        self.directory = directory / hashlib.sha256(bound).hexdigest()[:16]
        self.directory.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Stored | None] = {}  # by file name; None for one that cannot be read

    def entries(self) -> list[Stored]:
        """What is there now."""
        try:
            names = [name for name in os.listdir(self.directory) if name.endswith(_SUFFIX)]
        except OSError:
            names = []
        self._known = {name: self._known[name] if name in self._known else self._read(self.directory / name) for name in names}
        return [stored for stored in self._known.values() if stored is not None]

    def load(self, stored: Stored) -> Any:
        """A session of its own, as the engine has it; None when the file is gone or damaged, or memory is short."""
        try:
            native = session_file.load(self._model, stored.path)
            os.utime(stored.path)
            return native
        except OutOfMemoryError as error:
            _log.info("%s stays on disk: %s", stored.path, error)
        except (LilyError, OSError) as error:
            _log.warning("%s is left out: %s", stored.path, error)
            self._known[stored.path.name] = None
            stored.path.unlink(missing_ok=True)
        return None

    def write(self, native: Any, prefix: Prefix) -> bool:
        """Write a session unless it is there; False when it cannot be: a full disk costs a cached session and nothing else."""
        path = self.directory / f"{prefix.digest()}{_SUFFIX}"
        try:
            if path.exists():
                os.utime(path)
                return True
            if native.nbytes > self.limit:
                return False
            self._make_room(native.nbytes)
            session_file.save(self._model, native, path)
            self._make_room(0)  # with the exact size
        except (LilyError, OSError, ValueError) as error:
            _log.warning("a session of %d tokens was not written to %s: %s", len(prefix.tokens), self.directory, error)
            return False
        return True

    def nbytes(self) -> int:
        """Bytes of the files of all models in the directory."""
        return sum(size for _, size, _ in self._files())

    def clear(self) -> None:
        """Delete this model's files."""
        for stored in self.entries():
            stored.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Stored | None:
        try:
            tensors, header = session_file.read(path)
            tokens, origins = (session_file.read_tensor(path, tensors[name], header["crc32"][name]) for name in ("tokens", "origins"))
            return Stored(path, Prefix(tokens, origins, [int(point[0]) for point in header["snapshots"]]))
        except (LilyError, OSError, KeyError, TypeError, ValueError, IndexError) as error:
            _log.warning("%s is left out: %s", path, error)
            return None

    def _files(self) -> list[tuple[float, int, Path]]:
        """Last use, size and path of every file, the least recently used first."""
        found = []
        for path in self._root.glob("*/*"):
            try:
                status = path.stat()
            except OSError:
                continue
            if path.name.endswith(_SUFFIX):
                found.append((status.st_mtime, status.st_size, path))
            elif path.name.endswith(session_file.PART) and time.time() - status.st_mtime > _STALE_SECONDS:
                path.unlink(missing_ok=True)
        return sorted(found, key=lambda file: (file[0], str(file[2])))

    def _make_room(self, nbytes: int) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + nbytes <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size


def default_directory() -> Path:
    """Where the system keeps what may be deleted at any time."""
    from platformdirs import user_cache_path

    return user_cache_path("lily-inference", appauthor=False) / "sessions"
