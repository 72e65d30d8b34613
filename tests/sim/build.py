"""Compiles every Metal kernel and the simulator's runtime into one shared library. Only what changed is compiled again."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = [
    "fiber",
    "runtime",
    "sandbox",
    "checker",
    "traffic",
    "hooks",
    "abi",
    "lines",
    "constants",
    "matrix",
    "bf16",
    "standin",
    "standin_gpu",
]
STORAGES = {"bfloat16": [], "float32": ["-DLILY_STORAGE_FLOAT32"]}


class NoCompiler(RuntimeError):
    """No clang was found."""


class BuildError(RuntimeError):
    """A source was refused by the compiler; its message is the text."""


def compiler() -> list[str]:
    """The command of a clang for C++: LILY_CLANG, clang++-19 or later, clang++, or the one in the package ziglang."""
    if named := os.environ.get("LILY_CLANG"):
        return named.split()
    for name in ["clang++-19", "clang++-20", "clang++-21", "clang++-22", "clang++", "clang++-18"]:
        if found := shutil.which(name):
            return [found]
    try:
        import ziglang  # noqa: F401
    except ImportError:
        raise NoCompiler("the simulator needs clang: clang++-19 or clang++ on PATH, or the package ziglang") from None
    return [sys.executable, "-m", "ziglang", "c++"]


def default_folder() -> Path:
    """Where objects are kept between builds."""
    return Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / f"lily-sim-{os.getuid()}"


def common_flags() -> list[str]:
    flags = [
        "-std=c++20",
        "-fPIC",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
    ]
    if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
        # Not more than this: other bfloat16 instructions round denormal numbers differently.
        has = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split())
        if {"avx2", "fma", "f16c"} <= has:
            flags += ["-mavx2", "-mfma", "-mf16c"]
    return flags


def kernel_flags() -> list[str]:
    # The thread sanitizer's calls are what the checker hears; its own runtime is never linked. Neighbouring accesses stay apart, so that an
    # access is what the source says.
    options = ["tsan-instrument-func-entry-exit=0", "tsan-instrument-read-before-write=1", "disable-vector-combine"]
    return [
        *[
            "-O1",
            "-gdwarf-4",
            "-gline-tables-only",
            "-fsanitize=thread",
            "-fno-optimize-sibling-calls",
            "-fno-vectorize",
            "-fno-slp-vectorize",
        ],
        *[
            "-Xclang",
            "-ffloat16-excess-precision=none",
            "-Xclang",
            "-fbfloat16-excess-precision=none",
            "-Wno-unused-function",
            "-Wno-unused-const-variable",
        ],
        *["-Wno-unused-parameter", "-Wno-unused-variable", "-Wno-unknown-attributes", "-Wno-psabi", "-Wno-unknown-pragmas"],
        *[word for option in options for word in ("-mllvm", "-" + option)],
        *["-I", str(HERE / "shim")],
    ]


def _digest(*parts: bytes | str) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode() if isinstance(part, str) else part)
        h.update(b"\0")
    return h.hexdigest()[:24]


def _compile(command: list[str], source: Path, target: Path) -> None:
    made = target.with_suffix(f".{os.getpid()}.tmp.o")
    result = subprocess.run([*command, "-c", str(source), "-o", str(made)], capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{source.name}:\n{result.stderr}")
    if result.stderr.strip():
        print(result.stderr, file=sys.stderr)
    made.replace(target)


def build(
    folder: Path | None = None,
    kernels: list[Path] | None = None,
    root: Path | None = None,
    jobs: int | None = None,
    storages: tuple[str, ...] = ("bfloat16", "float32"),
) -> Path:
    """Builds the library and returns its path.

    folder: objects and libraries, kept between builds. kernels: Metal sources, all of the installed lily by default; root: the folder their
    headers are looked up in. Raises NoCompiler, BuildError, and msl.KernelSourceError for a source that breaks the rules.
    """
    from lily import msl

    folder = folder or default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    clang = compiler()
    version = subprocess.run([*clang, "--version"], capture_output=True, text=True).stdout
    common = common_flags()
    shim = [p.read_bytes() for p in sorted((HERE / "shim").rglob("*")) if p.is_file()]
    csrc = HERE.parents[1] / "csrc"
    shared = [csrc / "device/shader/sim_abi.h", csrc / "device/metal/messages.hpp", csrc / "device/metal/messages.inc"]
    headers = [p.read_bytes() for p in [*sorted(HERE.glob("*.hpp")), *shared]]

    work: list[tuple[list[str], Path, Path]] = []
    objects: list[Path] = []

    def add(name: str, source: Path, text: bytes, flags: list[str], extra: list[bytes]) -> None:
        key = _digest(version, " ".join(flags), text, *extra)
        target = folder / f"{name}-{key}.o"
        objects.append(target)
        if not target.exists():
            work.append(([*clang, *flags], source, target))

    for name in RUNTIME:
        source = HERE / f"{name}.cpp"
        add(name, source, source.read_bytes(), [*common, "-O2", "-I", str(csrc)], headers + (shim if name == "matrix" else []))
    for path in kernels if kernels is not None else msl.kernel_files():
        text = msl.rewrite(path, "sim", **({"root": root} if root else {})).encode()
        source = folder / f"{path.stem}-{_digest(text)}.cpp"
        if not source.exists():
            source.write_bytes(text)
        for storage in storages:
            flags = [*common, *kernel_flags(), *STORAGES[storage]]
            add(f"{path.stem}-{storage}", source, text, flags, [*shim, (HERE / "runtime.hpp").read_bytes()])

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        for future in [pool.submit(_compile, *item) for item in work]:
            future.result()
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    library = folder / f"lily-sim-{_digest(*[o.name for o in objects])}{suffix}"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}.tmp")
        link = ["-shared", "-o", str(made), *[str(o) for o in objects]]
        if sys.platform != "darwin":
            link += ["-Wl,-Bsymbolic", "-pthread"]
        result = subprocess.run([*clang, *link], capture_output=True, text=True)
        if result.returncode != 0:
            raise BuildError(f"linking:\n{result.stderr}")
        made.replace(library)
    return library
