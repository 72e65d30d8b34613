"""Where the Metal kernels are."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
#: The repository's in an editable install, else the one inside of the package.
CANDIDATES = (_PACKAGE.parents[1] / "metal", _PACKAGE / "metal")


def kernel_folder() -> Path | None:
    """The folder `metal` with the kernel sources; None when the installation lacks them."""
    return next((folder for folder in CANDIDATES if (folder / "include/args.h").is_file()), None)
