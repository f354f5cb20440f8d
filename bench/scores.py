"""Functions of scores and masks, biases, softcap and boolean masks beside every peer.

    python -m bench.prepare scores --quick --site SITE     # compiles in many processes
    python -m bench.scores --quick --site SITE             # the most telling cases; then the bars are shown

The table ``scores-tables`` is measured here: what a mask function costs before the first tile is computed.
"""

import functools
import statistics
from time import perf_counter

from bench import harness, inputs, timing
from bench.cases import Case
from bench.harness import Calls, Point, peak
from bench.peers import make
from bench.score_samples import MASKS
from bench.suites import main

LENGTHS, TINY = (131072, 8192), (192,)
TIMES = 3  # that tables are made


def measure(name, n, device):
    """Make the tables of a mask function from nothing, on the host and on the device; FlexAttention's beside them.

    On the device it is the first forward with a mask, less a warm one; all kernels are compiled before.
    """
    case = Case("scores-tables", "forward", 1, 1, 1, n, n, 64, score=name)
    made = inputs.make(case, device)
    wall = functools.partial(_wall, harness.namespace(device))
    (runner,) = make(["cuattn"])
    operands = [runner.array(x) for x in made.operands[:3]]
    samples = []
    for _ in range(1 + TIMES):
        on_host, mask = wall(lambda: harness.placed(inputs.mask_of(case), device))
        calls = Calls(*operands, mask=mask)
        first, warm, *_ = (wall(calls.forward)[0] for _ in range(2))
        samples.append((on_host, max(first - warm, 0.0)))
    with peak(device) as usual:
        calls.forward()
    with peak(device) as most:
        Calls(*operands, mask=harness.placed(inputs.mask_of(case), device)).forward()
    host, on_device = (statistics.median(spent) for spent in zip(*samples[1:], strict=True))
    ours = {"host_ms": 1e3 * host, "device_ms": 1e3 * on_device, "mask_bytes": max(most.bytes - usual.bytes, 0)}
    theirs = {}
    if device == "cuda":
        from bench.peers.flex import own_block_mask

        tables = functools.partial(own_block_mask, case, made.functions({})[1], made.mask.leading, made.q.device)
        tables()
        with peak(device) as most:
            tables()
        theirs = {"flex": {**_row([wall(tables)[0] for _ in range(TIMES)]), "mask_bytes": most.bytes}}
    return {"cuattn": {**_row(map(sum, samples[1:])), **ours, "mask": repr(mask)}, **theirs}


def _row(seconds):
    found = timing.timed(list(seconds))
    return {**found, "rate": round(found["median_us"] / 1e6, 6), "unit": "s"}


def _wall(xp, call):
    """Return the seconds until what a call enqueued is done, and its result."""
    harness.synchronize(xp)
    begin = perf_counter()
    result = call()
    harness.synchronize(xp)
    return perf_counter() - begin, result


def points(arguments):
    """Return one point per mask function and length."""
    runners = ("cuattn", "flex") if arguments.device == "cuda" else ("cuattn",)
    return [
        Point(f"scores-tables/N{n}-{name}/tables", runners, functools.partial(measure, name, n, arguments.device))
        for n in (TINY if arguments.tiny else LENGTHS)
        for name in MASKS
    ]


if __name__ == "__main__":
    raise SystemExit(main("scores"))
