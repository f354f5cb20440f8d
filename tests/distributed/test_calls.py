"""Any problem, dealt out in any way, is what one device computes."""

import numpy as np
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.distributed import spawn
from cuattn.errors import ArgumentError
from tests.distributed.layouts import layouts, run
from tests.strategies import cases
from tests.test_api import check

ALGORITHMS = (None, "ring", "needed", "gather", "combine", "heads", "2d")
GRADIENTS = ("dq", "dk", "dv", "dbias")
PHASES = (Phase.explicit, Phase.generate)  # to shrink threads takes minutes


def dealt(data, case, size):
    """Draw layouts of a case's rows and keys."""
    unit = 16 if case.options.get("dropout_p") else 1
    return [data.draw(layouts(x.shape[-2], size, unit)) for x in (case.q, case.k)]


@settings(max_examples=60, phases=PHASES)
@given(data=st.data(), case=cases(), size=st.integers(2, 4), algorithm=st.sampled_from(ALGORITHMS))
def test_any_split_matches_the_oracle(data, case, size, algorithm):
    rows, keys = dealt(data, case, size)
    assume(case.bias is None or case.bias.shape[-2] > 1 or max(rows.lengths) != 1)  # is it of one row, or of any?
    try:
        results = spawn(run, case, rows, keys, algorithm, ranks=size)
    except ArgumentError as error:  # ranks do not divide the heads
        assert "algorithm is" in str(error) and algorithm in ("heads", "2d")
        return
    for fwd, grads in results[1:]:
        for one, other in zip((*fwd[:3], *grads), (*results[0][0][:3], *results[0][1]), strict=True):
            np.testing.assert_array_equal(one, other)
    fwd, grads = results[0]
    assert (
        fwd.o.dtype == case.q.dtype and fwd.rng_state == cuattn.forward(*case.arguments()[0], **case.arguments()[1])[3]
    )
    check(case, fwd[:3])
    check(case, grads, GRADIENTS)
