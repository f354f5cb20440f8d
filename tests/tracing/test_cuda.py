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
from cuattn.tracing.bound import ANY_LENGTH, facts
from cuattn.tracing.cuda import source
from cuattn.tracing.derivatives import derivative
from cuattn.tracing.functions import SCORE, trace
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
namespace ptx { inline float ex2(float x) { return exp2f(x); } inline float rcp(float x) { return 1 / x; } }
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_text_computes_what_numpy_computes(tmp_path):
    made, parts = [], [_HOST, re.sub("#.*", "", (files.kernel_root() / "attn/traced.cuh").read_text())]
    for number, (text, dtype, limits) in enumerate(cases()):
        bound = ex.traced(text)
        found = source({"score": [bound.root, derivative(bound.root)]}, facts(bound, limits), dtype)
        body = found.text.replace('#include "attn/traced.cuh"\n', "").replace(
            "namespace traced {", "namespace traced { using namespace ::traced;", 1
        )
        names = dict(
            zip("BHIJ", ex.LIMITS, strict=True),
            number=number,
            text=body,
            acc="float" if dtype == np.float32 else "double",
        )
        parts.append(_CASE.format(**names))
        made.append((text, bound, dtype, found))
    (tmp_path / "host.cpp").write_text("\n".join(parts))
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-o", "host.so", "host.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[:3000]
    library = ctypes.CDLL(str(tmp_path / "host.so"))
    for number, (text, bound, dtype, found) in enumerate(made):
        variables = ex.grid(dtype)
        value, slope = np.empty_like(variables["s"]), np.empty_like(variables["s"])
        arguments = found.pack(bound, [x.ctypes.data for x in bound.arrays])
        getattr(library, f"run{number}")(
            *(ctypes.c_void_p(x.ctypes.data) for x in (arguments, variables["s"], value, slope))
        )
        for result, root in ((value, bound.root), (slope, derivative(bound.root))):
            exact = np.broadcast_to(evaluate(bound.of(root), variables, np.float64), ex.LIMITS)
            numpy = np.broadcast_to(evaluate(bound.of(root), variables, dtype), ex.LIMITS)
            largest = max(1.0, float(np.abs(exact[np.isfinite(exact)]).max(initial=0)))
            assert_close(result, exact, numpy, magnitude=16 * largest, name=text)


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
    assert "head_of_row = true" in text and "score_reads_s = true" in text and "row_is_empty = false" in text
