"""Measure sums over pairs of points (`cuattn.pairwise`) beside chunked NumPy or CuPy and other packages.

    python -m bench.pairs                 # on a GPU
    python -m bench.pairs --device cpu

Points are normal, of the case's spread, and keys the same as rows unless one is transported to the other.  ``cuattn``
keeps float32's digits, ``cuattn-tf32`` does not; ``flash-sinkhorn`` rounds to TF32 as it does by default,
``flash-sinkhorn-exact`` does not.  gpytorch's gradient has the product in front of it; GeomLoss takes KeOps where that
is, else matrices, of up to 20,000 points.  The first rows' ``error`` beside float64 is told of each.  Peers that cannot
be imported are left out; FlashSinkhorn tries its configurations first, which takes minutes.
"""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import numpy as np

from bench import harness
from bench.harness import Point
from cuattn import pairwise

CHUNK = 4096  # rows
ITERATIONS = 50
CHECKED = 64  # rows


class Case(NamedTuple):
    """What is computed of n points with d coordinates; `scale` is the bandwidth, or eps."""

    operation: str
    d: int
    n: int
    scale: float
    spread: float = 1.0
    dtype: str = "float32"

    @property
    def name(self):
        """As rows name it."""
        return f"pairs/{self.operation}-d{self.d}-N{self.n}-scale{self.scale:.3g}-spread{self.spread:g}/{self.dtype}"


CASES = {
    "cuda": [
        *(Case("matvec", 3, n, math.sqrt(3)) for n in (200_000, 1_000_000)),
        *(Case("softmin", 3, n, eps) for n in (200_000, 1_000_000) for eps in (0.5, 0.01, 1e-4)),
        *(Case(operation, d, 50_000, math.sqrt(d)) for d in (16, 28, 64, 128) for operation in ("matvec", "gradient")),
        *(Case("softmin", d, 50_000, d / 8) for d in (16, 64, 128)),
        *(Case("sinkhorn", 3, n, eps) for n, eps in ((20_000, 0.1), (100_000, 0.1), (100_000, 0.01))),
    ],
    "cpu": [
        *(Case("matvec", d, 10_000, 1.0, s, t) for t in ("float32", "float64") for d in (3, 16) for s in (1.0, 100.0)),
        Case("softmin", 3, 10_000, 0.5),
    ],
}


def operands(case, xp):
    """Return rows, keys and a number for each."""
    generator = np.random.default_rng(0)
    x, y = (xp.asarray((case.spread * generator.standard_normal((case.n, case.d))).astype(case.dtype)) for _ in "xy")
    return x, y if case.operation == "sinkhorn" else x, xp.asarray(generator.standard_normal(case.n).astype(case.dtype))


def ours(case, x, y, h, precision=None):
    """Return the call of cuattn."""
    options = dict(eps=case.scale) if case.operation in ("softmin", "sinkhorn") else dict(bandwidth=case.scale)
    if case.operation == "sinkhorn":
        return functools.partial(pairwise.sinkhorn, x, y, n_iters=ITERATIONS, tol=0, **options)
    calls = {"matvec": (pairwise.matvec,), "gradient": (pairwise.matvec_backward, h), "softmin": (pairwise.softmin,)}
    return functools.partial(*calls[case.operation], x, y, h, precision=precision, **options)


def chunked(case, x, y, h):
    """Return the call of NumPy's or CuPy's functions over chunks of rows, whose tiles lie in memory."""
    xp = np if isinstance(x, np.ndarray) else __import__("cupy")
    starts, squares, (rows, keys) = range(0, len(x), CHUNK), (y * y).sum(1), (x, y)
    over = -0.5 / case.scale**2 if case.operation != "softmin" else -0.5 / case.scale

    def exponents(part):
        s = part @ keys.T
        s *= -2
        s += squares
        s += (part * part).sum(1)[:, None]
        s *= over
        return s

    def matvec():
        found = xp.empty_like(h)
        for i in starts:
            s = exponents(rows[i : i + CHUNK])
            found[i : i + CHUNK] = xp.exp(s, out=s) @ h
        return found

    def softmin():
        found = xp.empty_like(h)
        for i in starts:
            s = exponents(rows[i : i + CHUNK])
            s += h / case.scale
            m = s.max(1)
            s -= m[:, None]
            found[i : i + CHUNK] = -case.scale * (m + xp.log(xp.exp(s, out=s).sum(1)))
        return found

    def gradient():
        dx, dy, db, dscale = xp.empty_like(x), xp.zeros_like(y), xp.zeros_like(h), 0.0
        for i in starts:
            part, own = rows[i : i + CHUNK], h[i : i + CHUNK]
            s = exponents(part)
            g = xp.exp(s)
            db += own @ g
            g *= own[:, None]
            g *= h
            dx[i : i + CHUNK] = 2 * over * (part * g.sum(1)[:, None] - g @ keys)
            dy += 2 * over * (keys * g.sum(0)[:, None] - g.T @ part)
            s *= g
            dscale = dscale - 2 * s.sum() / case.scale
        return dx, dy, db, dscale

    return {"matvec": matvec, "softmin": softmin, "gradient": gradient}[case.operation]


def keops(case, x, y, h):
    """Return the call of KeOps; on a GPU it takes PyTorch's tensors."""
    if isinstance(x, np.ndarray):
        from pykeops.numpy import LazyTensor
    else:
        import torch
        from pykeops.torch import LazyTensor

        x, y, h = (torch.from_dlpack(array) for array in (x, y, h))
    s = ((LazyTensor(x[:, None, :]) - LazyTensor(y[None, :, :])) ** 2).sum(-1)
    if case.operation == "matvec":
        return lambda: ((s * (-0.5 / case.scale**2)).exp() @ h[:, None])[:, 0]
    if case.operation == "softmin":
        logs = LazyTensor(h[None, :, None] / case.scale) - s * (0.5 / case.scale)
        return lambda: -case.scale * logs.logsumexp(1)[:, 0]
    raise ImportError(case.operation)


