"""What wheels promise by their names is what is inside; a machine that cannot load the extension is told what it is and what it lacks."""

from __future__ import annotations

import importlib.util
import platform
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lily
from lily import _engine

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("check_wheels", ROOT / ".ci" / "check_wheels.py")
check_wheels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_wheels)

VERSION = check_wheels.declared_version()
LINUX, ARM, MAC = "manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_14_0_arm64"
OLDER_LINUX = "manylinux_2_27_x86_64.manylinux_2_28_x86_64"


def elf(machine=62, glibc=("2.14", "2.28")):
    return b"\x7fELF" + bytes(14) + struct.pack("<H", machine) + b"".join(b"\0GLIBC_" + version.encode() for version in glibc) + b"\0"


def mach_o(target=(14, 0), *, cpu=0x0100000C, command=0x32, system=1):
    packed = target[0] << 16 | target[1] << 8
    body = struct.pack("<IIIIII", command, 24, *((system, packed) if command == 0x32 else (packed, 0)), 0, 0)
    other = struct.pack("<IIII", 0x19, 16, 0, 0)
    return struct.pack("<IIIIIIII", 0xFEEDFACF, cpu, 0, 6, 2, len(other + body), 0, 0) + other + body


def write_wheel(folder, python="cp312-abi3", system=LINUX, *, binary=None, version=VERSION, tags=None, more=None):
    path = folder / f"lily_inference-{VERSION}-{python}-{system}.whl"
    if binary is None:
        binary = mach_o() if system.startswith("macosx") else elf(183 if "aarch64" in system else 62)
    tags = [f"{python}-{part}" for part in system.split(".")] if tags is None else tags
    info = f"lily_inference-{VERSION}.dist-info"
    files = {"lily/_native.abi3.so": binary, f"{info}/METADATA": f"Metadata-Version: 2.2\nName: lily-inference\nVersion: {version}\n",
             f"{info}/WHEEL": "Wheel-Version: 1.0\n" + "".join(f"Tag: {tag}\n" for tag in tags)} | (more or {})  # fmt: skip
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def complete(tmp_path):
    for python in check_wheels.PYTHONS:
        for system in (OLDER_LINUX, ARM, MAC):
            write_wheel(tmp_path, python, system)
    (tmp_path / f"lily_inference-{VERSION}.tar.gz").touch()
    return tmp_path


def test_a_complete_release_passes_under_its_tag_only(complete):
    assert check_wheels.problems(complete, f"v{VERSION}") == check_wheels.problems(complete, None) == []
    assert check_wheels.problems(complete, "v9.9.9") == [f"the tag is v9.9.9, pyproject.toml says {VERSION}"]


@pytest.mark.parametrize("change", ["missing", "newer system", "unknown file"])
def test_a_release_with_other_files_is_refused(complete, change):
    wheel = complete / f"lily_inference-{VERSION}-cp312-abi3-{MAC}.whl"
    if change == "unknown file":
        (complete / "notes.txt").touch()
        assert check_wheels.problems(complete, None) == ["notes.txt does not belong here"]
        return
    wheel.unlink()
    if change == "newer system":
        wheel = write_wheel(complete, system="macosx_15_0_arm64")
        assert f"{wheel.name} does not belong here" in check_wheels.problems(complete, None)
    assert "cp312-abi3 on macOS arm64: expected one file, found []" in check_wheels.problems(complete, None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"system": MAC}, []),
        ({"system": MAC, "binary": mach_o((13, 3))}, []),
        ({"system": MAC, "binary": mach_o((14, 0), command=0x24)}, []),
        ({"system": MAC, "binary": mach_o((14, 1))}, ["lily/_native.abi3.so: was built for macOS 14.1"]),
        ({"system": MAC, "binary": mach_o((26, 2))}, ["lily/_native.abi3.so: was built for macOS 26.2"]),
        ({"system": MAC, "binary": mach_o((15, 0), command=0x24)}, ["lily/_native.abi3.so: was built for macOS 15.0"]),
        ({"system": MAC, "binary": mach_o(system=2)}, ["lily/_native.abi3.so: does not say which macOS it was built for"]),
        ({"system": MAC, "binary": mach_o(cpu=0x01000007)}, ["lily/_native.abi3.so: is no 64-bit Mach-O file for arm64"]),
        (
            {"system": MAC, "more": {"lily/.dylibs/libc++.1.dylib": mach_o((15, 0))}},
            ["lily/.dylibs/libc++.1.dylib: was built for macOS 15.0"],
        ),
        ({"system": MAC, "more": {"lily/kernels.metallib": b"MTLB"}}, ["lily/kernels.metallib: a compiled shader library"]),
        ({"binary": elf(glibc=["2.17", "2.34", "2.4"])}, ["lily/_native.abi3.so: needs glibc 2.34"]),
        ({"binary": elf(183)}, ["lily/_native.abi3.so: is for aarch64 machines"]),
        ({"binary": mach_o()}, ["lily/_native.abi3.so: is no ELF file"]),
        ({"version": "0.0.9"}, [f"holds version 0.0.9, expected {VERSION}"]),
        ({"tags": ["py3-none-any"]}, ["says ['py3-none-any'] of itself"]),
    ],
)
def test_what_is_inside_must_be_what_the_name_promises(tmp_path, options, expected):
    assert check_wheels.inside(write_wheel(tmp_path, **options), VERSION) == expected


