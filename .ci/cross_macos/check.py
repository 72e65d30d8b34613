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
FLAT_LOOKUP = -2  # BIND_SPECIAL_DYLIB_FLAT_LOOKUP
EXPORTS = {"_PyInit__native"}
LINKERS_OWN = {"__mh_dylib_header", "___dso_handle"}
NEW_AND_DELETE = ("__Znwm", "__Znam", "__ZdlPv", "__ZdaPv")  # of zig's libc++, which is linked statically; a Mac's is a library
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


def read(path: Path) -> tuple[dict[str, str], list[str], tuple[int, int]]:
    """What the file takes from elsewhere (symbol -> library, PYTHON: looked up in the whole process), what it exports, and its oldest macOS."""
    import lief

    lief.logging.disable()
    binary = lief.MachO.parse(str(path)).at(0)
    taken = {}
    for symbol in binary.imported_symbols:
        binding = symbol.binding_info if symbol.has_binding_info else None
        if binding and binding.has_library:
            taken[symbol.name] = binding.library.name
        else:
            flat = binding and binding.library_ordinal == FLAT_LOOKUP
            taken[symbol.name] = PYTHON if flat else f"library ordinal {binding.library_ordinal if binding else symbol.library_ordinal}"
    return taken, [symbol.name for symbol in binary.exported_symbols], tuple(binary.build_version.minos[:2])


def problems(taken: dict[str, str], exported: list[str], oldest: tuple[int, int], homes: dict[str, set[str]]) -> list[str]:
    found = []
    for symbol, library in sorted(taken.items()):
        if library not in homes:
            found.append(f"{symbol} is taken from {library}, which is no known home")
        elif symbol not in homes[library]:
            found.append(
                f"{symbol} has no known home: {'no library' if library == PYTHON else library} that the extension is linked with has it"
            )
    missing = EXPORTS - set(exported)
    found += [f"{symbol} is not exported" for symbol in sorted(missing)]
    found += [f"{symbol} is exported" for symbol in sorted(set(exported) - EXPORTS - LINKERS_OWN) if not symbol.startswith(NEW_AND_DELETE)]
    if oldest > MACOS:
        found.append("it needs macOS {}.{}".format(*oldest))
    return found


def main(path: str) -> None:
    taken, exported, oldest = read(Path(path))
    if wrong := problems(taken, exported, oldest, known_homes()):
        raise SystemExit("\n".join(wrong))
    counts = {library: list(taken.values()).count(library) for library in sorted(set(taken.values()))}
    print(f"{len(taken)} symbols from elsewhere, each with a known home: " + ", ".join(f"{n} of {name}" for name, n in counts.items()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
