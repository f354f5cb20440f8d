"""Run each feature of the kernels once on a tiny problem, hostile masks included, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m bench.sanitize

One list for both families (``--kernel sm90`` or ``sm80`` runs one of them), every dtype, both directions, heads in
groups whose values are wider than their keys, few queries over many keys, merging.  ``--part 1 4`` takes every fourth
problem from number 1 on, so that several processes share the work; a run without the sanitizer before it fills the disk
cache of compiled kernels; ``--canary`` shows whether the tool is watching.  racecheck is slow: name the kernel that it
is to watch, ``--kernel-name kns=attention_backward`` (``attention_forward``, ``backward_rows``), and give it one
problem at a time.
"""

import argparse
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bench import harness
from bench.harness import Calls
from cuattn.errors import UnsupportedError
from cuattn.masks import BlockMask, ColumnMask

BOUND = 2**31 - 1
BFLOAT16 = ml_dtypes.bfloat16
DTYPES = {"sm90": (BFLOAT16, np.float16), "sm80": (BFLOAT16, np.float16, np.float32, np.float64)}


def feature(d=64, dv=0, heads=2, kv_heads=0, n_queries=200, n_keys=300, **options):
    """Return (heads, key heads, queries, keys, widths) and options, of which "hostile", "blocks", "seen" are masks."""
    return (heads, kv_heads or heads, n_queries, n_keys, d, dv or d), options


FEATURES = (
    feature(),
    feature(n_queries=330, is_causal="bottom_right"),  # rows before the first and past the last query
    feature(d=128, kv_heads=1, n_keys=333, is_causal="top_left"),
    feature(d=256, is_causal="bottom_right"),
    feature(d=192, dv=128, window=(40, 30, "bottom_right")),
    feature(d=128, dv=256, heads=4, kv_heads=1, window=(40, 30, "bottom_right")),
    feature(dv=128, heads=4, kv_heads=2, n_queries=130, n_keys=170, mask="hostile"),
    feature(d=96, dv=40, heads=4, kv_heads=2, n_queries=130, n_keys=170, dropout_p=0.1, deterministic=True),
    feature(d=128, mask="hostile"),
    feature(n_queries=300, mask="hostile"),
    feature(d=256, mask="hostile"),
    feature(d=128, kv_heads=1, mask="blocks", dropout_p=0.1),
    feature(dropout_p=0.1),
    feature(d=128, kv_heads=1, n_queries=70, n_keys=150, mask="seen", bias=True, softcap=4.0),
    feature(softcap=3.0, out_dtype=np.float32),
    feature(d=40, kv_heads=1, n_queries=70, n_keys=150, window=(30, 20, "bottom_right"), dropout_p=0.2),
    feature(d=128, heads=150, n_keys=160),  # more row tiles than multiprocessors
    feature(d=128, heads=1, n_queries=130, n_keys=200, deterministic=True),
    feature(n_queries=300, deterministic=True, is_causal="top_left"),
    feature(d=128, heads=1, deterministic=True, mask="hostile"),
    feature(heads=1, deterministic=True, mask="blocks", window=(90, 30, "top_left")),
    feature(d=128, heads=8, kv_heads=2, n_queries=1, n_keys=3000),  # parts that the last block merges
    feature(n_queries=20, n_keys=1500),  # parts that another kernel merges
    feature(d=128, n_queries=1, n_keys=3000, mask="hostile"),
    feature(d=300, heads=1, n_queries=40, n_keys=70),
    feature(d=512, heads=1, n_queries=40, n_keys=70, mask="blocks"),
)


class Problem(NamedTuple):
    """One problem of one family."""

    kernel: str
    dtype: Any
    shape: tuple[int, ...]
    options: dict[str, Any]

    def run(self):
        """Compute forward and backward and wait for the device; say what the family took."""
        cupy = harness.namespace("cuda")
        heads, kv_heads, n_queries, n_keys, d, dv = self.shape
        rng = np.random.default_rng(1)

        def array(*shape):
            return cupy.asarray(rng.standard_normal((1, *shape)).astype(self.dtype))

        q, k, v = array(heads, n_queries, d), array(kv_heads, n_keys, d), array(kv_heads, n_keys, dv)
        options = {**self.options, "kernel": self.kernel}
        if self.dtype is np.float64:
            options.pop("out_dtype", None)  # nothing is wider
        if "mask" in options:
            options["mask"] = made(options["mask"], rng, n_queries, n_keys)
        if "bias" in options:
            options["bias"] = array(1, n_queries, n_keys)
        if "dropout_p" in options:
            options["rng"] = 3
        calls = Calls(q, k, v, array(heads, n_queries, dv), **options)
        done = []
        try:
            for direction in ("forward", "backward"):
                getattr(calls, direction)()
                harness.synchronize(cupy)
                done.append(direction)
        except UnsupportedError as error:
            return f"{' and '.join(done) or 'nothing'}; {error}"
        return "forward and backward"


def made(kind, rng, n_queries, n_keys):
    """Return a mask: device vectors that lie anywhere (they are clamped, never trusted), blocks, or a matrix."""
    import cupy

    if kind == "hostile":
        vectors = rng.integers(-BOUND, BOUND, (4, n_keys), dtype=np.int32)
        return ColumnMask(*map(cupy.asarray, vectors), n_queries=n_queries)
    if kind == "blocks":
        return BlockMask(rng.random((-(-n_queries // 32), -(-n_keys // 40))) < 0.5, 32, 40)
    return cupy.asarray(rng.random((1, 1, n_queries, n_keys)) < 0.6)


def problems(kernels=("sm90", "sm80")):
    """Return every feature on some families; in the second 16-bit dtype the first half of the list."""
    return [
        Problem(kernel, dtype, shape, options)
        for kernel in kernels
        for dtype in DTYPES[kernel]
        for shape, options in FEATURES[: len(FEATURES) // 2 if dtype is np.float16 else None]
    ]


def main():
    """Run the problems, naming each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every N-th problem from I on"
    )
    parser.add_argument("--kernel", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--canary", action="store_true", help="write past the end of an array: is the tool watching?")
    arguments = parser.parse_args()
    cupy = harness.namespace("cuda")
    cupy.cuda.set_allocator(None)  # memory of its own for each array, since a pool hides what lies beyond its end
    if arguments.canary:
        kernel = cupy.RawKernel('extern "C" __global__ void canary(float* x) { x[threadIdx.x + 1] = 1; }', "canary")
        kernel((1,), (128,), (cupy.zeros(128, np.float32),))
        harness.synchronize(cupy)
    part, parts = arguments.part
    for problem in problems(arguments.kernel)[part::parts]:
        print(problem.kernel, np.dtype(problem.dtype), *problem.shape, *problem.options, problem.run(), flush=True)


if __name__ == "__main__":
    main()
