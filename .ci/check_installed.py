"""Checks what an installation holds: the shipped model with its card and notice, the types, the extension, and nothing of the tests.

python .ci/check_installed.py        # in the environment that lily-inference was installed into, from a wheel
"""

from __future__ import annotations

from importlib import metadata

DEMO = "lily/data/demo/"
NEEDED = (
    DEMO + "README.md", DEMO + "model.safetensors", DEMO + "config.json", DEMO + "tokenizer.json",
    "lily/__init__.py", "lily/py.typed", "lily/_native.pyi", "lily/metal/include/args.h",
)  # fmt: skip
BELONGS = ("lily/", "lily_inference-", "../../../bin/lily")
MAX_BYTES = 60_000_000


def problems() -> list[str]:
    distribution = metadata.distribution("lily-inference")
    files = {str(file): file for file in distribution.files or [] if not str(file).endswith(".pyc")}
    found = [f"{name} is missing" for name in NEEDED if name not in files]
    found += [f"{name} does not belong here" for name in files if not name.startswith(BELONGS) or "test_" in name]
    if not any(name.startswith("lily/_native.") and name.endswith(".so") for name in files):
        found.append("the extension is missing")
    card = DEMO + "README.md"
    if card in files and "WordNet 3.0 Copyright 2006 by Princeton University" not in files[card].read_text():
        found.append(f"{card} has no WordNet notice")
    licences = {name.split("/licenses/", 1)[1] for name in files if ".dist-info/licenses/" in name}
    if "LICENSE" not in licences or not any(name.endswith("README.md") for name in licences):
        found.append(f"the licence files are {sorted(licences)}, expected LICENSE and the demo model's card")
    size = sum(file.size or 0 for file in files.values())
    if size > MAX_BYTES:
        found.append(f"{size} bytes, expected at most {MAX_BYTES}")
    print(f"lily-inference {distribution.version}: {len(files)} files, {size / 1e6:.1f} MB")
    return found


if __name__ == "__main__":
    if found := problems():
        raise SystemExit("\n".join(found))
