"""What the tests on a GPU share: the arrays of a case, calls of a kernel with them, and the oracle's verdict."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import cuattn
from cuattn.masks import ColumnMask
from tests import oracle
from tests.cuda.cases import CASES, WIDE, WIDE_HEADS, Case, case_of, oracle_options, same_bits, to_device, visible
from tests.tolerances import assert_close


class Problem(NamedTuple):
    """A case and its arrays, NumPy's or a device's; the methods' options go before the case's own."""

    case: Case
    do: Any
    qkv: list[Any]
    options: dict[str, Any]

    def arrays(self):
        """Return do, q, k, v on the GPU."""
        return [to_device(x) for x in (self.do, *self.qkv)]

    def forward(self, kernel="sm80", **more):
        """Return o, l, m of ``cuattn.forward``, by default on the portable kernel, as NumPy arrays."""
        options = {name: to_device(value) for name, value in {**self.options, **more}.items()}
        return [x.get() for x in cuattn.forward(*self.arrays()[1:], kernel=kernel, **options)[:3]]

    def backward(self, kernel="sm80", deterministic=False, o_dtype=None, **more):
        """Return the gradients of ``cuattn.backward``, by default on the portable kernels, as NumPy arrays."""
        options = {name: to_device(value) for name, value in {**self.options, **more}.items()}
        do, *qkv = self.arrays()
        forward = cuattn.forward(*qkv, kernel=kernel, out_dtype=o_dtype, **options)
        options.pop("rng", None)
        gradients = cuattn.backward(do, *qkv, forward, kernel=kernel, deterministic=deterministic, **options)
        return [None if x is None else x.get() for x in gradients]

    def check(self, actual, dtype=None, peaked=False):
        """Compare o, l, m, or the gradients, with the oracle; `dtype` is that of o where it is not the case's.

        dS is a difference, dP - D.  The plain textbook takes D from the very P and dP that it subtracts it from, so
        where a row sees one key, or as good as one, the two cancel exactly; D from o, which is all that O(N) memory
        leaves, is off by a rounding.  Where the inputs' own rounding does not hide that, or the order of sums, the rule
        has a floor.  `peaked`: most rows are like that, so it has one in 16 bits, and the textbook takes D from o.
        """
        case, spelled_out = self.case, oracle_options(self.case, self.options)
        names, arrays = (("o", "l", "m"), self.qkv)
        if len(actual) > 3:
            names, arrays = (("dq", "dk", "dv", "dbias"), (*self.qkv, self.do))
        peaked &= "dq" in names
        more = {"delta_from_o": peaked}
        exact, textbook = (oracle.solve(*arrays, **spelled_out, **more, dtype=low) for low in (None, case.dtype))
        floors = {}
        if case.dtype in WIDE or peaked or (case.n_keys == 1 and "dq" in names):
            floors = oracle.floors(exact, *arrays, **spelled_out)
        for name, a in zip(names, actual, strict=True):
            e, t = getattr(exact, name), getattr(textbook, name)
            if e is not None:
                low = a.dtype if name == "dbias" and not floors else dtype or case.dtype
                assert_close(a, e, t, dtype=low, floor=floors.get(name), name=name)

    def poisoned(self):
        """Return a copy with NaN in keys that no query sees and queries that see no key, and which those are.

        Heads must not be grouped, so that all arrays have the mask's leading axes.
        """
        case = self.case
        shape = (*case.batch, case.heads, case.n_queries, case.n_keys)
        seen = np.broadcast_to(visible(case, self.options), shape)
        dead, empty = ~seen.any(-2), ~seen.any(-1)
        do, q, k, v = (x.copy() for x in (self.do, *self.qkv))
        do[empty], q[empty], k[dead], v[dead] = [np.nan] * 4
        return self._replace(do=do, qkv=[q, k, v]), dead, empty

    def check_unseen_keys(self, kernel="sm80"):
        """Check that keys which no query sees may hold NaN in the forward."""
        poisoned, dead, _ = self.poisoned()
        assert dead.any()
        poisoned.qkv[0] = self.qkv[0]
        same_bits(poisoned.forward(kernel), self.forward(kernel))

    def check_unseen(self, kernel="sm80", deterministic=False):
        """Check that what nobody sees may hold NaN in the backward."""
        poisoned, dead, empty = self.poisoned()
        assert dead.any() or empty.any()
        dq, dk, dv, _ = actual = poisoned.backward(kernel, deterministic)
        assert not dq[empty].any() and not dk[dead].any() and not dv[dead].any()
        self.check(actual)

    def strided(self, layout):
        """Return the problem, of which "broadcast" repeats a part, and its twin with other strides on the GPU."""
        if layout not in BROADCAST:
            arrays = [_laid_out(x, layout) for x in (self.do, *self.qkv)]
            return self, self._replace(do=arrays[0], qkv=arrays[1:])
        import cupy

        parts = [x[BROADCAST[layout]] for x in self.qkv]
        twin = [cupy.broadcast_to(to_device(part), x.shape) for part, x in zip(parts, self.qkv, strict=True)]
        repeated = [np.broadcast_to(part, x.shape) for part, x in zip(parts, self.qkv, strict=True)]
        return self._replace(qkv=repeated), self._replace(qkv=twin)


BROADCAST = {"broadcast": np.s_[:1, :1], "broadcast batch": np.s_[:1]}


def _laid_out(x, layout):
    if layout == "negative":
        return to_device(np.ascontiguousarray(x[..., ::-1, :]))[..., ::-1, :]
    if layout in ("odd stride", "offset"):
        before, after = (0, 3) if layout == "odd stride" else (8, 24)
        wide = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(before, after)])
        return to_device(wide)[..., before : before + x.shape[-1]]
    axes = {"swapped": (-2, -3), "batch axes apart": (0, 1)}[layout]
    return to_device(np.ascontiguousarray(x.swapaxes(*axes))).swapaxes(*axes)


def made(case: Case) -> Problem:
    """Return the arrays of a case."""
    arrays, options = case.arrays()
    q, _, v = arrays.values()
    do = np.random.default_rng(11).standard_normal((*q.shape[:-1], v.shape[-1])).astype(case.dtype)
    return Problem(case, do, list(arrays.values()), options)


def named(name: str, cases: list[Case] = CASES + WIDE_HEADS) -> Problem:
    """Return the arrays of the case of that name."""
    return made(case_of(name, cases))


def hostile() -> tuple[Problem, ColumnMask]:
    """Return a problem whose mask was clamped on the host, and the device's vectors, far outside the queries."""
    problem = made(Case("hostile", batch=(), n_queries=300, n_keys=400))
    wild = np.random.default_rng(1).integers(-1000, 1400, (4, 400)).astype(np.int32)
    wild[:, :3] = [[-(2**31)] * 3, [2**31 - 1] * 3, [2**31 - 1] * 3, [-(2**31)] * 3]
    problem.options["mask"] = ColumnMask(*np.clip(wild, 0, 300), n_queries=300)
    return problem, ColumnMask(*map(to_device, wild), n_queries=300)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Leave NaNs where the calls of a test will find their results and scratch memory."""
    import cupy

    noise = [cupy.full(size, np.nan, np.float32) for size in (1 << 8, 1 << 14, 1 << 18, 1 << 20, 1 << 22)]
    del noise
    yield
