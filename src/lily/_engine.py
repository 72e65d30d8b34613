"""The one place that imports the native extension."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lily import errors

_native: Any = None
_reason: ImportError | None = None
try:
    _native = import_module("lily._native")
except ImportError as error:
    _reason = error
else:
    _native.set_exceptions({name: getattr(errors, name) for name in errors.__all__})


def native() -> Any:
    """The extension module, or a `DeviceError` that says why it did not load and where."""
    if _native is None:
        import platform

        raise errors.DeviceError(
            f"the native extension of lily could not be loaded: {_reason}. This is Python {platform.python_version()} "
            f"on {platform.platform()} ({platform.machine()}); reinstall with `pip install --force-reinstall "
            "lily-inference`, or from source with a C++ compiler present"
        ) from _reason
    return _native
