"""What is launched for a score function and for the gradients of its arrays."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn.cuda import families
from cuattn.cuda.sm80.score_gradients import ScoreGradients
from cuattn.errors import UnsupportedError
from cuattn.problem import Place
from tests.cuda import scores
from tests.cuda.cases import Case, case_of
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared, scored
from tests.cuda.scores import Score
from tests.cuda.sm80.test_forward_plan import DEVICES, STATIC_BYTES
from tests.cuda.test_sequence import check_memory

PLAIN = Case("plain", n_queries=150, n_keys=200)
T = np.zeros((7, 400), np.float32)


def call_of(score, case=PLAIN, operation="backward", **more):
    """Return a call with a function, for the portable kernels."""
    return scored(prepared(case, operation, kernel="sm80", **more), score)


def launched(driver, call, **more):
    """Return what a call launches."""
    return driver.run(families.launch_sequence(*call[:3]), call.addresses, call.masks, call.state, **more)[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", scores.SCORES)
@pytest.mark.parametrize("case", [PLAIN, case_of("everything"), case_of("float64 d64")], ids=lambda case: case.name)
def test_memory(case, name, deterministic, driver):
    score = scores.SCORES[name](case)
    check_memory(driver, call_of(score, case, "forward"))
    check_memory(driver, call_of(score, case, deterministic=deterministic))


@pytest.mark.parametrize(
    ("function", "passes"),
    [
        (lambda s, b, h, i, j, x: s * x[h, 0], [(0, 0, 1, 0, 0)]),
        (lambda s, b, h, i, j, x: s + x[b, j] + x[h, b], [(0, 1, 1, 0, 0)]),
        (lambda s, b, h, i, j, x: s + x[b, j] * x[h, i], [(0, 1, 0, 0, 0), (1, 1, 0, 0, 0)]),
        (lambda s, b, h, i, j, x: s + x[h, i - j] + x[0, 0], [(2, 1, 1, 0, 0)]),
        (lambda s, b, h, i, j, x: s + x[i // 2, j // 2], [(0, 0, 0, 0, 1)]),
        (lambda s, b, h, i, j, x: s + x[h, i // 2 - j // 2] + x[h, i], [(1, 1, 0, 0, 1)]),
        (lambda s, b, h, i, j, x: s + sum(x[n, j] for n in range(6)), [(0, 4, 0, 0, 0), (0, 2, 0, 0, 0)]),
        (
            lambda s, b, h, i, j, x: s + x[(i * j) % 7, h] + x[i % 7, b] * x[j % 7, b],
            [(1, 1, 0, 1, 0), (0, 1, 0, 0, 0)],
        ),
        (lambda s, b, h, i, j, x: np.where(x[h, i] > 0, s, 0.5 * s), []),
    ],
)
def test_passes(function, passes):
    """Each walk that is needed is walked once, with what shares more or less along it."""
    call = call_of(Score(function, (T,)))
    made = ScoreGradients(call.problem, (64, 64)).passes
    assert [(x.walk, *map(len, x[1:])) for x in made] == passes


def test_what_is_not_read_has_gradients_of_zero(driver):
    """No sums are added to them, and nothing else is written there."""
    function = Score(lambda s, b, h, i, j, x, y: np.where(x[h, i] > 0, s, 0.5 * s), (T, T[:0]))
    done = launched(driver, call_of(function))
    last = [each for each in done if each.path == "util/score_sums.cu"]
    assert len(last) == 1 and last[0].constants["gathers"] == 0 and not last[0].constants["adds"]
    assert last[0].argument["result"] and last[0].argument["size"] == T.size


def test_an_order_that_cannot_be_kept_is_refused(driver):
    score = Score(lambda s, b, h, i, j, x: s + x[h, (i * j) % 7], (T,))
    for more in ({"deterministic": True}, {"deterministic": True, "precision": None}):
        call = call_of(score, **more)
        with pytest.raises(
            UnsupportedError, match=r"deterministic is True and score .*\[h, .*expected indices made of"
        ):
            families.plan(*call[:3])
    assert "no fixed order" in str(families.plan(*call_of(score)[:3]))
    own = Score(lambda s, b, h, i, j, x: s + x[i, j], (np.zeros((150, 200)),))
    assert "pass(es) over the scores, in a fixed order" in str(families.plan(*call_of(own, deterministic=True)[:3]))


def test_more_reads_than_a_kernel_counts_are_refused(driver):
    call = call_of(Score(lambda s, b, h, i, j, x: s + sum(x[h, n] for n in range(11)), (T,)))
    with pytest.raises(UnsupportedError, match="11 places; expected at most 10"):
        families.plan(*call[:3])


def test_numbers_and_places_are_launch_arguments(driver):
    """Another number and another place change words of the same launches."""
    score = scores.softcap(PLAIN)
    call = call_of(score, operation="forward")
    made = families.launch_sequence(*call[:3])
    found = [
        driver.run(made, call.addresses, place=place, numbers=numbers)[0][-1].argument
        for numbers, place in (((4.0,), None), ((9.0,), Place(1, 2, 8, 100, 300)), ((4.0,), None))
    ]
    fields = [name for name in found[0].dtype.names if name.startswith("traced.number")]
    assert fields and any(found[0][name] != found[1][name] for name in fields)
    assert all(found[0][name] == found[2][name] for name in fields)
    assert [int(found[1][f"dropout.{name}"]) for name in ("batch", "head", "row", "key")] == [1, 2, 100, 300]
    assert not any(found[2][f"dropout.{name}"] for name in ("batch", "head", "row", "key"))


def test_an_identity_costs_nothing(driver):
    call = call_of(Score(lambda s, b, h, i, j: s), operation="forward")
    (only,) = launched(driver, call)
    assert not only.constants["score"] and not only.constants["prescaled"]


def test_packed_groups_stay_packed(driver):
    case = Case("packed", heads=8, kv_heads=2, n_queries=3, n_keys=1500, head_dim=128)
    (only,) = launched(driver, call_of(scores.alibi(case), case, "forward"))
    assert only.constants["pack"] == 4 and only.constants["score"]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_passes_fit_the_card(device, driver, monkeypatch):
    monkeypatch.setattr("cuattn.cuda.call.device_of", lambda number: device)
    for name in ("d64", "d256", "d 512", "float32 d128", "float64 d128", "float32 d 512"):
        case = case_of(name)
        for each in launched(driver, call_of(scores.head_temperature(case), case)):
            assert each.shared_bytes + STATIC_BYTES <= device.shared_bytes, (name, each.path)
