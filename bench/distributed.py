"""Attention over the GPUs of this machine, or of a launcher's ranks, beside one GPU of the same run.

    python -m bench.distributed                        # a thread for each GPU
    mpiexec -n 2 python -m bench.distributed           # a process for each
    torchrun --nproc-per-node 2 -m bench.distributed   # the same, and the peers of bench/peers/ranks.py beside it
    python -m bench.distributed --simulate 2 8 64      # what more GPUs would do, by the plan's model
    python -m bench.distributed --device cpu --tiny    # a toy

A row's time is that of the slowest rank, from a barrier to the end of its work, over the number of calls: as many in a
row, as a program makes them, as take 50 ms.  Its efficiency is one GPU's time on the same problem, measured so, over
that of all, times their number; the GPU is the slowest of them while all are busy.  Beside it stands what the model
predicts from this run's rates: the kernel's on one GPU, and the link's, with a message of 256 MB.  Its memory is what
the rank with most of it has beyond operands, results and the workspace of one local call, also as a share of what is
allowed: two pairs of (k, v) and a float32 o, in the backward two float32 pairs of (dk, dv) more.  Results are compared
with one GPU's first.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cuattn
from bench import harness
from bench.harness import Calls, Point
from bench.peers.base import DOCUMENTS
from bench.peers.ranks import PEERS, WINDOW, Unsupported
from cuattn import distributed, masks
from cuattn.distributed import Layout, connect, spawn
from cuattn.distributed.agreement import agreed
from cuattn.distributed.arrays import gathered
from cuattn.distributed.comm import Alone
from cuattn.distributed.model import Rates, Size, least, options_of, rates_of
from cuattn.distributed.process_group import OfProcessGroup
from cuattn.distributed.threads import ThreadComm
from cuattn.distributed.work import work_of

D = 128
HEADS, KV_HEADS = 32, 8  # of the simulation
_SOME, _FEW = ((32, 32), (32, 8)), ((4, 4), (4, 1))
LENGTHS = {1 << 15: _SOME, 1 << 17: _SOME, 1 << 19: _FEW, 1 << 20: _FEW}
TINY = {512: ((4, 4), (4, 2))}
MASKS = ("full", "causal", "causal_document", "document", "window")
MESSAGE = 256 << 20
LONG = 1 << 19  # from here on one call is timed, without peers
_TOGETHER = 0.05  # seconds that calls of a sample take, at least
_ERROR = 2.0**-6  # of the largest number, that results of 16 bits may differ by


class Case(NamedTuple):
    """One problem: a mask, a length, heads of queries and of keys, what is computed, and how."""

    mask: str
    n: int
    heads: int
    kv_heads: int
    direction: str
    exact: bool = False
    dropout: float = 0.0

    @property
    def name(self) -> str:
        """Table, label and direction."""
        extra = "-deterministic" * self.exact + "-dropout" * bool(self.dropout)
        return f"distributed/{self.mask}-N{self.n}-H{self.heads}-{self.kv_heads}{extra}/{self.direction}"

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of both directions."""
        found: dict[str, Any] = {"enable_gqa": True} | ({"dropout_p": self.dropout} if self.dropout else {})
        if self.mask == "causal":
            found["is_causal"] = True
        elif self.mask == "window":
            found["window"] = (WINDOW - 1, 0)
        elif self.mask in DOCUMENTS:
            found["mask"] = visible(self.mask, self.n)
        return found

    def layout(self, ranks: int) -> Layout:
        """Return the one that balances the mask."""
        unit = 128 if self.n >= 1 << 12 else 16
        if self.mask == "causal":
            return Layout.zigzag(self.n, ranks, unit=unit)
        if self.mask == "full":
            return Layout.contiguous(self.n, ranks, unit=unit)
        return Layout.balanced(visible(self.mask, self.n), ranks, unit=unit)

    @property
    def size(self) -> Size:
        """What the model asks beside."""
        return Size(self.direction == "backward", 1, self.heads, self.kv_heads, D, D, 2, 4)


