"""Cases: unique names, work counted as the papers count it, selection."""

import pytest

from bench.cases import TABLES, Case, select
from bench.harness import matches


def dense(**options):
    return Case("t", options.pop("direction", "forward"), 4, 16, 16, 4096, 4096, 128, **options)


def test_names_are_unique_over_all_tables():
    names = [case.name for case in select(TABLES)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("case", "rho", "milliseconds", "rate"),
    [  # measured times and rates from independent scripts
        (dense(), 0.0, 0.833, 660),
        (dense(causal=True), 0.0, 0.519, 530),
        (dense(direction="backward"), 0.0, 2.445, 562),
        (Case("t", "forward", 16, 32, 32, 8192, 8192, 128, mask="full"), 0.0, 36.801, 478),
        (Case("t", "forward", 16, 32, 32, 8192, 8192, 128, mask="sliding_window"), 0.924, 2.979, 447),
        (Case("t", "backward", 4, 32, 32, 32768, 32768, 128, mask="causal"), 0.498, 149.198, 592),
    ],
)
def test_rates_agree_with_known_ones(case, rho, milliseconds, rate):
    assert case.unit == "TFLOP/s"
    assert case.rate(milliseconds / 1e3, rho) == pytest.approx(rate, rel=0.01)


def test_a_mask_counts_by_rho_and_not_as_causal():
    assert dense(mask="causal").flops(0.5) == dense(causal=True).flops() == dense().flops() / 2


def test_decode_counts_bytes_and_host_cost_counts_microseconds():
    case = select(["decode"])[0]
    key_bytes = 65536 * 8 * 128 * 2
    assert case.unit == "TB/s"
    assert case.rate(1.0) * 1e12 == pytest.approx(2 * key_bytes + 2 * 32 * 128 * 2)
    host = select(["host"])[0]
    assert (host.unit, host.rate(20e-6)) == ("us", pytest.approx(20))


def test_the_tables_have_the_papers_sizes():
    sweep = select(["dense"], directions=["forward"])
    assert len(sweep) == 24
    assert {case.batch * case.n_keys for case in sweep if case.n_keys <= 16384} == {16384}
    assert {case.heads * case.head_dim for case in sweep} == {2048}
    for n, name in ((8192, "masks-8k"), (32768, "masks-32k"), (131072, "masks-128k")):
        cases = select([name], directions=["backward"])
        assert len(cases) == 12
        assert {(case.batch * case.n_keys, case.heads * case.head_dim, case.n_keys) for case in cases} == {
            (131072, 4096, n)
        }


def test_only_takes_patterns_and_words():
    def chosen(*patterns):
        return [case for case in select(["dense"]) if matches(case.name, patterns)]

    assert [case.name for case in chosen("dense/d64-N1024-causal/forward")] == ["dense/d64-N1024-causal/forward"]
    assert {case.head_dim for case in chosen("d256")} == {256}
    assert len(chosen("d64", "d256")) == 32
    assert chosen("nothing") == []
    assert len(chosen()) == len(chosen("dense/*")) == 48


def test_cases_of_one_problem_are_recognised():
    plain, exact = dense(direction="backward"), dense(direction="backward", deterministic=True)
    assert plain.problem == exact.problem == dense().problem
    assert plain.problem != dense(causal=True).problem
