"""Run each feature of the kernels once on a tiny problem, hostile masks included, for compute-sanitizer.

    python -m bench.sanitize                                       # fills the disk cache of compiled kernels
    compute-sanitizer --tool memcheck python -m bench.sanitize
    compute-sanitizer --tool racecheck python -m bench.sanitize

One list for both families (``--kernel sm90`` or ``sm80`` runs one of them), every dtype, both directions, heads in
groups whose values are wider than their keys, few queries over many keys, merging; biases, functions of scores and of
what is visible, and matrices of it, in one dtype each; derivatives along tangents.  ``--part 1 16`` takes every 16th
problem from number 1 on, so that several processes share the work; ``--canary`` shows whether the tool is watching.
racecheck is slow: name the kernel that it is to watch, ``--kernel-name kns=attention_backward`` (``attention_forward``,
``backward_rows``, ``backward_score``, ``attention_jvp``, ``backward_jvp``), and give it few problems at a time.
"""

import argparse
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cuattn
from bench import harness
from bench.cases import Case
from bench.harness import Calls
from bench.score_samples import Formula
from cuattn import dispatch
from cuattn.errors import UnsupportedError
from cuattn.masks import BlockMask, BooleanMask, ColumnMask

BOUND = 2**31 - 1
BFLOAT16 = ml_dtypes.bfloat16
DTYPES = {"sm90": (BFLOAT16, np.float16), "sm80": (BFLOAT16, np.float16, np.float32, np.float64)}
NUMBERS = 10  # that arrays of numbers hold


def feature(d=64, dv=0, batch=1, heads=2, kv_heads=0, n_queries=200, n_keys=300, **options):
    """Return a problem's shape and its options.

    Of these `bias` names axes, as `bench.score_samples.Formula` does; `mask` one that `made` makes, `score` one of
    `SCORES`.
    """
    return Case("sanitize", "forward", batch, heads, kv_heads or heads, n_queries, n_keys, d, dv), options


FEATURES = (  # in every dtype
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
    feature(d=128, kv_heads=1, n_queries=70, n_keys=150, mask="seen", bias="11ij", softcap=4.0),
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
)
WIDE = (  # likewise, of the portable kernels
    feature(d=300, heads=1, n_queries=40, n_keys=70),
    feature(d=512, heads=1, n_queries=40, n_keys=70, mask="blocks"),
)

