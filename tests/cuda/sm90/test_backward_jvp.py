"""Hopper's gradients along tangents: what they take, what they launch, and that they compile without spills."""

import pytest

from cuattn.cuda import source
from cuattn.cuda.families import _choose, launch_sequence
from tests.cuda.cases import BF16, F16, Case, bias_of, blocks_of, columns_of, sized
from tests.cuda.nvrtc import compile_log, kernel_resources
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared

CAUSAL = {"is_causal": "top_left"}
CASES = [
    sized("d64", 300, 333),
    sized("d128", 300, 333, 128, dtype=F16),
    sized("columns", 500, 600, mask=columns_of),
    sized("d128 columns", 500, 600, 128, mask=columns_of),
    sized("d128 dropout causal", 400, 400, 128, options={"dropout_p": 0.3, "rng": 42, **CAUSAL}),
    sized("blocks", 300, 400, 128, mask=blocks_of(24, 40)),
    sized("softcap", 300, 400, options={"softcap": 3.0}),
    sized("columns parts", 1100, 400, mask=columns_of),
    sized("d128 columns parts", 1100, 2100, 128, mask=columns_of),
]

EXCEPTIONS = {"blocks": 32}  # bytes that a thread may spill where it looks at blocks


@pytest.mark.parametrize(
    ("case", "deterministic"),
    [(CASES[0], True), *((case, False) for case in CASES)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_kernels_compile(case, deterministic, driver):
    """Neither spills, but few, nor products one by one; a block has the shared memory that the kernel lays out."""
    call = prepared(case, "double_backward", kernel="sm90", deterministic=deterministic)
    found = [kernel._found for kernel in launch_sequence(*call[:3])._kernels]
    found = [(path, constants, size) for _, path, _, constants, size, *_ in found if "jvp" in path]
    one_pass = dict(found[1][1])["one_pass"]
    second = "sm90/bwd_jvp_convert.cu" if one_pass else "sm90/bwd_jvp.cu"
    assert [path for path, *_ in found] == ["sm90/bwd_jvp_rows.cu", "sm90/bwd_jvp.cu", second]
    for path, constants, size in found:
        used = kernel_resources(path, constants, "sm_90a")
        assert all(each.stack <= EXCEPTIONS.get(case.name, 0) for each in used.values()), used
        if size:
            check = f'static_assert(sm90::moved::shared_bytes <= {size}, "it has too little");'
            compile_log(f"{source.build(path, dict(constants))}\n{check}", "sm_90a", path)


@pytest.mark.parametrize(
    "more", [{"options": {"softcap": 3.0, "dropout_p": 0.3, "rng": 1}}, {"mask": blocks_of(64, 64), "options": CAUSAL}]
)
def test_gradients_whose_dq_takes_a_pass_of_its_own_come_first(more, driver):
    call = prepared(sized("crowded", 300, 300, 80, **more), "backward_jvp", kernel="sm90")
    done, _ = driver.run(launch_sequence(*call[:3]), call.addresses, call.masks, call.state, capturing=True)
    paths = [each.path for each in done if getattr(each, "path", "util").startswith("sm90")]
    tangents = ["sm90/bwd_jvp_rows.cu", "sm90/bwd_jvp.cu", "sm90/bwd_jvp.cu"]
    assert paths == ["sm90/bwd.cu", "sm90/bwd_rows.cu", *tangents]


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_launches(case, driver):
    call = prepared(case, "double_backward", kernel="sm90", deterministic=True)
    (rows, by_rows, by_keys), _ = driver.run(launch_sequence(*call[:3]), call.addresses)
    heads = call.problem.instances
    assert (by_rows.constants["block_m"], by_keys.constants["block_n"]) == (128, 128)
    assert by_rows.grid == (heads * -(-case.n_queries // 128),)
    assert by_keys.grid == (heads * -(-case.n_keys // 128),)
    assert rows.argument["rows"] == by_rows.argument["rows"] == by_keys.argument["rows"] != 0
    for launch in (by_rows, by_keys):
        owners, others = {"q", "do", "tq", "tdo"}, {"k", "v", "tk", "tv"}
        boxes = dict(zip(("q", "k", "v", "do", "tq", "tk", "tv", "tdo"), launch.maps, strict=True))
        block_m, block_n = launch.constants["block_m"], launch.constants["block_n"]
        assert all(boxes[name].box_rows == block_m for name in owners)
        assert all(boxes[name].box_rows == block_n for name in others)


@pytest.mark.parametrize(("heads", "parts"), [(8, 4), (80, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_first_tiles_are_divided_where_masks_may_make_them_far_longer(heads, parts, deterministic, driver):
    case = sized("columns", 4000, 4000, batch=(1,), heads=heads, kv_heads=4, mask=columns_of)
    call = prepared(case, "double_backward", kernel="sm90", deterministic=deterministic)
    launches, _ = driver.run(launch_sequence(*call[:3]), call.addresses, call.masks, capturing=True)
    rows, *owners = [x for x in launches if "bwd_jvp" in getattr(x, "path", "") and "convert" not in x.path]
    of_keys = 4 if 4 * 32 <= 16 * 132 else 1
    expected = [(4, of_keys)] if not deterministic else [(heads, parts), (4, of_keys)]
    assert [(x.grid[0], x.constants["first_parts"]) for x in owners] == [(n * (32 + p - 1), p) for n, p in expected]
    assert rows.argument["splits"] == 2 * max(n for n, p in expected if p > 1)
    assert len({x.argument["counters"] for x in (rows, *owners)}) == 1


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (sized("d256", 300, 300, 256), "head dimensions up to 128"),
        (sized("bias", 300, 300, bias=bias_of(1, 1, 1, 1, dtype=BF16)), "no gradients of biases"),
        (sized("short", 100, 100), "fewer than its tiles"),
        (Case("d 60", head_dim=60), "8 elements"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_others_are_left_to_the_portable_kernels(case, reason, driver):
    call = prepared(case, "double_backward")
    _, kernel, notes = _choose(*call[:3])
    assert kernel == "sm80"
    assert reason in " ".join(notes)
