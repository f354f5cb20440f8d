"""Draw the gallery: each example's picture goes to bench/results, and its seconds to the terminal.

python -m bench.gallery                  # all of them
python -m bench.gallery density ridge    # some
python -m bench.gallery --folder FOLDER  # to another folder
"""

import argparse
import importlib
import time
from pathlib import Path

from bench import style
from bench.rows import RESULTS

EXAMPLES = (
    *("regression", "density", "ridge", "colours", "mean_shift", "hopfield", "chunks", "documents", "functions"),
)
OF_TORCH = ("tiny_gpt", "forces", "curvature", "consistency")  # which need PyTorch


def main():
    """Run the command."""
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXAMPLES + OF_TORCH)}")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name in arguments.names or EXAMPLES + OF_TORCH:
        start = time.perf_counter()
        figure = importlib.import_module(f"bench.gallery.{name}").figure()
        path = arguments.folder / f"gallery-{name}.png"
        style.save(figure, path)
        with Image.open(path) as drawn:
            few = drawn.convert("RGB").quantize(256)
        few.save(path, optimize=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
