"""What derivatives along tangents are compared with: the textbook's, and how far roundings move them."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from cuattn.reference.derivatives import differentiate
from cuattn.reference.textbook import sum_to
from tests.tolerances import assert_close, eps, roundings

JVP = ("o", "l", "m", "to", "tlse")
GRADIENTS = ("dq", "dk", "dv", "dbias")
TANGENTS = tuple(f"t{name}" for name in GRADIENTS)


class Known:
    """The exact results, the textbook's, and what moving the operands by a rounding does to the exact ones.

    No algorithm in the sums' precision knows any number on the way to better than to a few roundings of it, nor scores
    to better than as if q and k were moved by some, as many as a sum over their columns has; and weights that are
    multiplied in 16 bits to a rounding of these.
    o and its tangent are known to the roundings of both sums over the keys, l and their own, as those of
    :func:`tests.oracle.floors`; through o so are the gradients.
    Capped scores of 16-bit inputs may be cap - 2 cap / (1 + e^2x), as :func:`tests.oracle.floors` has them, too.

    Parameters
    ----------
    arrays : dict of str to ndarray
        q, k, v, do and their tangents, bias and its.
    options : dict
        Of :func:`cuattn.reference.derivatives.differentiate`; of a bias the arrays have what is looked at.
    samples : int
        How often the operands are moved.
    """

    def __init__(self, arrays, options, samples=3):
        self.dtype = arrays["q"].dtype
        options = {name: x for name, x in options.items() if name != "bias"}
        self.exact, self.rough = (differentiate(**arrays, **options, low=low) for low in (None, self.dtype))
        self.sums = eps(np.float64 if self.dtype == np.float64 else np.float32)
        wide = np.longdouble if self.dtype == np.float64 else np.float64
        self.moved = dict.fromkeys(self.exact._fields, 0.0)
        rng = np.random.default_rng(0)

        def moved(x, unit, sample):
            if sample % 2 == 0:
                return x * (1 + unit * rng.choice((-1, 1), np.shape(x)))
            # No two arrays move alike in all samples; neighbours, as P and the sum of its products, do in two of three.
            number = next(numbers)
            return x * (1 + unit * (1 - 2 * ((number ^ number >> 1) >> sample // 2 & 1)))

        of_o = max(8, 2 * roundings(arrays["k"].shape[-2])) * self.sums  # a sum over the keys, divided by another
        of_s = max(8, roundings(arrays["q"].shape[-1])) * self.sums
        units = 8 * self.sums, max(8 * self.sums, eps(self.dtype)), of_o  # weights of 16 bits are rounded for products
        for sample in range(samples):  # every second time an array's numbers move alike, as equal numbers do
            numbers = itertools.count()
            noise = [functools.partial(moved, unit=unit, sample=sample) for unit in units]
            near = {
                name: x if x is None else moved(x.astype(wide), of_s if name in ("q", "k") else units[0], sample)
                for name, x in arrays.items()
            }
            if options.get("softcap") is not None and eps(self.dtype) > self.sums:
                unit, shape = 2 * options["softcap"] * self.sums, (*near["q"].shape[:-1], near["k"].shape[-2])
                off = unit * rng.choice((-1, 1), shape)
                near["bias"] = off if near.get("bias") is None else near["bias"] + off
            other = differentiate(**near, **options, noise=noise)
            for name, e, x in zip(self.exact._fields, self.exact, other, strict=True):
                if e is not None and e.size:
                    x = sum_to(x, e.shape)  # of a bias that was moved element by element
                    with np.errstate(invalid="ignore"):
                        self.moved[name] = max(self.moved[name], float(np.nan_to_num(np.abs(e - x)).max()))

    def check(self, names, results, dtype=None):
        """Hold results to the rule."""
        for name, actual in zip(names, results, strict=True):
            exact, rough = getattr(self.exact, name), getattr(self.rough, name)
            assert (actual is None) == (exact is None), name
            if exact is not None:
                low = self.dtype if name not in ("l", "m") else actual.dtype
                low = max(low, actual.dtype, key=eps) if dtype is None else dtype
                size = self.moved[name] / self.sums
                assert_close(actual, exact, rough, dtype=low, magnitude=size, name=name)

    def check_pair(self, gradients, tangents):
        """Hold gradients and their tangents to it."""
        self.check(GRADIENTS, gradients)
        self.check(TANGENTS, tangents)


def results_of(jvp, get=lambda x: x.get()):
    """Return what has the names `JVP`, as NumPy arrays."""
    return [get(getattr(jvp, name)) for name in JVP]


def tangents_of(arrays, names, seed=0):
    """Return random tangents of those of some arrays whose names are given; None of the others."""
    rng = np.random.default_rng(seed)
    found = {
        f"t{name}": None if x is None else rng.standard_normal(x.shape).astype(x.dtype) for name, x in arrays.items()
    }
    return {name: x if name[1:] in names else None for name, x in found.items()}
