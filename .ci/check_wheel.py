"""Checks what is in a wheel: the shipped model with its card and notice, the types, the extension, and nothing of the tests.

python .ci/check_wheel.py WHEEL
"""

from __future__ import annotations

import sys
import zipfile

DEMO = "lily/data/demo/"
NEEDED = (
    DEMO + "README.md", DEMO + "model.safetensors", DEMO + "config.json", DEMO + "tokenizer.json",
    "lily/__init__.py", "lily/py.typed", "lily/_native.pyi",
)  # fmt: skip
TOP_LEVEL = ("lily", "lily_inference-")
MAX_BYTES = 40_000_000


def problems(path: str) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        found = [f"{name} is missing" for name in NEEDED if name not in names]
        found += [f"{name} does not belong here" for name in names if not name.startswith(TOP_LEVEL) or "test_" in name]
        if not any(name.startswith("lily/_native.") and name.endswith(".so") for name in names):
            found.append("the extension is missing")
        if (
            DEMO + "README.md" in names
            and "WordNet 3.0 Copyright 2006 by Princeton University" not in wheel.read(DEMO + "README.md").decode()
        ):
            found.append(f"{DEMO}README.md has no WordNet notice")
        licences = {name.split("/licenses/", 1)[1] for name in names if ".dist-info/licenses/" in name}
        if "LICENSE" not in licences or not any(name.endswith("README.md") for name in licences):
            found.append(f"the licence files are {sorted(licences)}, expected LICENSE and the demo model's card")
        size = sum(entry.compress_size for entry in wheel.infolist())
        if size > MAX_BYTES:
            found.append(f"{size} bytes, expected at most {MAX_BYTES}")
    print(f"{path.rsplit('/', 1)[-1]}: {len(names)} files, {size / 1e6:.1f} MB")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    if found := problems(sys.argv[1]):
        raise SystemExit("\n".join(found))