SCORES = {  # of arrays that are differentiated, by what an element is for, and of numbers
    "keys": Formula(
        lambda s, b, h, i, j, slope, bias: s + slope[h] * (j - i) + bias[b, j], arrays={"slope": "h", "bias": "bj"}
    ),
    "lines": Formula(
        lambda s, b, h, i, j, row, distance: s + row[h, i] + distance[h, i - j], arrays={"row": "hi", "distance": "hr"}
    ),
    "elements": Formula(
        lambda s, b, h, i, j, few, all, number: s + few[number[i, j], h] + all[h, i, j],
        arrays={"few": "gh", "all": "hij"},
        given={"number": "ij"},
    ),
    "anywhere": Formula(
        lambda s, b, h, i, j, table, number: s + table[h, i % 9 + 40 * number[i, j]],
        arrays={"table": "hr"},
        given={"number": "ij"},
    ),
    "distances": Formula(lambda s, b, h, i, j, distance: s + distance[h, i - j], arrays={"distance": "hr"}),
    "temperature": Formula(lambda s, b, h, i, j, slope: s * np.exp(slope[h]), arrays={"slope": "h"}),
    "halved": Formula(lambda s, b, h, i, j: s * (0.5 + h)),
    "sloped": Formula(
        lambda s, b, h, i, j, row, slope: s * np.exp(row[h, i]) + slope[h] * j, arrays={"row": "hi", "slope": "h"}
    ),
}
SMALL = dict(n_queries=140, n_keys=176)
IN_ONE_DTYPE = (
    # Biases: whose gradient is stored as it is, added up, summed by key, made by a pass.
    feature(batch=2, **SMALL, bias="bhij"),
    feature(d=128, kv_heads=1, **SMALL, bias="bhij", deterministic=True, is_causal="top_left"),
    feature(d=128, batch=2, **SMALL, bias="1hij"),
    feature(d=32, batch=2, **SMALL, bias="1hij", dropout_p=0.1, mask="hostile"),
    feature(batch=2, **SMALL, bias="1hij", softcap=3.0, deterministic=True),
    feature(d=192, dv=128, **SMALL, bias="11ij", deterministic=True, window=(40, 30, "top_left")),
    feature(d=128, batch=2, **SMALL, bias="b11j", deterministic=True, mask="hostile"),
    feature(d=256, kv_heads=1, **SMALL, bias="1h1j", is_causal="top_left"),
    feature(**SMALL, bias="bhi1", softcap=4.0, mask="blocks"),
    feature(d=96, dv=40, batch=2, n_queries=140, n_keys=171, bias="1hij", mask="seen"),
    feature(d=128, **SMALL, softcap=4.0, is_causal="top_left", deterministic=True),
    # Several blocks for a key tile: of the heads that share it, of slices of few heads' rows.
    feature(d=128, heads=8, kv_heads=1, **SMALL, is_causal="top_left"),
    feature(d=256, dv=72, heads=8, kv_heads=1, **SMALL, deterministic=True),
    feature(heads=1, n_queries=1400, n_keys=300, mask="hostile"),
    # Functions of the scores, and the gradients of their arrays.
    feature(batch=2, **SMALL, score="keys"),
    feature(d=128, **SMALL, score="keys", deterministic=True, mask="hostile"),
    feature(d=128, kv_heads=1, **SMALL, score="keys", bias="b11j", dropout_p=0.1),
    feature(d=128, batch=2, **SMALL, score="lines", deterministic=True, window=(40, 30, "top_left")),
    feature(d=256, kv_heads=1, **SMALL, score="lines", mask="seen"),
    feature(**SMALL, score="elements", mask="hostile"),
    feature(d=128, batch=2, **SMALL, score="elements", deterministic=True, is_causal="top_left"),
    feature(heads=4, kv_heads=2, **SMALL, score="anywhere"),
    feature(**SMALL, score="distances", deterministic=True, mask="seen"),
    feature(d=128, batch=2, **SMALL, score="temperature", is_causal="top_left"),
    feature(**SMALL, score="halved"),
    feature(d=128, **SMALL, score="sloped", dropout_p=0.1),
    feature(kv_heads=1, **SMALL, score="sloped", softcap=4.0, mask="seen"),
    feature(d=128, heads=8, kv_heads=2, n_queries=1, n_keys=3000, score="sloped"),  # heads as rows of one tile
    # What is visible: matrices and functions, alone and beside others.
    feature(d=128, kv_heads=1, n_queries=140, n_keys=300, mask="seen", deterministic=True),
    feature(d=128, **SMALL, mask="seen and hostile", dropout_p=0.1, is_causal="top_left"),
    feature(batch=2, n_queries=300, n_keys=270, mask="function", score="keys"),
    feature(d=256, kv_heads=1, **SMALL, mask="function", window=(90, 30, "top_left")),
)
TANGENTS = (  # in every dtype: jvp, the gradients with their tangents, a double backward
    feature(d=80, n_queries=150, n_keys=170, is_causal="bottom_right", softcap=4.0),
    feature(d=128, heads=4, kv_heads=2, n_queries=150, n_keys=170, mask="hostile", dropout_p=0.1),
    feature(dv=40, batch=2, n_queries=70, n_keys=150, bias="1h1j", mask="seen", window=(30, 20, "top_left")),
    feature(kv_heads=1, n_queries=70, n_keys=150, bias="bhij", mask="blocks"),
    feature(d=40, n_queries=70, n_keys=150, score="sloped"),
    feature(batch=2, n_queries=70, n_keys=150, score="lines", mask="hostile", dropout_p=0.1),
    feature(d=128, heads=8, kv_heads=2, n_queries=1, n_keys=1000, score="temperature"),
    feature(n_queries=330, n_keys=300, is_causal="bottom_right"),
    feature(dv=40, batch=2, n_queries=150, n_keys=170, mask="seen", window=(30, 20, "top_left")),
    feature(kv_heads=1, n_queries=150, n_keys=170, mask="blocks", deterministic=True),
    feature(d=128, n_queries=150, n_keys=1100, mask="seen"),  # Hopper's first rows in parts, or first keys
    feature(n_queries=1100, n_keys=150, mask="hostile"),
)


