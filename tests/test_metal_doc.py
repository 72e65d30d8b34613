"""docs/metal-kernels.md says what the sources say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from lily._engine import native

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_is_made_from_the_sources():
    spec = importlib.util.spec_from_file_location("build_metal_kernels", DOCS / "build_metal_kernels.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.PAGE.read_text() == build.page(), "run: python docs/build_metal_kernels.py"
    assert "Not counted yet" not in build.PAGE.read_text()


def test_every_kernel_is_counted():
    """The report has a row for each, at the widths of the 35B model."""
    counted = re.findall(r"^\|[^|]+\| `(\w+)` \|", (DOCS / "metal-kernels.md").read_text(), re.M)
    missing = [kernel for kernel in native().testing.launch_kernels() if not any(f"{name}_".startswith(f"{kernel}_") for name in counted)]
    assert missing == []