@functools.cache
def visible(kind: str, n: int) -> masks.ColumnMask | None:
    """Return the mask that the model asks."""
    if kind in DOCUMENTS:
        return getattr(masks, kind)(documents(n))
    made = {"causal": masks.causal, "window": lambda n: masks.sliding_window(n, WINDOW)}
    return made[kind](n) if kind in made else None


def documents(n: int) -> list[int]:
    """Return the random lengths of documents, an eighth of n at most."""
    rng, lengths = np.random.default_rng(0), []
    while (left := n - sum(lengths)) > 0:
        lengths.append(min(int(rng.integers(n // 64, n // 8)), left))
    return lengths


def cases(lengths: dict[int, tuple[tuple[int, int], ...]]) -> list[Case]:
    """Return what is measured, the short before the long."""
    found = []
    for n, heads in lengths.items():
        for mask in MASKS:
            for pair in heads:
                found += [Case(mask, n, *pair, direction) for direction in ("forward", "backward")]
        found.append(Case("causal", n, *heads[0], "backward", exact=True))
        if n in (512, 1 << 17):
            found += [Case("causal", n, *heads[0], direction, dropout=0.1) for direction in ("forward", "backward")]
    return found


class Ranks:
    """The ranks that measure: a launcher's, of which rank 0 keeps the file, or threads, started for each case."""

    def __init__(self, comm: Any, device: str, peers: Sequence[str] = tuple(PEERS)) -> None:
        self.comm, self.device, self._peers = comm, device, tuple(peers)
        self.xp = harness.namespace(device)
        gpus = self.xp.cuda.runtime.getDeviceCount() if device == "cuda" else 0
        self.size = comm.size if comm.size > 1 else max(gpus, 2)
        self._devices = [rank % gpus for rank in range(self.size)] if gpus else None  # one may have two, to try it

    def run(self, work: Any, *arguments: Any) -> Any:
        """Call ``work(comm, *arguments)`` on all ranks; return what rank 0 returns."""
        if self.comm.size == 1:
            return spawn(work, *arguments, ranks=self.size, devices=self._devices)[0]
        self.comm.allgather((work, arguments))
        return work(self.comm, *arguments)

    def follow(self) -> None:
        """Do, on any rank but 0, what rank 0 does, until it has nothing more."""
        while (task := self.comm.allgather(None)[0]) is not None:
            work, arguments = task
            try:
                work(self.comm, *arguments)
            except Exception:  # which all ranks agree on, and rank 0 tells of
                continue

    def peers(self, case: Case) -> tuple[str, ...]:
        """Return the peers that are timed beside a case: those of a process group, which have the ranks to run on."""
        return self._peers if isinstance(self.comm, OfProcessGroup) and case.n < LONG else ()

    def finish(self) -> None:
        """Let the others go."""
        if self.comm.size > 1:
            self.comm.allgather(None)


def arrays(case: Case, device: str, rows: Layout | None = None, rank: int = 0) -> list[Any]:
    """Return q, k, v, do of the whole problem, or of a rank."""
    xp = harness.namespace(device)
    dtype = np.dtype(ml_dtypes.bfloat16 if device == "cuda" else np.float32)
    n, found = case.n if rows is None else rows.lengths[rank], []
    for index, heads in enumerate((case.heads, case.kv_heads, case.kv_heads, case.heads)):
        rng = xp.random.default_rng(100 * rank + index)
        found.append(xp.empty((1, heads, n, D), dtype))
        for head in range(heads):
            found[-1][0, head] = rng.standard_normal((n, D), dtype=xp.float32).astype(dtype)
    return found


def samples(call: Any, comm: Any, device: str, seconds: float, n: int) -> list[float]:
    """Return the seconds of a call, of the slowest rank, in samples of several calls that begin together."""
    xp, found = harness.namespace(device), []

    def several(count: int) -> float:
        harness.synchronize(xp)
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        harness.synchronize(xp)
        return max(comm.allgather(time.perf_counter() - begin)) / count

    agreed(comm, call)  # compiles; what fails on one rank does on all
    if n >= LONG:
        return [several(1)]
    calls = max(1, math.ceil(_TOGETHER / several(1)))
    for _ in range(int(np.clip(seconds / max(several(calls) * calls, 1e-6), 3, 20))):
        found.append(several(calls))
    return found


def together(comm: Any, case: Case, device: str, seconds: float) -> dict[str, Any]:
    """Time a case over ranks."""
    layout, options = case.layout(comm.size), case.options()
    q, k, v, do = agreed(comm, lambda: arrays(case, device, layout, comm.rank))
    placing, first = dict(comm=comm, layout=layout), {"rng": 1} if case.dropout else {}
    exact = {"deterministic": True} if case.exact else {}

    def forward() -> Any:
        return distributed.forward(q, k, v, **placing, **options, **first)

    call = forward
    if case.direction == "backward":
        fwd = forward()

        def call() -> Any:
            return distributed.backward(do, q, k, v, fwd, **placing, **options, **exact)

    if case.n < LONG:
        agreed(comm, lambda: check(comm, case, layout, (q, k, v, do), call()))
    plan = distributed.plan(q, k, v, direction=case.direction, **placing, **options)
    spent = samples(call, comm, device, seconds, case.n)
    found = {
        "samples": spent,
        "chosen": plan.algorithm,
        "steps": plan.steps,
        "balance": plan.balance,
        "received": plan.bytes,
    }
    if device == "cpu" and isinstance(comm, ThreadComm):
        return found  # memory is told of all threads together
    one = Calls(q, k, v, do, out_dtype=np.float32, dropout_p=case.dropout, **first, **exact)
    local = functools.partial(one.backward, fwd) if case.direction == "backward" else one.forward
    extra = max(comm.allgather(held(call, device) - held(local, device)))
    return found | {"extra_bytes": extra, "extra_share": round(extra / allowed(case, layout, q.itemsize), 3)}


def check(comm: Any, case: Case, layout: Layout, mine: Sequence[Any], found: Any) -> None:
    """Compare this rank's results with one device's, of the same problem."""
    q, k, v, do = (layout.unshard(x, comm) for x in mine)
    options, exact = case.options(), {"deterministic": True} if case.exact else {}
    right = cuattn.forward(q, k, v, **options, **({"rng": 1} if case.dropout else {}))
    names = ("o",)
    if case.direction == "backward":
        right, names = cuattn.backward(do, q, k, v, right, **options, **exact), ("dq", "dk", "dv")
    for name in names:
        other = layout.shard(getattr(right, name), comm.rank).astype(np.float32)
        error, size = (float(abs(x).max()) for x in (getattr(found, name).astype(np.float32) - other, other))
        if not error <= _ERROR * size:
            raise AssertionError(f"{name} differs from one device's by {error:g}, of {size:g}")


def held(call: Any, device: str) -> int:
    """Return the most bytes that a call holds beside its operands and results."""
    harness.synchronize(harness.namespace(device))
    with harness.peak(device) as most:
        found = call()
    return most.bytes - sum(getattr(x, "nbytes", 0) for x in found)


def allowed(case: Case, layout: Layout, item: int) -> int:
    """Return the bytes that a rank may hold beside operands, results and the workspace of one local call."""
    longest = max(layout.lengths) * D
    pairs = 2 * 2 * longest * case.kv_heads
    return pairs * item + longest * case.heads * 4 + pairs * 4 * (case.direction == "backward")


def alone(comm: Any, case: Case, device: str, seconds: float) -> list[float]:
    """Time a case on each rank's GPU, all at once as they are in the case over ranks; return the slowest's.

    Ranks of the CPU share it, so that only the first computes.
    """
    if device == "cpu" and comm.rank:
        return comm.allgather([])[0]
    q, k, v, do = arrays(case, device)
    options, exact = case.options(), {"deterministic": True} if case.exact else {}
    first = {"rng": 1} if case.dropout else {}
    call = functools.partial(cuattn.forward, q, k, v, **options, **first)
    if case.direction == "backward":
        call = functools.partial(cuattn.backward, do, q, k, v, call(), **options, **exact)
    every = comm.allgather(samples(call, Alone(), device, seconds, case.n))
    return max(filter(None, every), key=statistics.median)


def beside(comm: Any, name: str, case: Case, device: str, seconds: float) -> list[float]:
    """Time a peer, on the ranks of PyTorch's process group."""
    import torch

    def prepared() -> Any:
        harness.free_caches()
        peer = PEERS[name](case, documents(case.n), device, comm.rank, comm.size)
        kind = dict(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        operands = []
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads):
            shape = [1, 0, 0, D]
            shape[peer.heads_axis], shape[peer.rows_axis] = heads, len(peer.rows)
            operands.append(torch.randn(shape, **kind))
        return peer, operands

    peer, (q, k, v, do) = agreed(comm, prepared)
    call = functools.partial(peer.forward, q, k, v)
    if case.direction == "backward":
        _, kept = agreed(comm, call)
        call = functools.partial(peer.backward, do, kept)
    return samples(call, comm, device, seconds, case.n)


def link(comm: Any, device: str, size: int) -> float:
    """Return the bytes in a second that a rank receives while all send to all."""
    mine = harness.namespace(device).zeros(size, np.uint8)
    best = min(samples(lambda: gathered(comm, mine, [mine.shape] * comm.size), comm, device, 0.2, 0))
    return (comm.size - 1) * size / best


def measure(ranks: Ranks, arguments: Any, case: Case) -> dict[str, dict[str, Any]]:
    """Return the rows of a case."""
    device, seconds = ranks.device, arguments.seconds
    single = ranks.run(alone, case, device, seconds)
    found = ranks.run(together, case, device, seconds)
    one, many = statistics.median(single), statistics.median(found["samples"])
    layout, flops = Layout.contiguous(case.n, 1), case.size.flops
    elements = work_of(layout, layout, visible(case.mask, case.n)).elements.sum()
    link_rate = link_of(ranks, device, min(MESSAGE, case.n << 13))
    rates = rates_of("cuda" if device == "cuda" else "cpu", 2, ranks.size)
    rates = Rates(
        elements * flops / one, link_rate, link_rate, rates.memory, rates.latency, ranks.size, rates.overlapped
    )
    predicted = predict(case, ranks.size, rates, found["chosen"])
    about = {"problem": case._asdict(), "ranks": ranks.size}
    rows = {
        "cuattn-1": {**about, **harness.timing.timed(single)},
        f"cuattn-{ranks.size}": {
            **about,
            **harness.timing.timed(found["samples"]),
            "efficiency": round(one / many / ranks.size, 4),
            "predicted_us": round(predicted * 1e6, 1),
            "predicted_off": round(predicted / many - 1, 3),
            "link_gb_s": round(link_rate / 1e9, 1),
            **{name: value for name, value in found.items() if name != "samples"},
        },
    }
    for name in ranks.peers(case):
        try:
            rows[name] = {**about, **harness.timing.timed(ranks.run(beside, name, case, device, seconds))}
        except Exception as error:  # the row says what happened
            kind = "unsupported" if isinstance(error, Unsupported) else "failed"
            rows[name] = {**about, "status": kind, "reason": f"{type(error).__name__}: {error}"[:400]}
    return rows


@functools.cache
def link_of(ranks: Ranks, device: str, size: int) -> float:
    """Return the rate of messages of a size, measured once."""
    return ranks.run(link, device, size)


def predict(case: Case, ranks: int, rates: Rates, algorithm: str) -> float:
    """Return the seconds that the model gives a case."""
    return _options(case, ranks, rates)[algorithm][0].seconds


def simulate(counts: list[int], lengths: tuple[int, ...] = (1 << 17, 1 << 20)) -> None:
    """Print what many GPUs would do: the plan's model, with the rates that it assumes."""
    rates = rates_of("cuda", 2, 8)
    print(f"assumed: bfloat16, {HEADS} query and {KV_HEADS} key heads of {D}, {rates.flops / 1e12:.0f} TFLOP/s a GPU")
    print(f"on visible elements; {rates.link / 1e9:.0f} GB/s within islands of {rates.island}, between them")
    print(f"{rates.between / 1e9:.0f} GB/s; {rates.latency * 1e6:.0f} us a message")
    heads = ("mask", "N", "direction", "GPUs", "algorithm", "ms", "efficiency", "balance", "GB in")
    print("{:<16} {:>8} {:<9} {:>5} {:<9} {:>9} {:>10} {:>7} {:>7}".format(*heads))
    for mask, n in itertools.product(MASKS, lengths):
        for direction in ("forward", "backward"):
            case = Case(mask, n, HEADS, KV_HEADS, direction)
            base = _options(case, 1, rates)["needed"][0].seconds
            for count in counts:
                options = _options(case, count, rates)
                name = least(options)
                found = options[name][0]
                share = base / found.seconds / count
                print(
                    f"{mask:<16} {n:>8} {direction:<9} {count:>5} {name:<9} {found.seconds * 1e3:>9.2f} {share:>10.3f} "
                    f"{found.balance:>7.2f} {found.received / 1e9:>7.2f}"
                )


def _options(case: Case, ranks: int, rates: Rates) -> Any:
    layout = case.layout(ranks)
    heads = case.kv_heads
    return options_of(layout, layout, visible(case.mask, case.n), case.size, rates, heads, heads)


def points(arguments: Any, ranks: Ranks) -> list[Point]:
    """Return what to measure."""
    runners = ("cuattn-1", f"cuattn-{ranks.size}")
    table = "distributed-peers" if isinstance(ranks.comm, OfProcessGroup) else "distributed"
    return [
        Point(
            case.name.replace("distributed", table, 1),
            (*runners, *ranks.peers(case)),
            functools.partial(measure, ranks, arguments, case),
        )
        for case in cases(TINY if arguments.tiny else LENGTHS)
    ]


def main() -> None:
    """Measure, or simulate."""
    more = {
        "--simulate": dict(nargs="*", type=int, metavar="GPUS", help="print the model's table and stop"),
        "--peers": dict(nargs="*", choices=PEERS, default=PEERS, help="beside which, under torchrun; by default all"),
    }
    arguments = harness.parser(__doc__, "distributed", more).parse_args()
    if arguments.simulate is not None:
        return simulate(arguments.simulate or [2, 4, 8, 16, 64, 256, 1024])
    group = None
    if "RANK" in os.environ:
        import torch

        local = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # messages begin before what fills the GPU
        if arguments.device == "cuda":
            torch.cuda.set_device(local)
            harness.namespace("cuda").cuda.Device(local).use()
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo")
        group = torch.distributed.group.WORLD
    elif arguments.device == "cuda":
        harness.namespace("cuda")  # so that processes take a GPU each
    with connect(group) as comm:
        ranks = Ranks(comm, arguments.device, arguments.peers)
        if group is None:
            print("peers are skipped: they need the process group that torchrun starts")
        if comm.rank:
            return ranks.follow()
        harness.run(arguments, points(arguments, ranks), {"tiny": arguments.tiny, "ranks": ranks.size})
        ranks.finish()


if __name__ == "__main__":
    # Functions are sent to other ranks by name, which must be this module's.
    from bench.distributed import main as run

    run()