def test_the_extension_built_here_is_read_as_what_it_is():
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("reads the extension as an ELF file of Linux")
    data = Path(_engine.native().__file__).read_bytes()
    tag = f"manylinux_2_28_{platform.machine()}"
    assert not [text for text in check_wheels.binary_problems(data, tag) if "glibc" not in text]
    other = LINUX if platform.machine() == "aarch64" else ARM
    assert f"is for {platform.machine()} machines" in check_wheels.binary_problems(data, other)


def test_the_configuration_builds_for_what_the_check_expects():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'MACOSX_DEPLOYMENT_TARGET = "{".".join(map(str, check_wheels.MACOS))}"' in text
    assert text.count('-image = "manylinux_{}_{}"'.format(*check_wheels.GLIBC)) == 2
    built = re.search(r"^build = \[(.*?)\]", text, re.M)[1]
    built_or_tested = {name.split("-")[0] for name in check_wheels.PYTHONS} | {"cp314"}
    assert {f"{name}-*" for name in built_or_tested} == set(re.findall(r'"(.*?)"', built))
    assert "glibc {}.{} ".format(*check_wheels.GLIBC) in _engine._NEEDED and f"macOS {check_wheels.MACOS[0]} " in _engine._NEEDED


# A machine that cannot load the extension


def test_a_missing_library_is_told_with_system_chip_and_what_is_needed(monkeypatch):
    monkeypatch.setattr(_engine, "_native", None)
    monkeypatch.setattr(_engine, "_reason", ImportError("Library not loaded: built for macOS 26.0 which is newer than running OS"))
    with pytest.raises(lily.DeviceError) as caught:
        lily.Model.demo()
    text = str(caught.value)
    assert "built for macOS 26.0" in text and "macOS 14 or later on Apple silicon" in text and "glibc 2.28" in text
    assert f"Python {platform.python_version()}" in text and platform.machine() in text


def test_on_a_mac_the_version_of_the_system_and_the_chip_are_named(monkeypatch):
    monkeypatch.setattr(_engine.sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("13.6.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, 0, stdout="Apple M1 Pro\n"))
    assert _engine.machine().endswith("on macOS 13.6.1, arm64 (Apple M1 Pro)")

    def absent(*args, **options):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    assert _engine.machine().endswith("on macOS 13.6.1, arm64 (unknown chip)")


def test_importing_and_planning_without_the_extension(tmp_path):
    """`import lily` works anywhere, so that the error comes from the first call, with its reason."""
    code = """
import importlib, sys
real = importlib.import_module
def fake(name, package=None):
    if name == "lily._native":
        raise ImportError("dlopen: library not supported on this system")
    return real(name, package)
importlib.import_module = fake
import lily
print(lily.__version__)
for call in (lily.devices, lily.Model.demo, lambda: lily.plan(lily.config_path)):
    try:
        call()
    except lily.DeviceError as error:
        print("library not supported" in str(error) and "need Linux" in str(error))
"""
    code = code.replace("lily.config_path", repr(str(ROOT / "tests/data/fixtures/a_moe_q4g64/config.json")))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout.splitlines()[1:] == ["True"] * 3, found.stderr
    command = code.split("import lily\n")[0] + "from lily.cli import main\nmain(['devices'])"
    shell = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert (
        (shell.returncode, shell.stdout) == (1, "")
        and shell.stderr.startswith("Error: the native extension")
        and shell.stderr.count("\n") == 1
    )
