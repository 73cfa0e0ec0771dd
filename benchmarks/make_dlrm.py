"""Make a recommendation model with random weights, to serve or to measure: 13 numbers and 26 lists of ids → a probability.

python benchmarks/make_dlrm.py model.dlrm.npz                                  # 26 tables of 10,000 × 16; 17 MB
python benchmarks/make_dlrm.py model.dlrm.npz --table-rows 100000 --width 64 --bottom 512 256 --top 512 256
hurtle serve model.dlrm.npz --batch-size 1600
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hurtle.serving.backends.dlrm_model import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="what to write; its name should end with dlrm.npz")
    parser.add_argument("--table-rows", type=int, default=10_000, help="ids of each feature (%(default)s)")
    parser.add_argument("--width", type=int, default=16, help="numbers of an embedding (%(default)s)")
    parser.add_argument("--bottom", type=int, nargs="*", default=[64, 32], help="hidden layers behind the 13 numbers")
    parser.add_argument("--top", type=int, nargs="*", default=[64, 32], help="hidden layers behind the products")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (%(default)s)")
    options = parser.parse_args()
    if options.file.suffix != ".npz":
        parser.error(f"the file must end with .npz, got {options.file.name}")
    make_model(options.file, options.table_rows, options.width, options.bottom, options.top, options.seed)
    print(f"{options.file}: {options.file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
