"""Sessions on disk: one safetensors file, bound by its metadata to the model and the arithmetic that computed it.

Tensors: `tokens` I32, `origins` U8, `state.I` U8 (whole state values), `kv.L` U8 (K and V blocks of attention layer L//2).
Metadata `lily`: a JSON object with the fields of `binding`, the counts, the snapshots and a CRC-32 of every tensor.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lily
from lily._engine import native
from lily.errors import CheckpointError, SessionMismatchError
from lily.safetensors_header import Tensor, read_header

if TYPE_CHECKING:
    from lily.model import Model

VERSION = 1
PART = ".part"  # ends the names of files that are being written
_SAMPLE_BYTES = 4096  # of each tensor enter the digest of a model: reading all of 20 GB would take longer than the session saves
_CRC_CHUNK = 1 << 24
# The number counts changes of the arithmetic: 2, decode in fixed point.
_SAME_BITS = {"amx": "x86-fma-2", "amx-emulated": "x86-fma-2", "avx2": "x86-fma-2", "avx512": "x86-fma-2", "neon": "neon-2"}
_DTYPES = {"<i4": "I32", "|u1": "U8"}


def model_digest(directory: Path, config: dict[str, Any]) -> str:
    """SHA-256 over the configuration and, for every tensor, its name, dtype, shape and first 4 KiB."""
    import hashlib

    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            for name, tensor in sorted(read_header(path).items()):
                digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
                file.seek(tensor.offset)
                digest.update(file.read(min(tensor.bytes, _SAMPLE_BYTES)))
    return digest.hexdigest()


def binding(model: Model) -> dict[str, Any]:
    """What a saved session must agree with, field by field."""
    device = model.device
    return {
        "lily": lily.__version__,
        "config": config_digest(model.config.raw),
        "model": model.digest,
        "device": device.kind,
        "storage": device.storage,
        "arithmetic": arithmetic(device.isa, os.environ.get("LILY_KERNEL", "")),
        "plan": "fused" if model._native.fused else "unfused",
    }


def config_digest(config: dict[str, Any]) -> str:
    """SHA-256 of a configuration, whatever the order of its keys."""
    import hashlib

    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def arithmetic(isa: str, forced: str) -> str:
    """Whose sums these are: instruction sets that give the same bits have one name; `forced` is what LILY_KERNEL says.

    >>> from lily.session_file import arithmetic
    >>> arithmetic("avx512", ""), arithmetic("avx512", "gemm=avx2"), arithmetic("avx2", "*=portable")
    ('x86-fma-2', 'x86-fma-2', 'x86-fma-2, but *=portable')
    """
    name = _SAME_BITS.get(isa, isa)
    other = [item for item in forced.split(",") if item and _SAME_BITS.get(variant := item.partition("=")[2], variant) != name]
    return f"{name}, but {','.join(other)}" if other else name


def save(model: Model, session: Any, path: str | os.PathLike[str]) -> int:
    """Write atomically: to a temporary file beside `path`, synced, then renamed over it. Returns the file's bytes."""
    import tempfile

    target = Path(path)
    image = native().export_session(session)
    tensors: dict[str, np.ndarray[Any, Any]] = {"tokens": image["tokens"], "origins": image["origins"]}
    tensors |= {f"state.{i}": data for i, data in enumerate(image["states"])}
    tensors |= {f"kv.{i}": data for i, data in enumerate(image["kv"])}
    header = {
        "format": "lily-session", "version": VERSION, **binding(model), "consumed": image["consumed"],
        "states": len(image["states"]), "kv": len(image["kv"]), "snapshots": image["snapshots"], "crc32": _checksums(tensors),
    }  # fmt: skip
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=PART, dir=target.parent)
    try:
        with open(handle, "wb", buffering=0) as file:
            _write(file, tensors, {"lily": json.dumps(header)})
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync_directory(target.parent)
    return size


