"""Writes a checkpoint with the exact widths of a released model, few layers and random weights: for measuring speed, never quality.

python examples/make_slice.py /tmp/slice            # Qwen3.6-35B-A3B, 4 layers, vocabulary 32768, about 2 GB
python examples/make_slice.py /tmp/tiny --layers 4 --experts 16 --vocab 2048
python examples/make_slice.py /tmp/dense --size 27b
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lily.bench.synthetic import DEFAULT, SIZES, config, write

__all__ = ["SIZES", "config", "write"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", choices=SIZES, default=DEFAULT)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256, help="of each layer, when the model has any")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.path, options.layers, options.experts, options.vocab, options.seed, options.size)
    size = (options.path / "model.safetensors").stat().st_size
    experts = options.experts if SIZES[options.size].experts else 0
    print(f"{options.path}: {size / 1e9:.2f} GB, {options.size}, {options.layers} layers, {experts} experts, vocabulary {options.vocab}")


if __name__ == "__main__":
    main()
