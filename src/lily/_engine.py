"""The one place that imports the native extension."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from lily import errors
from lily.kernel_folder import kernel_folder

# The tags of the wheels; .ci/check_wheels.py compares them with what is inside.
_NEEDED = "Linux on x86-64 or arm64 with glibc 2.28 or later, or macOS 14 or later on Apple silicon, and Python 3.10 or later"

_native: Any = None
_reason: ImportError | None = None
try:
    _native = import_module("lily._native")
except ImportError as error:
    _reason = error
else:
    _native.set_exceptions({name: getattr(errors, name) for name in errors.__all__})
    if _kernels := kernel_folder():
        _native.set_kernel_root(str(_kernels))


def native() -> Any:
    """The extension module, or a `DeviceError` that says why it did not load and where."""
    if _native is None:
        raise errors.DeviceError(
            f"the native extension of lily could not be loaded: {_reason}. This is {_machine()}; Lily's wheels need {_NEEDED}. "
            "On such a machine reinstall with `pip install --force-reinstall lily-inference`, elsewhere from source with a C++ compiler"
        ) from _reason
    return _native


def _machine() -> str:
    """Python, operating system and chip, each with its version where it has one."""
    import platform
    import subprocess
    from pathlib import Path

    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]}"
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            chip = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            chip = ""
    else:
        system = f"{platform.system()} {platform.release()} with {' '.join(platform.libc_ver()).strip() or 'an unknown C library'}"
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        chip = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"Python {platform.python_version()} on {system}, {platform.machine()} ({chip or 'unknown chip'})"
