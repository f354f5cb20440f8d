"""The calls over ranks: attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any

from cuattn import api
from cuattn.api import unpacked
from cuattn.distributed.arrays import gathered
from cuattn.distributed.comm import Comm, DistributedError
from cuattn.distributed.flight import LANES
from cuattn.distributed.heads import Heads, is_shared, total
from cuattn.distributed.layout import Layout, grouped
from cuattn.distributed.model import DistributedPlan
from cuattn.distributed.request import Request
from cuattn.distributed.tape import Tape
from cuattn.distributed.walk import Arrays, BackwardWalk, ForwardWalk, Team, Walk, stages
from cuattn.distributed.whole import Whole
from cuattn.distributed.work import work_of
from cuattn.errors import ArgumentError, ShapeError, shown
from cuattn.problem import BACKWARD, FORWARD
from cuattn.results import Forward, Gradients

Placing = dict[str, Any]
_MUCH = 1 << 27  # bytes of a partial result of all heads


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
    array
        This rank's rows.

    Raises
    ------
    DistributedError
        Ranks do not agree, or one fails or does not answer.
    CuattnError
        As in :func:`cuattn.attention`, on all ranks.

    See Also
    --------
    forward : Returns the softmax statistics too.
    cuattn.attention : On one device.

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
        The ranks; all of them call this.
    layout, key_layout, algorithm : optional
        As for :func:`attention`.
    **options : object
        As for :func:`cuattn.forward`; see :func:`attention`.

    Returns
    -------
    Forward
        This rank's rows of o, l and m, and the state that dropout used, which is the same on all ranks.

    See Also
    --------
    backward : Takes the result.
    cuattn.forward : On one device.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.distributed import forward, spawn
    >>> def work(comm):
    ...     x = np.ones((2, 8 * comm.rank + 8, 4), np.float32)  # lengths may differ
    ...     return forward(x, x, x, comm=comm).l.shape
    >>> spawn(work, ranks=2)
    [(2, 8), (2, 16)]
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
        The ranks; all of them call this.
    layout, key_layout, algorithm : optional
        As for :func:`attention`; "combine" lets rows travel in place of keys.
    **options : object
        As for :func:`cuattn.backward`; see :func:`attention`.

    Returns
    -------
    Gradients
        This rank's rows of dq, its keys of dk and dv, its rows of dbias.  Of a bias without rows, and of score_args,
        the gradients are summed over ranks and equal on all.

    See Also
    --------
    forward : Computes `fwd`.
    cuattn.backward : On one device.

    Notes
    -----
    Partial gradients are float32 (float64) and added in an order that layouts and mask decide; with ``deterministic``
    the same call gives the same bits.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.distributed import backward, forward, spawn
    >>> def work(comm):
    ...     x = np.ones((2, 8, 4), np.float32)
    ...     fwd = forward(x, x, x, comm=comm)
    ...     return backward(np.ones_like(fwd.o), x, x, x, fwd, comm=comm).dv[0, :3, 0].round(6).tolist()
    >>> spawn(work, ranks=2)
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    placing = {"layout": layout, "key_layout": key_layout, "algorithm": algorithm}
    if comm.size == 1:
        _check_alone(placing, q, k)
        return api.backward(do, q, k, v, fwd, **options)
    o, l, m, state = unpacked("fwd", fwd)[:4]
    operands = {"q": q, "k": k, "v": v, "do": do, "o": o, "l": l, "m": m}
    wanted = BACKWARD.results[: 3 + (options.get("bias") is not None)]
    request = Request(BACKWARD, operands, state, comm, placing, options, wanted)
    found = _computed(request, _gradients)
    own = [found.get(name) for name in BACKWARD.results]
    args = range(len(options.get("score_args", ())))
    return Gradients(*own, dscore=tuple(found.get(f"dscore{index}") for index in args))


def plan(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    comm: Comm,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    algorithm: str | None = None,
    direction: str = "forward",
    **options: Any,
) -> DistributedPlan:
    """Tell how a call over ranks would run: algorithm, bytes, steps, balance, overlap, and why.  Computes nothing.

    Parameters
    ----------
    q, k, v : array
        This rank's, as for :func:`attention`.
    comm : Comm
        The ranks; all of them call this.
    layout, key_layout, algorithm : optional
        As for :func:`attention`.
    direction : {"forward", "backward"}
        Which call to plan.
    **options : object
        As for :func:`cuattn.forward`, or :func:`cuattn.backward`.

    Returns
    -------
    DistributedPlan
        Prints as a readable table; its `local` is the plan of this rank's own rows and keys.

    See Also
    --------
    Layout : What it depends on.
    cuattn.plan : Of one device's part.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.distributed import plan, spawn
    >>> x = np.ones((2, 1024, 4), np.float32)
    >>> def work(comm):
    ...     return plan(x, x, x, comm=comm, window=(16, 0), algorithm="needed").bytes  # 16 keys and values
    >>> spawn(work, ranks=2)
    [1024, 1024]
    """
    if direction not in ("forward", "backward"):
        raise ArgumentError(f"direction is {shown(direction)}; expected 'forward' or 'backward'")
    placing = {"layout": layout, "key_layout": key_layout, "algorithm": algorithm}
    operands, operation = (
        {"q": q, "k": k, "v": v},
        replace(BACKWARD if direction == "backward" else FORWARD, operands=()),
    )
    if operation.replays and options.get("dropout_p"):
        options = {**options, "dropout_p": 0.0}  # which no state is given for
    return Request(operation, operands, None, comm, placing, options, operation.results[:3]).plan()


def _forward(name: str, qkv: tuple[Any, ...], comm: Comm, placing: Placing, options: dict[str, Any]) -> list[Any]:
    """Return the results of a forward or an attention."""
    if comm.size == 1:
        _check_alone(placing, *qkv[:2])
        found = getattr(api, name)(*qkv, **options)
        return [found] if name == "attention" else list(found)
    wanted = FORWARD.results[: 1 if name == "attention" else 3]
    options = {"out_dtype": None, **options, "out": options.get("out")}
    request = Request(FORWARD, dict(zip("qkv", qkv, strict=True)), None, comm, placing, options, wanted)
    return [*_computed(request, _forward_taped).values(), request.state]


def _computed(request: Request, taped: Callable[[Request, Arrays], Arrays]) -> Arrays:
    """Return the results of a call, which a function takes down the first time, given this rank's arrays."""
    with request.home.scope():
        try:
            if request.tape is None:
                tape = Tape(request.arrays)
                request.keep(tape.end(taped(request, tape.arrays)))
            found = request.tape.run(request.arrays, request.comm, request.state)
        except DistributedError:
            raise
        except BaseException:  # the others wait for this rank
            request.comm.abort()
            raise
        return request.delivered(found)


