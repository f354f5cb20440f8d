"""The CUDA text: the same values as NumPy's, by the system's C++ compiler; and it compiles for the GPUs."""

import ctypes
import itertools
import random
import re
import shutil
import subprocess

import numpy as np
import pytest

from cuattn.cuda import source as files
from cuattn.tracing.bound import ANY_LENGTH, Bound, facts, joined
from cuattn.tracing.cuda import source
from cuattn.tracing.cuda_tiles import tile_source
from cuattn.tracing.derivatives import derivative, weights
from cuattn.tracing.functions import SCORE, trace
from cuattn.tracing.tiles import tile_states
from cuattn.tracing.values import evaluate
from tests.tolerances import assert_close
from tests.tracing import expressions as ex

# What the text takes from CUDA and from the headers around it, for a compiler of the host.
_HOST = """
#include <cmath>
using namespace std;
#define __device__
#define __forceinline__ inline
template <class A, class B> constexpr bool same_type = false;
template <class A> constexpr bool same_type<A, A> = true;
template <class T> T infinity() { return static_cast<T>(INFINITY); }
template <class T> T __ldg(const T* at) { return *at; }
constexpr double kLog2e = 1.4426950408889634;
namespace ptx { inline float ex2(float x) { return exp2f(x); } inline float rcp(float x) { return 1 / x; }
inline float max_nan(float x, float y) { return x != x || y != y ? x + y : x > y ? x : y; }
inline float min_nan(float x, float y) { return x != x || y != y ? x + y : x < y ? x : y; } }
inline int __double2int_rz(double x) { return x != x ? 0 : int(min(max(x, -2147483648.0), 2147483647.0)); }
inline int __float2int_rz(float x) { return __double2int_rz(x); }
template <class T> T product_of(T a, T b) { return a * b; }
template <class T> T fma_of(T a, T b, T c) { return fma(a, b, c); }
inline float to_acc(float x) { return x; }
inline double to_acc(double x) { return x; }
"""
_CASE = """
namespace case{number} {{
{text}
}}
extern "C" void run{number}(case{number}::traced::Arguments* args, const {acc}* s, {acc}* value, {acc}* slope) {{
    using namespace case{number}::traced;
    for (int b = 0, n = 0; b < {B}; ++b) for (int h = 0; h < {H}; ++h) {{
        const Head at_head = head(*args, b, h);
        for (int i = 0; i < {I}; ++i) {{
            const Row at_row = row(*args, at_head, b, h, i);
            for (int j = 0; j < {J}; ++j, ++n) {{
                const Key at_key = key(*args, at_head, b, h, j);
                score(*args, at_head, at_row, at_key, s[n], b, h, i, j, value[n], slope[n]);
            }}
        }}
    }}
}}
"""


def cases():
    """Return texts, precisions and limits; integers take other roads without limits."""
    generator = random.Random(5)
    texts = [ex.number(generator, 4) for _ in range(24)]
    texts += [f"({ex.integer(generator, 3)}) * 0.5 + np.where({ex.condition(generator, 2)}, s, -s)" for _ in range(24)]
    texts += [
        "(i * 2000000000 * 3 % 7) + s",
        "(1 << (i * 5)) * 0.5 + (-i >> j) + (i // (j - 3)) + i % (j - 4) + s",
        "s // 0.3 + s % -0.7",
    ]
    return list(
        zip(texts, itertools.cycle([np.float32, np.float64]), itertools.cycle([ex.LIMITS, ex.LIMITS, ANY_LENGTH]))
    )


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def built(folder, parts):
    """Compile texts that follow the headers into a library of the host."""
    headers = [
        re.sub("#.*", "", (files.kernel_root() / f"attn/{name}.cuh").read_text()) for name in ("traced", "bounds")
    ]
    (folder / "host.cpp").write_text("\n".join([_HOST, *headers, *parts]))
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-o", "host.so", "host.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[:3000]
    return ctypes.CDLL(str(folder / "host.so"))