def flash_sinkhorn(case, x, y, h, tf32=True):
    """Return the call of FlashSinkhorn."""
    import torch
    from flash_sinkhorn.kernels.sinkhorn_flashstyle_sqeuclid import flashsinkhorn_lse
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating

    x, y, h = (torch.from_dlpack(array) for array in (x, y, h))
    options: dict[str, Any] = dict(eps=case.scale, cost_scale=0.5, allow_tf32=tf32)
    if case.operation == "sinkhorn":
        a = torch.full((case.n,), 1 / case.n, device="cuda")
        return lambda: sinkhorn_flashstyle_alternating(x, y, a, a, n_iters=ITERATIONS, threshold=None, **options)
    if case.operation == "softmin":
        bias, of_row = (h - (y * y).sum(1) / 2) / case.scale, (x * x).sum(1) / 2
        return lambda: flashsinkhorn_lse(x, y, bias, **options) + of_row
    raise ImportError(case.operation)


def geomloss(case, x, y, h):
    """Return the call of GeomLoss, whose temperature falls to eps in as many steps."""
    import torch
    from geomloss import SamplesLoss

    if case.operation != "sinkhorn":
        raise ImportError(case.operation)
    x, y = (torch.from_dlpack(array) for array in (x, y))
    on_line = importlib.util.find_spec("pykeops") is not None
    if not on_line and case.n > 20_000:
        raise ImportError("KeOps")
    diameter, blur = 2.0, math.sqrt(case.scale)
    scaling = (blur / diameter) ** (1 / ITERATIONS)
    options = dict(blur=blur, scaling=scaling, diameter=diameter, backend="online" if on_line else "tensorized")
    loss = SamplesLoss("sinkhorn", debias=False, **options)
    return lambda: loss(x, y)


def gpytorch(case, x, y, h):
    """Return the call of gpytorch, whose kernel matrix lies in memory."""
    import torch
    from gpytorch.kernels import RBFKernel

    if case.operation not in ("matvec", "gradient") or case.n > 50_000:
        raise ImportError(case.operation)
    x, y, h = (torch.from_dlpack(array) for array in (x, y.copy(), h))
    kernel = RBFKernel().to(x.device)
    kernel.lengthscale = case.scale

    def product(x, y, h):
        return (kernel(x, y) @ h[:, None])[:, 0]

    def gradient():
        given = [array.detach().requires_grad_() for array in (x, y, h)]
        return torch.autograd.grad(product(*given), [*given, kernel.raw_lengthscale], h)

    return gradient if case.operation == "gradient" else torch.no_grad()(lambda: product(x, y, h))


RUNNERS = {
    "cuattn": ours,
    "cuattn-tf32": functools.partial(ours, precision="tf32"),
    "chunked": chunked,
    "keops": keops,
    "flash-sinkhorn": flash_sinkhorn,
    "flash-sinkhorn-exact": functools.partial(flash_sinkhorn, tf32=False),
    "geomloss": geomloss,
    "gpytorch": gpytorch,
}


def runners(case, device):
    """Return the names of what may compute a case."""
    left_out = {"chunked"} if case.operation == "sinkhorn" or case.n > 200_000 else set()
    if device == "cpu" or case.d <= pairwise.pairs.DIRECT_DIM or case.operation == "gradient":
        left_out.add("cuattn-tf32")
    if device == "cpu":
        left_out |= {name for name in RUNNERS if name.startswith(("flash", "geom", "gpy"))}
    return [name for name in RUNNERS if name not in left_out]


def error_of(found, exact):
    """Return the largest error of the first rows, relative to the largest of them."""
    found = found.get() if hasattr(found, "get") else np.asarray(getattr(found, "cpu", lambda: found)())
    return float(np.abs(found[:CHECKED] - exact).max() / np.abs(exact).max())


def measure(case, device, seconds):
    """Check and time whatever computes a case."""
    given = operands(case, harness.namespace(device))
    exact = None
    if case.operation in ("matvec", "softmin"):
        wide = [np.asarray(a.get() if hasattr(a, "get") else a, np.float64) for a in given]
        wide[0] = wide[0][:CHECKED]
        exact = ours(case, *wide)()
    calls, rows = {}, {}
    for name in runners(case, device):
        try:
            call = RUNNERS[name](case, *given)
            found = call()
        except ImportError as error:
            rows[name] = {"status": "unsupported", "reason": str(error)}
            continue
        calls[name], rows[name] = call, {}
        if exact is not None:
            rows[name]["error"] = error_of(found, exact)
    for name, row in harness.timed(calls, device, seconds, least=3).items():
        pairs = case.n**2 * (2 * ITERATIONS if case.operation == "sinkhorn" else 1)
        rows[name] |= {**row, "rate": pairs / row["median_us"] / 1e3, "unit": "G pairs/s"}
    return {name: {**row, "problem": case._asdict()} for name, row in rows.items()}


def points(arguments):
    """Yield what is measured."""
    for case in CASES[arguments.device]:
        if arguments.tiny:
            case = case._replace(n=300)
        names = tuple(runners(case, arguments.device))
        yield Point(case.name, names, functools.partial(measure, case, arguments.device, arguments.seconds))


if __name__ == "__main__":
    harness.main(__doc__, "pairs", points)
