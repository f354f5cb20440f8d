"""The kernels of pairs: how they are launched, and what they compile to."""

from types import SimpleNamespace

import numpy as np
import pytest

from cuattn.cuda import source
from cuattn.pairwise import device, near, tensor_cores
from cuattn.pairwise.functions import FUNCTIONS
from cuattn.pairwise.pairs import Wanted
from tests.cuda.nvrtc import compile_log, kernel_resources

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
LOGS = np.zeros(1)
CASES = {
    "matvec": (F32, "gaussian", 3, 1, Wanted(sums=True)),
    "softmin": (F32, "gaussian", 3, 0, Wanted(key_log=LOGS, logs=True)),
    "gradient": (F32, "matern52", 8, 8, Wanted(slopes=True, sums=True)),
    "softmin gradient": (F32, "gaussian", 3, 1, Wanted(row_log=LOGS, key_log=LOGS, slopes=True, sums=True)),
    "many coordinates": (F32, "gaussian", 32, 1, Wanted(sums=True)),
    "their gradient": (F32, "matern52", 32, 1, Wanted(slopes=True, sums=True)),
    "float64": (F64, "laplacian", 8, 8, Wanted(slopes=True, sums=True)),
}


def constants(case):
    dtype, function, dim, columns, wanted = CASES[case]
    return tuple(device.constants_of(dtype, FUNCTIONS[function].number, dim, columns, wanted).items())


def product_constants(case, dim, hopper=False):
    _, function, _, columns, wanted = CASES[case]
    pairs = SimpleNamespace(dim=dim, function=FUNCTIONS[function], precision=None)
    if columns:
        wanted = wanted._replace(v=np.zeros((1, columns)))
    return tuple(tensor_cores.constants_of(pairs, wanted, hopper).items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_spills(case, arch):
    if arch != "sm_90" and case != "gradient":
        pytest.skip("one of each is enough elsewhere")
    (used,) = kernel_resources("pairwise/rows.cu", constants(case), arch).values()
    assert (used.stack, used.spill_stores) == (0, 0)


def test_rows_in_order_spill_little():
    """A few numbers, outside of the loop over keys."""
    used = kernel_resources("pairwise/near.cu", tuple(near.CONSTANTS.items()), "sm_90")["pairwise_near"]
    assert used.spill_stores <= 16


@pytest.mark.parametrize("dim", [16, 48, 64, 128])
@pytest.mark.parametrize("case", ["matvec", "softmin"])
def test_products_spill_nothing(case, dim):
    for used in kernel_resources("pairwise/products.cu", product_constants(case, dim), "sm_90").values():
        assert (used.stack, used.spill_stores) == (0, 0)
    if dim > 16:
        for used in kernel_resources("pairwise/warpgroups.cu", product_constants(case, dim, True), "sm_90a").values():
            assert (used.stack, used.spill_stores) == (0, 0)


@pytest.mark.parametrize(("dim", "most"), [(16, 32), (64, 64), (80, 200), (128, 200)])
@pytest.mark.parametrize("case", ["gradient", "softmin gradient"])
def test_slopes_spill_little(case, dim, most):
    """The sums of a long row leave little room; what is spilled then is a few numbers a tile of keys."""
    used = kernel_resources("pairwise/slopes.cu", product_constants(case, dim), "sm_90")["pairwise_slopes"]
    assert used.spill_stores <= most
    if dim > 16:
        for used in kernel_resources(
            "pairwise/warpgroup_slopes.cu", product_constants(case, dim, True), "sm_90a"
        ).values():
            assert (used.stack, used.spill_stores) == (0, 0)


@pytest.mark.parametrize(
    ("path", "struct", "mirror", "known"),
    [
        ("pairwise/rows.cu", "PairwiseParams", device.PARAMS, constants("matvec")),
        ("pairwise/near.cu", "NearParams", near.PARAMS, near.CONSTANTS),
        ("pairwise/order.cu", "OrderParams", near.ORDER, {"dim": 3, "log": "double"}),
        ("pairwise/products.cu", "ProductParams", tensor_cores.PARAMS, product_constants("softmin", 64)),
        ("pairwise/prepare.cu", "PrepareParams", tensor_cores.PREPARE, product_constants("softmin", 64)),
    ],
)
def test_arguments_are_mirrored(path, struct, mirror, known):
    checks = [f"static_assert(sizeof({struct}) == {mirror.itemsize});"]
    for name in mirror.names:
        checks.append(f"static_assert(__builtin_offsetof({struct}, {name}) == {mirror.fields[name][1]});")
    compile_log(source.build(path, dict(known)) + "\n".join(checks), "sm_90")


def test_functions_have_the_kernels_numbers():
    text = source.flatten("pairwise/functions.cuh")
    assert "enum Function { " + ", ".join(FUNCTIONS) + " };" in text
    assert [function.number for function in FUNCTIONS.values()] == list(range(len(FUNCTIONS)))


@pytest.mark.parametrize("row_blocks", [1, 3, 100, 196, 977, 5000])
def test_blocks_fill_waves(row_blocks):
    parts = device.parts_of(row_blocks, 10**6, 132 * 6)
    waves = row_blocks * parts / (132 * 6)
    assert parts == 1 or parts == 32 or waves / np.ceil(waves) >= 0.9
    assert device.parts_of(row_blocks, 100, 132 * 6) == 1