def placed(template, number, made, **names):
    """Put a text into a namespace of its own."""
    text = re.sub("#include.*", "", made.text)
    text = text.replace("namespace traced {", "namespace traced { using namespace ::traced;", 1)
    return template.format(**dict(zip("BHIJ", ex.LIMITS, strict=True), number=number, text=text, **names))


def call(function, *arrays):
    return function(*(ctypes.c_void_p(x.ctypes.data) for x in arrays))


@needs_compiler
def test_the_text_computes_what_numpy_computes(tmp_path):
    made, parts = [], []
    for number, (text, dtype, limits) in enumerate(cases()):
        bound = ex.traced(text)
        found = source({"score": [bound.root, derivative(bound.root)]}, facts(bound, limits), dtype)
        parts.append(placed(_CASE, number, found, acc="float" if dtype == np.float32 else "double"))
        made.append((text, bound, dtype, found))
    library = built(tmp_path, parts)
    for number, (text, bound, dtype, found) in enumerate(made):
        variables = ex.grid(dtype)
        value, slope = np.empty_like(variables["s"]), np.empty_like(variables["s"])
        arguments = found.pack(bound, [x.ctypes.data for x in bound.arrays])
        call(getattr(library, f"run{number}"), arguments, variables["s"], value, slope)
        for result, root in ((value, bound.root), (slope, derivative(bound.root))):
            exact = np.broadcast_to(evaluate(bound.of(root), variables, np.float64), ex.LIMITS)
            numpy = np.broadcast_to(evaluate(bound.of(root), variables, dtype), ex.LIMITS)
            largest = max(1.0, float(np.abs(exact[np.isfinite(exact)]).max(initial=0)))
            assert_close(result, exact, numpy, magnitude=16 * largest, name=text)


_JOINED = """
namespace case{number} {{
{text}
}}
extern "C" void run{number}(case{number}::traced::Arguments* args, const float* s, float* value, bool* shown,
                            float* weight, long long* place) {{
    using namespace case{number}::traced;
    for (int b = 0, n = 0; b < {B}; ++b) for (int h = 0; h < {H}; ++h)
    for (int i = 0; i < {I}; ++i) for (int j = 0; j < {J}; ++j, ++n) {{
        const Head at_head = head(*args, b, h);
        const Row at_row = row(*args, at_head, b, h, i);
        const Key at_key = key(*args, at_head, b, h, j);
        score(*args, at_head, at_row, at_key, s[n], b, h, i, j, value[n]);
        visible(*args, at_head, at_row, at_key, s[n], b, h, i, j, shown[n]);
        weights(*args, at_head, at_row, at_key, s[n], b, h, i, j, weight[n]);
        offsets(*args, at_head, at_row, at_key, s[n], b, h, i, j, place[n]);
    }}
}}
"""


@needs_compiler
def test_score_mask_weights_and_offsets_share_a_text(tmp_path):
    table, windows = ex.ARRAYS["table"].T, np.array([3, 9, 20])  # a view: strides are no offsets
    args = table, 0.5
    score = trace(lambda s, b, h, i, j, t, x: x * s * t[i - j, h], SCORE, args).bind(args)
    mask = trace(lambda b, h, i, j: np.abs(i - j) * 1.5 < windows[h], ex.MASK).bind()
    parts = (score.root, facts(score, ex.LIMITS)), (mask.root, facts(mask, ex.LIMITS))
    (seen, visible), both = joined(*parts)
    (weight,) = weights(seen, 0)
    functions = {"score": seen, "visible": visible, "weights": weight.weight, "offsets": weight.offset}
    found = source({name: [root] for name, root in functions.items()}, both)
    call_of = Bound(seen, score.arrays + mask.arrays, score.numbers + mask.numbers)
    library, variables = built(tmp_path, [placed(_JOINED, 0, found)]), ex.grid()
    results = [np.empty(ex.LIMITS, dtype) for dtype in (np.float32, bool, np.float32, np.int64)]
    call(library.run0, found.pack(call_of, [x.ctypes.data for x in call_of.arrays]), variables["s"], *results)
    for result, root in zip(results, functions.values(), strict=True):
        for limits in (ANY_LENGTH, ex.LIMITS):
            wanted = evaluate(call_of.of(root), variables, limits=limits)
            np.testing.assert_array_equal(result, np.broadcast_to(wanted, ex.LIMITS))
    _, h, i, j = np.ogrid[tuple(map(slice, ex.LIMITS))]
    np.testing.assert_array_equal(results[3], np.broadcast_to((i - j) % len(table) * 3 + h, ex.LIMITS))


