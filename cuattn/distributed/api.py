"""The calls over ranks: attention, forward and backward."""

from __future__ import annotations

from typing import Any

from cuattn import api
from cuattn.api import unpacked
from cuattn.distributed.arrays import gathered
from cuattn.distributed.comm import Comm
from cuattn.distributed.layout import Layout
from cuattn.distributed.request import Request
from cuattn.distributed.walk import BackwardWalk, ForwardWalk, Stage, Team, stages
from cuattn.distributed.work import work_of
from cuattn.errors import ShapeError
from cuattn.problem import BACKWARD, FORWARD
from cuattn.results import Forward, Gradients

Placing = dict[str, Any]


def attention(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    comm: Comm,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    algorithm: str | None = None,
    **options: Any,
) -> Any:
    """Compute exact attention over ranks: :func:`cuattn.attention` of the whole problem, of which each holds a part.

    Parameters
    ----------
    q : array, (..., Hq, rows, d) or (rows, d)
        This rank's rows of the queries, in ascending order.
    k, v : array, (..., Hkv, keys, d | dv) or (keys, d | dv)
        This rank's keys and values.
    comm : Comm
        The ranks; all of them call this.
    layout : Layout, optional
        Which rows each rank holds; by default neighbours, as many as it brings.
    key_layout : Layout, optional
        Which keys each rank holds; by default `layout`, if the lengths are its, else as above.
    algorithm : {None, "ring", "needed", "gather", "combine", "heads", "2d"}, optional
        How ranks share the work; by default :func:`plan` chooses.
    **options : object
        As for :func:`cuattn.attention`.  Mask, causality, window, score and mask functions are of the whole problem, by
        global indices, and equal on all ranks; so are score_args.  A bias has this rank's rows and all keys.

    Returns
    -------
    o : array
        This rank's rows.

    Raises
    ------
    DistributedError
        Ranks do not agree, or one fails or does not answer.
    CuattnError
        As in :func:`cuattn.attention`, on all ranks.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> from cuattn.distributed import Layout, attention, spawn
    >>> x = np.random.default_rng(0).standard_normal((2, 64, 8), np.float32)
    >>> layout = Layout.zigzag(64, 2)
    >>> def work(comm):
    ...     mine = layout.shard(x, comm.rank)
    ...     return layout.unshard(attention(mine, mine, mine, comm=comm, layout=layout, is_causal=True), comm)
    >>> bool(np.allclose(spawn(work, ranks=2)[0], cuattn.attention(x, x, x, is_causal=True), atol=1e-6))
    True
    """
    placing = {"layout": layout, "key_layout": key_layout, "algorithm": algorithm}
    return _forward("attention", (q, k, v), comm, placing, options)[0]


def forward(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    comm: Comm,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    algorithm: str | None = None,
    **options: Any,
) -> Forward:
    """Compute exact attention over ranks and keep what the backward needs, as :func:`cuattn.forward`.

    Parameters
    ----------
    q, k, v : array
        This rank's, as for :func:`attention`.
    comm : Comm
    layout, key_layout, algorithm : optional
        As for :func:`attention`.
    **options : object
        As for :func:`cuattn.forward`; see :func:`attention`.

    Returns
    -------
    Forward
        This rank's rows of o, l and m, and the state that dropout used, which is the same on all ranks.
    """
    placing = {"layout": layout, "key_layout": key_layout, "algorithm": algorithm}
    return Forward(*_forward("forward", (q, k, v), comm, placing, options))


def backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    fwd: Any,
    /,
    *,
    comm: Comm,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    algorithm: str | None = None,
    **options: Any,
) -> Gradients:
    """Compute the gradients of attention over ranks, as :func:`cuattn.backward`.

    Parameters
    ----------
    do, q, k, v : array
        This rank's, as for :func:`attention`.
    fwd : Forward
        Of this rank, from :func:`forward`.
    comm : Comm
    layout, key_layout, algorithm : optional
        As for :func:`attention`; "combine" lets rows travel in place of keys.
    **options : object
        As for :func:`cuattn.backward`; see :func:`attention`.

    Returns
    -------
    Gradients
        This rank's rows of dq, its keys of dk and dv, its rows of dbias.  Of a bias without rows, and of score_args,
        the gradients are summed over ranks and equal on all.

    Notes
    -----
    Partial gradients are float32 (float64) and added in an order that layouts and mask decide; with ``deterministic``
    the same call gives the same bits.
    """
    placing = {"layout": layout, "key_layout": key_layout, "algorithm": algorithm}
    if comm.size == 1:
        _check_alone(placing, q, k)
        return api.backward(do, q, k, v, fwd, **options)
    o, l, m, state = unpacked("fwd", fwd)[:4]
    operands = {"q": q, "k": k, "v": v, "do": do, "o": o, "l": l, "m": m}
    wanted = BACKWARD.results[: 3 + (options.get("bias") is not None)]
    request = Request(BACKWARD, operands, state, comm, placing, options, wanted)
    with request.home.scope():
        team, plan = _team(request)
        walk = BackwardWalk(team, request.whole, request.arrays, request.sums)
        walk.run(plan)
        found = request.delivered(_gradients(request, walk))
    own = [found.get(name) for name in BACKWARD.results]
    args = range(len(options.get("score_args", ())))
    return Gradients(*own, dscore=tuple(found.get(f"dscore{index}") for index in args))


def _forward(name: str, qkv: tuple[Any, ...], comm: Comm, placing: Placing, options: dict[str, Any]) -> list[Any]:
    """Return the results of a forward or an attention."""
    if comm.size == 1:
        _check_alone(placing, *qkv[:2])
        found = getattr(api, name)(*qkv, **options)
        return [found] if name == "attention" else list(found)
    wanted = FORWARD.results[: 1 if name == "attention" else 3]
    options = {"out_dtype": None, **options, "out": options.get("out")}
    request = Request(FORWARD, dict(zip("qkv", qkv, strict=True)), None, comm, placing, options, wanted)
    with request.home.scope():
        team, plan = _team(request)
        walk = ForwardWalk(team, request.whole, request.arrays, request.sums)
        walk.run(plan)
        found = request.delivered(walk.result._asdict())
    return [*found.values(), request.state]


def _check_alone(placing: Placing, q: Any, k: Any) -> None:
    """Check the layouts of a single rank."""
    for name, array in (("layout", q), ("key_layout", k)):
        layout = placing[name]
        if layout is not None and (layout.size, layout.n) != (1, array.shape[-2]):
            raise ShapeError(f"{name} has lengths {layout.lengths}; expected {array.shape[-2]}, on the only rank")


def _team(request: Request) -> tuple[Team, list[Stage]]:
    """Return the ranks that share rows and keys, and this one's stages."""
    comm, algorithm = request.comm, request.placing["algorithm"] or "needed"
    work = work_of(request.rows, request.keys, request.whole.visible)
    axis = "row" if algorithm == "combine" else "key"
    trimmed = algorithm != "ring" and (axis == "key" or request.operation is BACKWARD)
    team = Team(comm, range(comm.size), comm.rank, work, axis, trimmed)
    return team, stages(algorithm, comm.rank, comm.size)


def _gradients(request: Request, walk: BackwardWalk) -> dict[str, Any]:
    """Return all sums of a backward, those that are no rank's own summed over ranks."""
    totals, names = walk.totals, [name for name in ("q", "k", "v", "bias", "key_bias") if name in request.arrays]
    shapes = {name: request.arrays[name] for name in names}
    shapes |= {f"score{index}": array for index, array in request.learned.items()}
    found = {}
    for name, like in shapes.items():
        total = totals[name] if name in totals else walk.xp.zeros(like.shape, request.sums)
        if name == "key_bias" or name.startswith("score"):
            every = gathered(request.comm, total, [total.shape] * request.comm.size)
            total = sum(every[1:], every[0])
        found["dbias" if name == "key_bias" else f"d{name}"] = total
    return found
