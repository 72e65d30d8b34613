"""On a Mac with Xcode: compiles every kernel source as the Metal device would hand it to the system, and says which are refused.

python .ci/compile_metal.py        exit status 1 when one is
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from lily._engine import native


def main() -> int:
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for float32 in (False, True):
            for name, text, _functions, tensor in native().testing.metal_sources(float32):
                source = Path(folder) / Path(name).name
                source.write_text(text)
                standard = "metal4.0" if tensor else "metal3.1"
                command = [
                    "xcrun",
                    "-sdk",
                    "macosx",
                    "metal",
                    f"-std={standard}",
                    "-fno-fast-math",
                    "-c",
                    str(source),
                    "-o",
                    str(source) + ".air",
                ]
                done = subprocess.run(command, capture_output=True, text=True)
                storage = "float32" if float32 else "bfloat16"
                print(f"{name} ({storage}, {standard}): {'ok' if done.returncode == 0 else 'REFUSED'}")
                if done.returncode != 0:
                    print(done.stderr, file=sys.stderr)
                    refused += not tensor  # the hosted Xcode may be older than Metal 4, as a user's system may be
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
