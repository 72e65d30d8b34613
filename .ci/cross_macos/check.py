"""Checks an extension that was linked for arm64 macOS without Apple's SDK: every symbol it takes from elsewhere has a known home.

python .ci/cross_macos/check.py EXTENSION        # needs the packages ziglang, lief, nanobind and pyyaml

Known homes: libSystem (zig's copy of Apple's list), libobjc (libobjc.tbd here, what the device may use of it), and Python itself
(nanobind's list, looked up when the module is loaded). A foreign symbol, library or export is reported by name.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
SYSTEM, OBJC = "/usr/lib/libSystem.B.dylib", "/usr/lib/libobjc.A.dylib"
PYTHON = "Python"  # no library of that name: the interpreter that loads the module
EXPORTS = {"_PyInit__native"}
MACOS = (14, 0)


def tbd_symbols(path: Path) -> set[str]:
    """Names that the libraries of a .tbd file export to arm64 programs."""
    import yaml

    class Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):
        pass

    Loader.add_constructor("!tapi-tbd", lambda loader, node: loader.construct_mapping(node, deep=True))
    found: set[str] = set()
    for document in yaml.load_all(path.read_text(), Loader):
        for entry in document.get("exports", []) + document.get("reexports", []):
            if any(target.startswith("arm64") and target.endswith("-macos") for target in entry["targets"]):
                for kind in ("symbols", "weak-symbols", "thread-local-symbols"):
                    found |= set(entry.get(kind, []))
                found |= {f"_OBJC_CLASS_$_{name}" for name in entry.get("objc-classes", [])}
    return found


def known_homes() -> dict[str, set[str]]:
    """library -> symbols that may be taken from it."""
    import nanobind
    import ziglang

    system = Path(ziglang.__file__).parent / "lib/libc/darwin/libSystem.tbd"
    python = Path(nanobind.cmake_dir()) / "darwin-ld-cpython.sym"
    return {
        SYSTEM: tbd_symbols(system),
        OBJC: tbd_symbols(HERE / "libobjc.tbd"),
        PYTHON: {line.split()[1] for line in python.read_text().splitlines() if line.startswith("-U ")},
    }


def imports(path: Path) -> tuple[list[tuple[str, str]], object]:
    """(symbol, library) of all that the file takes from elsewhere; PYTHON where it is looked up in the whole process."""
    import lief

    binary = lief.MachO.parse(str(path)).at(0)
    libraries = [library.name for library in binary.libraries if library.command != lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    found = []
    for symbol in binary.imported_symbols:
        ordinal = symbol.library_ordinal
        home = libraries[ordinal - 1] if 1 <= ordinal <= len(libraries) else PYTHON if ordinal == FLAT_LOOKUP else f"ordinal {ordinal}"
        found.append((symbol.name, home))
    return found, binary