_TILES = """
#ifndef GROW
#define GROW
void grow(traced::bounds::Interval& x, double value, bool first) {{
    x = first ? traced::bounds::point(value) : traced::bounds::joined(x, traced::bounds::point(value));
}}
#endif
namespace case{number} {{
{text}
}}
extern "C" void run{number}(case{number}::traced::Arguments* args, signed char* states) {{
    using namespace case{number}::traced;
    for (int b = 0; b < {B}; ++b) for (int h = 0; h < {H}; ++h)
    for (int i0 = 0; i0 < {I}; i0 += 5) for (int j0 = 0; j0 < {J}; j0 += 4) {{
        bounds::Interval rows[row_count + 1], keys[key_count + 1];
        double values[row_count + key_count + 1];
        for (int i = i0; i < min(i0 + 5, {I}); ++i) {{
            row_values(*args, b, h, i, values);
            for (int k = 0; k < row_count; ++k) grow(rows[k], values[k], i == i0);
        }}
        for (int j = j0; j < min(j0 + 4, {J}); ++j) {{
            key_values(*args, b, h, j, values);
            for (int k = 0; k < key_count; ++k) grow(keys[k], values[k], j == j0);
        }}
        const bounds::Truth found = visible_in(*args, b, h, rows, keys);
        *states++ = found.lo + found.hi;
    }}
}}
"""


@needs_compiler
def test_tiles_are_bounded_as_by_numpy(tmp_path):
    """The states of tiles are sound, and seldom open where NumPy's rules close them."""
    generator, made, parts = random.Random(6), [], []
    for number in range(60):
        bound = ex.traced(ex.condition(generator, 3, numbers=True), ex.MASK)
        found = tile_source(bound.root, facts(bound, ex.LIMITS))
        parts.append(placed(_TILES, number, found))
        made.append((bound, found))
    library = built(tmp_path, parts)
    rows, keys = (
        (np.arange(0, n, size), np.minimum(np.arange(0, n, size) + size, n) - 1)
        for n, size in ((ex.N_QUERIES, 5), (ex.N_KEYS, 4))
    )
    still_open = [0, 0]
    for number, (bound, found) in enumerate(made):
        dense = np.broadcast_to(evaluate(bound, ex.grid()), ex.LIMITS)
        states = np.empty((ex.N_BATCH, ex.N_HEADS, len(rows[0]), len(keys[0])), np.int8)
        call(getattr(library, f"run{number}"), found.pack(bound, [x.ctypes.data for x in bound.arrays]), states)
        for (b, h, r, c), state in np.ndenumerate(states):
            tile = dense[b, h, rows[0][r] : rows[1][r] + 1, keys[0][c] : keys[1][c] + 1]
            assert tile.all() if state == 2 else state == 1 or not tile.any(), found.text
        still_open[0] += (states == 1).sum()
        still_open[1] += sum((tile_states(bound, rows, keys, b, h) == 1).sum() for b in range(2) for h in range(3))
    assert still_open[0] <= 1.2 * still_open[1]


