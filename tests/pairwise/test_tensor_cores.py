"""What kernels for many coordinates are given, and what is made of their results; NumPy stands in for them."""

import types

import numpy as np
import pytest

from cuattn import pairwise
from cuattn.pairwise import logsums, products, tensor_cores
from cuattn.pairwise.functions import FUNCTIONS
from tests.pairwise.textbook import Problem


class Prepare:
    """What scales points, as kernels/pairwise/prepare.cu does; its addresses are the arrays."""

    def __init__(self, constants, factor):
        self.logs, self.factor = dict(constants)["logs"], factor

    def launch(self, arrays, stream):
        given = dict(zip(tensor_cores._ARRAYS, arrays, strict=True))
        root = np.sqrt(self.factor if given["factors"] is None else float(given["factors"]))
        centre = given["given_y"].reshape(-1, given["given_y"].shape[-1]).mean(0, dtype=np.float64)
        own = [((given[name] - centre) * root).astype(np.float32) for name in ("given_x", "given_y")]
        _, exponent = np.frexp(max(np.abs(points).max() for points in own))
        up = 2.0 ** (15 - int(exponent))
        given["unit"][...], given["scale"][...] = 2 / up**2, root * up
        for name, points, side in zip("xy", own, ("row", "key"), strict=True):
            given[name][...] = 0
            given[name][..., : points.shape[-1]] = points * up
            squares, log = np.square(points, dtype=np.float64).sum(-1), given[f"{side}_log"]
            given[f"of_{side}"][...] = (0 if log is None else log * np.log2(np.e)) - squares if self.logs else squares
            if name == "x" and given["squares"] is not None:
                given["squares"][...] = squares


class Kernel:
    """One of the kernels that sum, in float64."""

    def __init__(self, constants):
        self.constants = dict(constants)

    def launch(self, arrays, stream):
        given = dict(zip(tensor_cores._ARRAYS, arrays, strict=True))
        x, y = (given[name].astype(np.float64) for name in "xy")
        assert max(abs(x).max(), abs(y).max()) <= 2.0**15 and x.shape[-1] % 16 == 0
        s = float(given["unit"].ravel()[0]) * (x @ y.swapaxes(-1, -2))
        of_key = given["of_key"][..., None, :].astype(np.float64)
        if given["logs"] is not None:
            given["logs"][0] = np.log2(np.exp2(of_key + s).sum(-1))
            return
        constant = given["of_row"][..., None] + of_key
        z = np.maximum(constant - s, 0)
        function = list(FUNCTIONS.values())[self.constants["function"]]
        k, slope = [np.exp2(constant + s)] * 2 if self.constants["logs"] else function.evaluate(-z, True, False)
        v = given["v"]
        if self.constants["warpgroups"]:  # (..., groups, tiles, width, keys of a tile)
            at = v.ndim - 4
            v = np.moveaxis(v, (at + 1, at + 3), (at, at + 1)).reshape(*v.shape[:at], -1, v.shape[at] * v.shape[-2])
            assert not v[..., y.shape[-2] :, :].any()
            v = v[..., : y.shape[-2], :2]
        if given["sums"] is not None:
            given["sums"][0] = k @ v
        if given["directions"] is not None:
            g = given["u"] @ v.swapaxes(-1, -2) * slope
            given["directions"][0] = x * g.sum(-1, keepdims=True) - g @ y
            given["moments"][0] = (g * z).sum(-1)


@pytest.fixture(params=["sm_80", "sm_90"])
def on_host(monkeypatch, request):
    """Take the launches' arguments to NumPy."""
    run = tensor_cores.run

    def on_no_device(pairs, wanted, transposed=False):
        pairs.origin = types.SimpleNamespace(device=0, stream=lambda: types.SimpleNamespace(ptr=0))
        return run(pairs, wanted, transposed)

    monkeypatch.setattr(tensor_cores, "run", on_no_device)
    monkeypatch.setattr(tensor_cores, "address_of", lambda array: array)
    monkeypatch.setattr(tensor_cores, "device_of", lambda number: types.SimpleNamespace(arch=request.param))

    def launches(device, slopes, known, sizes, factor):
        return tensor_cores._Launches((Prepare(known, factor), Kernel(known)), 1, 1, sizes.n_keys)

    monkeypatch.setattr(tensor_cores, "_launches", launches)
    for module in (products, logsums):
        monkeypatch.setattr(module, "engine", lambda pairs: tensor_cores)
    monkeypatch.setattr(pairwise.pairs.Pairs, "give", lambda pairs, result, dtype=None: np.asarray(result))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("function", ["gaussian", "cauchy", "matern32", "matern52"])
def test_scales_and_exponents(on_host, function, batch):
    problem = Problem(20, 2, 50, 70, 2.0, batch=batch)  # above 16 coordinates Hopper has kernels of its own
    points, options = (problem.x, problem.y, problem.b), dict(bandwidth=2.0, kernel_function=function)
    found = [pairwise.matvec(*points, **options), *pairwise.matvec_backward(problem.da, *points, **options)]
    f, _ = problem.weights(np.float64, 4.0)
    exact = [problem.matvec(np.float64, function, 2.0), *problem.matvec_backward(np.float64, function, 2.0)]
    if function == "gaussian":
        points = problem.x, problem.y, problem.h
        found += [pairwise.softmin(*points, eps=4.0)]
        found += pairwise.softmin_backward(problem.df, *points, f.astype(np.float32), eps=4.0)
        exact += [f, *problem.softmin_backward(np.float64, 4.0)]
    sizes = [np.abs(true).max() for true in exact]
    problem.da, problem.b = np.abs(problem.da), np.abs(problem.b)
    sizes[4] = problem.matvec_backward(np.float64, function, 2.0)[3]  # the bandwidth's gradient is a sum that cancels
    for own, true, size in zip(found, exact, sizes, strict=True):
        assert np.abs(own - true).max() <= 1e-6 * size