def _forward_taped(request: Request, arrays: Arrays) -> Arrays:
    """Take down a forward."""
    dtypes = {"o": request.made["o"][1], "l": request.sums, "m": request.sums}
    return _walk(request, arrays, ForwardWalk, dtypes, {})[0]


def _check_alone(placing: Placing, q: Any, k: Any) -> None:
    """Check the layouts of a single rank."""
    for name, array in (("layout", q), ("key_layout", k)):
        layout = placing[name]
        if layout is not None and (layout.size, layout.n) != (1, array.shape[-2]):
            raise ShapeError(f"{name} has lengths {layout.lengths}; expected {array.shape[-2]}, on the only rank")


def _walk(
    request: Request, arrays: Arrays, kind: type[Walk], dtypes: Mapping[str, Any], operands: Arrays
) -> tuple[Arrays, Heads]:
    """Take down what makes results of these dtypes, in parts of the heads.

    Returns the results, and what exchanges heads; `operands` are those that results are gradients of.
    """
    algorithm, tape = request.algorithm, next(iter(arrays.values())).tape
    cost, inner = request.costs[algorithm]
    layouts, made = {"row": request.rows, "key": request.keys}, {}
    count = _parts(request, layouts["row"], inner)
    if count > 1:
        made = {name: tape.empty(_shape(name, arrays, request.whole), dtype) for name, dtype in dtypes.items()}
    every = [Heads(request.comm, inner, layouts, slot, count) for slot in range(count)]
    work = work_of(*(every[0].layouts[axis] for axis in layouts), request.whole.visible)
    axis = "row" if algorithm == "combine" else "key"
    # Partial results of a forward are merged by whole shards.
    trimmed = algorithm != "ring" and not (axis == "row" and kind is ForwardWalk)
    found: Arrays = {}

    def way(heads: Heads) -> Iterator[None]:
        """Take a part down, from one wait for others to the next."""
        arrived = heads.spread(arrays)
        if inner > 1:
            yield
        team = Team(request.comm, heads.ranks, heads.index, work, axis, trimmed)
        out = heads.own(made) if inner == 1 else {}
        walk = kind(team, heads.whole(request.whole), arrived(), request.sums, dtypes, out)
        plan = stages("gather" if cost.parts else algorithm, team.index, work.size, bool(walk.returned))
        fetched = walk.begin(plan)
        if inner == 1:
            yield
        returning = walk.run(plan, fetched)
        yield
        ending = returning()
        yield
        ending()
        collected = heads.collect(walk.outcome(), operands, made)
        yield
        found.update(collected())

    (_side_by_side if cost.parts else _in_turn)(tape, [way(heads) for heads in every])
    return made or found, every[0]


