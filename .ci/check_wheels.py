"""Checks that a folder holds the source distribution and the wheels of every platform and Python, all of one version, the tag's,
and that what is inside each wheel was built for what its name promises.

python .ci/check_wheels.py DIR [TAG]        # TAG: "v" and the version
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from pathlib import Path

PYTHONS = ("cp310-cp310", "cp311-cp311", "cp312-abi3")  # the last one serves every later Python too
GLIBC, MACOS = (2, 28), (14, 0)  # lily/_engine.py names them when the extension does not load
PLATFORMS = {
    "Linux x86-64": r"(?:manylinux_2_\d+_x86_64\.)*manylinux_2_28_x86_64",
    "Linux arm64": r"(?:manylinux_2_\d+_aarch64\.)*manylinux_2_28_aarch64",
    "macOS arm64": r"macosx_14_0_arm64",
}
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
MACH_O_64, ARM64 = 0xFEEDFACF, 0x0100000C
VERSION_MIN_MACOSX, BUILD_VERSION = 0x24, 0x32  # load commands; the second one's first field is the platform, 1 for macOS


def declared_version() -> str:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    return re.search(r'^version = "(.+)"$', text, re.M)[1]


def problems(directory: Path, tag: str | None) -> list[str]:
    version = declared_version()
    found = []
    if tag and tag != f"v{version}":
        found.append(f"the tag is {tag}, pyproject.toml says {version}")
    names = sorted(path.name for path in directory.iterdir())
    expected = {"source distribution": rf"lily_inference-{re.escape(version)}\.tar\.gz"}
    for python in PYTHONS:
        for platform, pattern in PLATFORMS.items():
            expected[f"{python} on {platform}"] = rf"lily_inference-{re.escape(version)}-{python}-{pattern}\.whl"
    for what, pattern in expected.items():
        matching = [name for name in names if re.fullmatch(pattern, name)]
        if len(matching) != 1:
            found.append(f"{what}: expected one file, found {matching}")
    found += [f"{name} does not belong here" for name in names if not any(re.fullmatch(pattern, name) for pattern in expected.values())]
    for name in names:
        if name.endswith(".whl"):
            found += [f"{name}: {text}" for text in inside(directory / name, version)]
    return found


def inside(wheel: Path, version: str) -> list[str]:
    """What in a wheel contradicts its name: version, tags, and the machine and system that each binary was built for."""
    found = []
    _, _, python, abi, platform = wheel.name.removesuffix(".whl").split("-")
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.rsplit("/", 1)[1]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name and name.endswith(("METADATA", "WHEEL"))
        }
        built = re.search(r"^Version: (.+)$", texts["METADATA"], re.M)[1]
        if built != version:
            found.append(f"holds version {built}, expected {version}")
        tags = sorted(re.findall(r"^Tag: (.+)$", texts["WHEEL"], re.M))
        if tags != sorted(f"{python}-{abi}-{part}" for part in platform.split(".")):
            found.append(f"says {tags} of itself")
        binaries = [name for name in archive.namelist() if re.search(r"\.(so|dylib)(\.\d+)*$", name)]
        if not any(name.startswith("lily/_native.") for name in binaries):
            found.append("holds no extension")
        for name in binaries:
            found += [f"{name}: {text}" for text in binary_problems(archive.read(name), platform)]
        # Metal kernels travel as source and are compiled where they run, so no shader library has a target of its own.
        found += [f"{name}: a compiled shader library" for name in archive.namelist() if name.endswith(".metallib")]
    return found


def binary_problems(data: bytes, platform: str) -> list[str]:
    if platform.startswith("macosx"):
        return mach_o_problems(data)
    if data[:4] != b"\x7fELF":
        return ["is no ELF file"]
    machine = ELF_MACHINES.get(struct.unpack_from("<H", data, 18)[0], "another")
    found = [] if platform.endswith(machine) else [f"is for {machine} machines"]
    versions = {(int(major), int(minor)) for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", data)}
    if versions and max(versions) > GLIBC:
        found.append("needs glibc {}.{}".format(*max(versions)))
    return found


def mach_o_problems(data: bytes) -> list[str]:
    magic, cpu = struct.unpack_from("<II", data)
    if magic != MACH_O_64 or cpu != ARM64:
        return ["is no 64-bit Mach-O file for arm64"]
    count, at, targets = struct.unpack_from("<I", data, 16)[0], 32, []
    for _ in range(count):
        command, size, first, second = struct.unpack_from("<IIII", data, at)
        if command == BUILD_VERSION and first == 1:
            targets.append(second)
        elif command == VERSION_MIN_MACOSX:
            targets.append(first)
        at += size
    if not targets:
        return ["does not say which macOS it was built for"]
    major, minor = max(targets) >> 16, max(targets) >> 8 & 255
    return [] if (major, minor) <= MACOS else [f"was built for macOS {major}.{minor}"]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    if wrong := problems(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else None):
        raise SystemExit("\n".join(wrong))
