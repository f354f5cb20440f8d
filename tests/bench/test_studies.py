"""Every study at toy size on the host, and the counts that it compares measurements with."""

import json
from argparse import Namespace

import numpy as np
import pytest

from bench import (
    block_size,
    block_sparse,
    harness,
    internals,
    kernel_profiles,
    loop_order,
    mask_memory,
    pairs,
    same_bits,
    sparsity,
    traffic,
)
from cuattn import io_model


def toy(**options):
    return Namespace(device="cpu", tiny=True, seconds=0.0, **options)


def measured(study, **options):
    """Measure a study's points at toy size without a file; fail where one fails."""
    points = study.points(toy(**options))
    found = {}
    for point in points:
        rows = point.measure()
        assert set(rows) == set(point.runners)
        for runner, row in rows.items():
            assert row.get("status", "ok") == "ok", row
            found[point.case, runner] = row
        assert point.case.count("/") == 2
    json.dumps(list(found.values()), allow_nan=False)
    return found


def test_the_kernels_bytes_are_the_algorithms_elements():
    for problem in loop_order.PROBLEMS:
        keys, rows = (loop_order.expected(problem, name) for name in ("keys-outside-o16", "queries-outside"))
        model = io_model.flash_forward(problem.n, problem.d, problem.m)
        # l and m are float32: four vectors' accesses per pass count twice.
        vectors = problem.n * (4 * problem.n // problem.block + 2)
        assert keys["expected_read"] + keys["expected_write"] == problem.heads * 2 * (model.total + vectors)
        model = io_model.swapped_forward(problem.n, problem.d, problem.m)
        assert rows["expected_read"] + rows["expected_write"] == problem.heads * 2 * (model.total + 2 * problem.n)


def test_the_study_kernels_compile_without_spills():
    pytest.importorskip("cupy")
    from tests.cuda.nvrtc import resources

    constants, _ = loop_order.geometry(loop_order.PROBLEMS[0], "keys-outside")
    found = resources(internals.study_text("loop_order.cu", constants), "sm_80")
    assert set(found) == {"attention_keys_outside", "attention_queries_outside"}
    assert not any(used.spill_stores for used in found.values())


def test_traffic_counts_every_study_once():
    calls = traffic.calls()
    assert len({call.name for call in calls}) == len(calls)
    assert {call.study for call in calls} == {"theorem-2", "theorem-5", "proposition-4", "beyond-l2"}


def test_expected_reads_are_those_of_the_swapped_loops():
    assert block_size.expected(3, 4096, 64, 128) == 3 * 2 * io_model.swapped_forward(4096, 64, 4 * 64 * 128).reads


def test_block_masks_have_their_density():
    for density in block_sparse.DENSITIES:
        blocks = block_sparse.block_mask(4096, density).blocks
        assert (blocks.mean(axis=1) == max(density, 1 / 32)).all()
        assert blocks.diagonal().all()


def test_block_sparse_runs_on_the_host():
    assert len(measured(block_sparse)) == 2 * len(block_sparse.DENSITIES)


def test_column_and_dense_masks_have_the_same_bits():
    rows = measured(same_bits)
    assert len(rows) == 12
    assert sum(row["same_flags"] is not None for row in rows.values()) == 3
    for row in rows.values():
        assert all(row["same"].values())
        assert row["repeated"]
        assert row["largest"] == 0


@pytest.fixture
def few_tries(monkeypatch):
    monkeypatch.setattr(sparsity, "TRIES", 150)


def test_buckets_hold_masks_of_their_sparsity(few_tries):
    for kind, (fewest, most, lowest) in sparsity.KINDS.items():
        found = sparsity.buckets(kind, 2048, 1)
        rhos = [rho for rho, _ in found]
        assert rhos == sorted(rhos)
        assert len({int((rho - lowest) / sparsity.WIDTH) for rho in rhos}) == len(rhos)
        for rho, sample in found:
            assert sum(sample.lengths) == 2048
            assert fewest - 1 <= len(sample.lengths) <= most  # a document may come out empty
            assert sample.column_mask().block_sparsity() == rho


def test_figure_4a_runs_on_the_host_and_checks_itself(few_tries):
    points = list(sparsity.points(toy(samples=1)))
    assert all(point.measure()["cuattn"]["median_us"] > 0 for point in (points[0], points[-1]))
    q, k, v, do = harness.random_arrays(np, 4, sparsity.TINY, np.float32)
    _, sample = sparsity.buckets("document", sparsity.TINY[1], 1)[0]
    with pytest.raises(ValueError, match="from the textbook's"):
        sparsity.check(sample, q, k, v, do)


def test_a_column_mask_is_linear_and_a_dense_one_is_not():
    rows = measured(mask_memory)
    (a, b) = (row for (_, runner), row in rows.items() if runner == "dense")
    assert b["mask_bytes"] / a["mask_bytes"] == pytest.approx(4, rel=0.01)
    for (_, runner), row in rows.items():
        if runner != "dense":
            assert row["vectors_bytes"] == 16 * row["problem"]["n"] <= row["mask_bytes"]


def test_profiled_calls_are_calls():
    pytest.importorskip("torch")  # whose tensors the cases are made of
    rows = measured(kernel_profiles)
    assert len(rows) == len(kernel_profiles.CALLS) // 2 and all(row["median_us"] > 0 for row in rows.values())


def test_a_profile_says_what_matters():
    kernel = dict.fromkeys(kernel_profiles.METRICS, 10.0)
    kernel |= {"kernel": "k", "seconds": 2e-3, "stall_wait": 30.0, "stall_barrier": 10.0, "shared_wavefronts": 40.0}
    kernel |= {f"stall_{name}": 0.0 for name in kernel_profiles.STALLS if name not in ("wait", "barrier")}
    found = kernel_profiles.summary(kernel)
    assert found["stalls"] == {"wait": 0.75, "barrier": 0.25}
    assert (found["milliseconds"], found["bank_conflicts"], found["tensor_pct"]) == (2.0, 0.5, 10.0)


@pytest.mark.parametrize("operation", ["matvec", "softmin", "gradient"])
def test_sums_over_pairs_are_the_chunked_ones(operation):
    case = pairs.Case(operation, 5, 60, 2.0, dtype="float64")
    given = pairs.operands(case, np)
    for own, peer in zip(pairs.ours(case, *given)(), pairs.chunked(case, *given)(), strict=True):
        np.testing.assert_allclose(own, peer, atol=1e-9)


@pytest.mark.filterwarnings("ignore:float32 products")
def test_pairs_at_toy_size():
    for point in pairs.points(toy()):
        rows = point.measure()
        assert rows["cuattn"]["error"] < 0.05 and rows["cuattn"]["rate"] > 0
        json.dumps(list(rows.values()), allow_nan=False)
