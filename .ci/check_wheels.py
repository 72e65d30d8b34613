"""Checks that a folder holds the source distribution and the wheels of every platform and Python, all of one version, the tag's.

python .ci/check_wheels.py DIR [TAG]        # TAG: "v" and the version
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PYTHONS = ("cp310-cp310", "cp311-cp311", "cp312-abi3")  # the last one serves every later Python too
PLATFORMS = {"Linux x86-64": r"manylinux.*_x86_64", "Linux arm64": r"manylinux.*_aarch64", "macOS arm64": r"macosx_.*_arm64"}


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
    return found


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    if wrong := problems(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else None):
        raise SystemExit("\n".join(wrong))