def _write(file: Any, tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]) -> None:
    """The safetensors format, straight from the arrays: a copy of a session would not fit in memory beside it."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in tensors.items():
        entries[name] = {"dtype": _DTYPES[array.dtype.str], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    for data in (len(text).to_bytes(8, "little"), text, *tensors.values()):
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            done += file.write(view[done:])


def _sync_directory(directory: Path) -> None:
    """The new name itself survives a power cut, where the file system lets one ask for it."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def load(model: Model, path: str | os.PathLike[str]) -> Any:
    """The native session of a file. The file is mapped; `SessionMismatchError` names the field that differs."""
    source = Path(path)
    tensors, header = read(source)
    for field, expected in {"version": VERSION, **binding(model)}.items():
        if header.get(field) != expected:
            raise SessionMismatchError(
                f"{source}: the session was computed with {field} {header.get(field)!r}, this model has {expected!r}; "
                "load it with the same checkpoint and device, or read its text again"
            )
    mapped = np.memmap(source, np.uint8, "r")
    arrays = {name: _array(mapped, tensor) for name, tensor in tensors.items()}
    expected_sums = header.get("crc32")
    if not isinstance(expected_sums, dict):
        raise SessionMismatchError(f"{source} is damaged: its metadata holds no checksums")
    damaged = [name for name, crc in _checksums(arrays).items() if expected_sums.get(name) != crc]
    if damaged or arrays.keys() != expected_sums.keys():
        raise SessionMismatchError(f"{source} is damaged: {', '.join(damaged) or 'tensors are missing'}")
    try:
        states = [arrays[f"state.{i}"] for i in range(header["states"])]
        kv = [arrays[f"kv.{i}"] for i in range(header["kv"])]
        snapshots = [tuple(point) for point in header["snapshots"]]
        return native().import_session(model._native, arrays["tokens"], arrays["origins"], header["consumed"], states, snapshots, kv)
    except (KeyError, TypeError, ValueError) as error:
        raise SessionMismatchError(f"{source} does not fit this model: {error}") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where the tensors of a saved session lie, and its header. `SessionMismatchError` when it is none, or cut."""
    try:
        tensors = read_header(path)
    except CheckpointError as error:
        raise SessionMismatchError(f"{error}; this is not a whole saved session") from error
    header = _metadata(path)
    if header.get("format") != "lily-session":
        raise SessionMismatchError(f"{path} is not a saved session: metadata 'format' is {header.get('format')!r}")
    return tensors, header


def read_tensor(path: Path, tensor: Tensor, crc: int) -> np.ndarray[Any, Any]:
    """One tensor of a saved session, read apart from the rest and checked."""
    kinds = {kind: dtype for dtype, kind in _DTYPES.items()}
    array = np.fromfile(path, kinds[tensor.dtype], int(np.prod(tensor.shape)), offset=tensor.offset)
    if array.nbytes != tensor.bytes or zlib.crc32(array.tobytes()) != crc:
        raise SessionMismatchError(f"{path} is damaged")
    return array


def _metadata(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, "np") as file:
            header = json.loads((file.metadata() or {}).get("lily", "{}"))
    except Exception as error:  # the library's own error class is not public
        raise SessionMismatchError(f"{path} is not a saved session: {error}") from error
    if not isinstance(header, dict):
        raise SessionMismatchError(f"{path} is not a saved session: its metadata is not an object")
    return header


def _array(mapped: np.ndarray[Any, Any], tensor: Tensor) -> np.ndarray[Any, Any]:
    data = mapped[tensor.offset : tensor.offset + tensor.bytes]
    if tensor.dtype == "I32":
        return np.frombuffer(data.tobytes(), np.int32)
    return np.asarray(data)


def _checksums(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, int]:
    def crc(array: np.ndarray[Any, Any]) -> int:
        data, value = memoryview(np.ascontiguousarray(array)).cast("B"), 0
        for start in range(0, len(data), _CRC_CHUNK):
            value = zlib.crc32(data[start : start + _CRC_CHUNK], value)
        return value

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # crc32 runs without the GIL
        return dict(zip(tensors, pool.map(crc, tensors.values()), strict=True))