def _probe(text):
    return files.flatten_text(
        text + 'extern "C" __global__ void probe(traced::Arguments args, const float* x, float* y) {\n'
        "const auto head = traced::head(args, 0, blockIdx.x);\n"
        "const auto row = traced::row(args, head, 0, blockIdx.x, threadIdx.x);\n"
        "const auto key = traced::key(args, head, 0, blockIdx.x, threadIdx.y);\n"
        "traced::acc value, slope;\n"
        "traced::score(args, head, row, key, x[threadIdx.x], 0, blockIdx.x, threadIdx.x, threadIdx.y, value, slope);\n"
        "y[threadIdx.x] = value + slope; }\n",
        "probe.cu",
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_text_compiles(arch, dtype):
    pytest.importorskip("cupy")
    import ml_dtypes

    from tests.cuda.nvrtc import resources

    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    table, slopes, doc = np.zeros((4, 99), element), np.zeros(4, element), np.zeros((2, 50), np.int16)
    flags, big = np.zeros(50, bool), np.zeros(7, np.uint32)

    def score(s, b, h, i, j, scale, shift):
        part = np.where(flags[i] | (doc[b, i] == doc[b, j]), 30.0 * np.tanh(s / 30.0), s % 0.3 // 0.1)
        return (
            part * scale
            + slopes[h] * np.abs(i - j)
            + table[h, i - j + shift]
            + np.logaddexp(s, big[j % 7] // (i - 3)) ** 1.5
        )

    bound = trace(score, SCORE, (1.5, 3)).bind((1.5, 3))
    for limits in (ANY_LENGTH, (2, 4, 50, 50)):
        acc = np.float64 if dtype == "float64" else np.float32
        found = source(
            {"score": [bound.root, derivative(bound.root)]}, facts(bound, limits), acc, short=element.itemsize == 2
        )
        used = resources(_probe(found.text), arch)["probe"]
        assert not used.spill_stores


def test_nothing_of_the_user_is_in_the_text():
    table = np.zeros((4, 9))

    def secret(s, bébé, h, row_42, j, evil='"; #include </etc/passwd>'):
        quote = 1234.5
        return s * quote + table[h, row_42 - j]

    bound = trace(secret).bind()
    text = source({"score": [bound.root]}, facts(bound)).text
    for word in ("secret", "bébé", "row_42", "quote", "evil", "table", "passwd", "1234"):
        assert word not in text
    with pytest.raises(ValueError, match="name of a function"):
        source({"score(); //": [bound.root]}, facts(bound))


def test_equal_graphs_give_equal_texts():
    """Other numbers, lengths and arrays need no other kernel; indices that are proved to fit need no clamp."""

    def made(cap, table, n):
        bound = trace(lambda s, b, h, i, j: cap * np.tanh(s / cap) + table[h, i - j + 64]).bind()
        return source({"score": [bound.root]}, facts(bound, (1, 4, n, n))).text

    first = made(30.0, np.zeros((4, 129)), 65)
    assert first == made(50.0, np.ones((4, 257)), 33)
    assert "clamped" not in first and "wrapped(" not in first and "long long" not in first
    assert "clamped" in made(30.0, np.zeros((4, 100)), 65)
    wide = np.lib.stride_tricks.as_strided(np.zeros((4, 257)), (4, 2**31 - 1), (0, 0))
    assert "length" not in made(30.0, np.broadcast_to(np.zeros(1), (4, 2**20)), 65) and wide.shape[1] == 2**31 - 1


def test_captured_integers_are_narrow():
    """What the tracer keeps nobody can change: its integers are of int32, and as indices need no clamp; others do."""
    starts, table = np.array([0, 5, 60]), np.zeros(64)

    def score(s, b, h, i, j, first):
        return s + table[i - first[h]]

    limits = (1, 3, 4, 4)
    for function, args, is_known in (
        (score, (starts,), False),
        (lambda s, b, h, i, j: score(s, b, h, i, j, starts), (), True),
    ):
        bound = trace(function, SCORE, args).bind(args)
        text = source({"score": [bound.root]}, facts(bound, limits)).text
        assert ("clamped" not in text) == ("long long" not in text) == is_known


def test_what_is_read_once_is_told():
    """Loads move to where they are needed least often; tiles of several heads ask whether rows depend on the head."""
    doc, slopes = np.zeros((2, 9), int), np.zeros(3)
    bound = trace(lambda s, b, h, i, j: np.where(doc[b, i] == doc[b, j], s + slopes[h] * (i - j), 0)).bind()
    text = source({"score": [bound.root]}, facts(bound)).text
    element = text[text.index("void score") :]
    assert "fetched" not in element and all(f"{stage}.value" in element for stage in ("head", "row", "key"))
    assert "head_of_row = true" in text and "head_of_key = true" in text