def _in_turn(tape: Tape, ways: Sequence[Iterator[None]]) -> None:
    """Take ways down one after the other, each of which has begun to fetch before the last computes."""
    for each, following in zip_longest(ways, ways[1:]):
        if each is ways[0]:
            next(each)
        if following is not None:
            next(following)
        for _ in each:
            pass


def _side_by_side(tape: Tape, ways: Sequence[Iterator[None]]) -> None:
    """Take ways down in lanes: each computes as soon as what it needs has come, and returns while others compute."""
    for steps in (2, None):  # up to what is computed, and what is behind it: messages come in the order of their begin
        for number, each in enumerate(ways):
            with tape.lane(number % LANES if len(ways) > 1 else None):
                for _ in islice(each, steps):
                    pass


def _shape(name: str, arrays: Arrays, whole: Whole) -> tuple[int, ...]:
    """Return the shape of a result: of o, l or m, or of the gradient of the operand that it names."""
    if name in FORWARD.results:
        rows = *whole.leading, arrays["q"].shape[-2]
        return (*rows, arrays["v"].shape[-1]) if name == "o" else rows
    return tuple(arrays[name].shape)


def _parts(request: Request, rows: Layout, inner: int) -> int:
    """Return in how many parts heads are computed: as planned, or in two where partial results would take much memory.

    All ranks find the same, for the rank that has most rows.
    """
    if planned := request.costs[request.algorithm][0].parts:
        return planned
    heads = request.size.batch * request.size.heads // inner
    much = (
        inner < request.comm.size
        and heads * max(grouped(rows, inner).lengths) * request.size.head_dim_v * request.sums.itemsize >= _MUCH
    )
    return 2 if much and request.slices % (2 * inner) == 0 else 1


def _gradients(request: Request, arrays: Arrays) -> Arrays:
    """Take down a backward, whose results that are no rank's own are summed over ranks."""
    operands = {name: arrays[name] for name in ("q", "k", "v", "bias", "key_bias") if name in arrays}
    operands |= {f"score{index}": array for index, array in request.learned.items()}
    # What is not added up is rounded at once, also if it travels.
    ready = ("q", "k", "v", *["bias"] * (request.costs[request.algorithm][1] == 1))
    dtypes = {name: request.made[f"d{name}"][1] if name in ready else request.sums for name in operands}
    totals, heads = _walk(request, arrays, BackwardWalk, dtypes, operands)
    shared = {name: totals.pop(name) for name in operands if is_shared(name)}
    found = {f"d{name}": one for name, one in totals.items()}
    for name, one in shared.items():
        part = one
        if one.shape != operands[name].shape:  # of this rank's heads
            part = one.tape.zeros(operands[name].shape, one.dtype)
            one.tape.add(part[heads.place(part)], one)
        every = gathered(request.comm, part, [part.shape] * request.comm.size)
        found["dbias" if name == "key_bias" else f"d{name}"] = total(every)
    return found
