"""The simulator's library from Python: launch one kernel on numpy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

READ, WRITE, READ_WRITE = 1, 2, 3


class SimError(RuntimeError):
    """A launch did what a kernel must not do; the message says what, where, and in which kernel."""


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("access", ctypes.c_uint32), ("name", ctypes.c_char_p)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_char_p),
        ("label", ctypes.c_char_p),
        ("constants", ctypes.POINTER(ctypes.c_uint32)),
        ("n_constants", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("n_buffers", ctypes.c_uint32),
        ("args", ctypes.c_void_p),
        ("args_bytes", ctypes.c_uint32),
        ("present", ctypes.c_uint32),
    ]


class _Traffic(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p)] + [
        (n, ctypes.c_uint64)
        for n in ("bytes_read", "bytes_written", "unique_bytes_read", "unique_bytes_written", "transactions", "useful_bytes")
    ]


class _Counters(ctypes.Structure):
    _fields_ = [
        ("threadgroups", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("n_traffic", ctypes.c_uint32),
        ("traffic", _Traffic * 32),
    ]


@dataclass
class Traffic:
    """What one launch moved through one buffer, in bytes; a simdgroup's access counts each byte once."""

    name: str
    bytes_read: int
    bytes_written: int
    unique_bytes_read: int
    unique_bytes_written: int
    transactions: int
    useful_bytes: int

    @property
    def coalescing(self) -> float:
        """Bytes asked for over bytes moved in lines of 128."""
        return self.useful_bytes / (128 * self.transactions) if self.transactions else 1.0


@dataclass
class Counters:
    threadgroups: int
    barriers: int
    threadgroup_bytes: int
    traffic: list[Traffic]


class Simulator:
    """One context of the library. storage: 0 bfloat16, 1 float32."""

    def __init__(self, path: str | Path, storage: int = 0, *, checking: bool = True, seed: int = 0, counting: bool = False):
        self._library = library = ctypes.CDLL(str(path))
        library.lily_sim_open.restype = ctypes.c_void_p
        library.lily_sim_functions.restype = ctypes.c_char_p
        library.lily_sim_counters.restype = ctypes.POINTER(_Counters)
        for name in ("close", "barrier", "counters", "functions"):
            getattr(library, f"lily_sim_{name}").argtypes = [ctypes.c_void_p]
        library.lily_sim_set.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint32]
        library.lily_sim_launch.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Launch), ctypes.c_char_p, ctypes.c_uint64]
        self._context = library.lily_sim_open(storage)
        if not self._context:
            raise SimError(f"the library holds no kernels of storage {storage}")
        self.set(checking=checking, seed=seed, counting=counting)

    def close(self) -> None:
        if self._context:
            self._library.lily_sim_close(self._context)
            self._context = None

    def set(self, *, checking: bool = True, seed: int = 0, counting: bool = False) -> None:
        self._library.lily_sim_set(self._context, int(checking), seed, int(counting))

    def barrier(self) -> None:
        """A barrier of the encoder."""
        self._library.lily_sim_barrier(self._context)

    def functions(self) -> list[str]:
        return self._library.lily_sim_functions(self._context).decode().split()

    def launch(self, function, buffers, *, grid=1, threads=32, args=b"", constants=(), names=(), label="") -> None:
        """buffers: arrays, None (not bound), or (array, READ | WRITE); without an access an array may be read and written.

        Arrays are changed in place. Raises SimError with what the checks found.
        """
        bound = (_Buffer * max(len(buffers), 1))()
        present = 0
        for i, item in enumerate(buffers):
            array, access = item if isinstance(item, tuple) else (item, READ_WRITE)
            name = names[i] if i < len(names) else f"buffer{i}"
            if array is None:
                bound[i] = _Buffer(None, 0, 0, name.encode())
                continue
            assert isinstance(array, np.ndarray) and array.flags.c_contiguous
            bound[i] = _Buffer(array.ctypes.data, array.nbytes, access, name.encode())
            present |= 1 << i
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        grid = grid + (1,) * (3 - len(grid))
        values = (ctypes.c_uint32 * max(len(constants), 1))(*constants)
        data = bytes(args)
        kept = ctypes.create_string_buffer(data, max(len(data), 1))
        launch = _Launch(
            *[function.encode(), label.encode(), values, len(constants), (ctypes.c_uint32 * 3)(*grid), threads],
            *[bound, len(buffers), ctypes.cast(kept, ctypes.c_void_p) if data else None, len(data), present],
        )
        error = ctypes.create_string_buffer(2048)
        if self._library.lily_sim_launch(self._context, ctypes.byref(launch), error, len(error)):
            raise SimError(error.value.decode())

    def counters(self) -> Counters:
        """Of the last launch; needs counting."""
        c = self._library.lily_sim_counters(self._context).contents
        rows = [c.traffic[i] for i in range(c.n_traffic)]
        traffic = [Traffic(t.name.decode(), *[getattr(t, n) for n, _ in _Traffic._fields_[1:]]) for t in rows]
        return Counters(c.threadgroups, c.barriers, c.threadgroup_bytes, traffic)