class Problem(NamedTuple):
    """One problem of one family."""

    kernel: str
    dtype: Any
    case: Case
    options: dict[str, Any]
    operations: tuple[str, ...]

    def calls(self, xp):
        """Return its calls, of arrays of one library."""
        rng, options = np.random.default_rng(1), {**self.options}

        def array(shape, dtype=self.dtype):
            return xp.asarray(rng.standard_normal(shape).astype(dtype))

        q, k, v, do = map(array, self.case.shapes)
        if self.dtype is np.float64:
            options.pop("out_dtype", None)  # nothing is wider
        if "mask" in options:
            options["mask"] = made(options["mask"], rng, self.case, xp)
        if "bias" in options:
            options["bias"] = array(Formula(arrays={"bias": options["bias"]}).shapes(self.case)["bias"])
        if "dropout_p" in options:
            options["rng"] = 3
        if "score" in options:
            formula = SCORES[options["score"]]
            learned = [array(shape, np.float32) for shape in formula.shapes(self.case).values()]
            numbers = Formula(arrays=formula.given).shapes(self.case).values()
            given = [xp.asarray(rng.integers(0, NUMBERS, shape, np.int32)) for shape in numbers]
            options |= {"score": formula.score, "score_args": (*learned, *given)}
        return Calls(q, k, v, do, **options)

    def run(self):
        """Compute the operations, one after the other, and wait for the device; say what the family took."""
        cupy = harness.namespace("cuda")
        calls, done = self.calls(cupy), []
        calls.options["kernel"] = self.kernel
        try:
            for operation in self.operations:
                getattr(calls, operation)()
                harness.synchronize(cupy)
                done.append(operation)
            if "forward" in done:
                joined(calls)
                harness.synchronize(cupy)
            if "jvp" in done:
                cuattn.merge(calls.along, calls.along)
                harness.synchronize(cupy)
        except UnsupportedError as error:
            return f"{' and '.join(done) or 'nothing'}; {error}"
        return " and ".join(done)


def joined(calls):
    """Merge and add up two forwards as ranks do their parts: in place, and where rows begin anywhere; return one."""
    one, other = calls.forward(), calls.forward()
    dispatch.merge_into(*one[:3], *one[:3], *other[:3])
    inner = ..., slice(1, None), slice(1, None)
    dispatch.add(one.o[inner], one.o[inner], other.o[inner])
    dispatch.add(other.o, one.o)
    return other


def made(kind, rng, case, xp):
    """Return a mask: vectors that lie anywhere (on a device they are clamped, never trusted), blocks, ..."""
    n_queries, n_keys = case.n_queries, case.n_keys
    if "hostile" in kind:
        least, most = (0, n_queries) if xp is np else (-BOUND, BOUND)
        vectors = rng.integers(least, most, (4, n_keys), dtype=np.int32)
        hostile = ColumnMask(*map(xp.asarray, vectors), n_queries=n_queries)
        return BooleanMask(made("seen", rng, case, xp)) & hostile if kind != "hostile" else hostile
    if kind == "blocks":
        return BlockMask(rng.random((-(-n_queries // 32), -(-n_keys // 40))) < 0.5, 32, 40)
    if kind == "function":
        group = rng.integers(0, 4, max(n_queries, n_keys))
        return lambda b, h, i, j: (group[i] == group[j]) | ((i - j) % (b + h + 2) == 0)
    return xp.asarray(rng.random((1, 1, n_queries, n_keys)) < 0.6)


def problems(kernels=("sm90", "sm80")):
    """Return every feature on some families, and what they compute of it; in the second 16-bit dtype a part."""
    found = []
    for kernel in kernels:
        dtypes, portable = DTYPES[kernel], kernel == "sm80"
        both, along = ("forward", "backward"), ("jvp", "backward_jvp", "double_backward")
        for dtype in dtypes:
            some = FEATURES[: len(FEATURES) // 4] if dtype is np.float16 else FEATURES + WIDE * portable
            found += [Problem(kernel, dtype, *of, both) for of in some]
        for n, (case, options) in enumerate(IN_ONE_DTYPE):
            sloped = options.get("score") == "sloped" and "dropout_p" in options  # Hopper's backward takes not both
            found.append(Problem(kernel, dtypes[n % len(dtypes)], case, options, both[: 1 + (portable or not sloped)]))
        for case, options in TANGENTS:  # Hopper's gradients along tangents are beside neither a bias nor a function
            operations = along if portable or not {"bias", "score"} & {*options} else along[:1]
            found += [Problem(kernel, dtype, case, options, operations) for dtype in dtypes]
    return found


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
        said = problem.kernel, np.dtype(problem.dtype), *problem.case.shapes[:3], problem.options
        print(*said, problem.run(), flush=True)


if __name__ == "__main__":
    main()
