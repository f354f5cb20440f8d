"""Every kernel in a canonical set of variants compiles for three generations without spills or local memory."""

import pytest

from cuattn.cuda.families import launch_sequence
from cuattn.cuda.sm80.forward import Cut
from tests.cuda.cases import CASES
from tests.cuda.nvrtc import kernel_resources
from tests.cuda.sm80.test_forward_plan import DEVICES, problem_of

COMPILED = {device.arch: device for device in (DEVICES["H200"], DEVICES["A100"], DEVICES["RTX 5090"])}

# Variants that may keep a few values in local memory: their products take every register, and what is spilled is the
# walk over key tiles, touched once per tile of thousands of instructions.
SPILL_BYTES = 32
EXCEPTIONS = {
    ("sm_80", "float32 column causal"),
    ("sm_90", "dropout column"),
    ("sm_90", "dropout causal"),
    ("sm_90", "window bottom right"),
    ("sm_90", "float32 dropout column"),
    ("sm_90", "float32 d128 with flushes"),
    ("sm_120", "d80"),
    ("sm_120", "float32 column"),
    ("sm_120", "float32 dropout column"),
}

# What other generations compile beside three widths: every feature once.  sm_90, with the largest tiles, compiles all.
FEATURES = {
    "float16 d128", "softcap", "causal d128", "window", "column", "column d64 causal", "blocks", "dense", "bias row",
    "everything", "dropout", "dropout column", "dropout column causal d256", "float32 dense", "float32 dropout column",
    "float64 dense", "float64 dropout column", "float32 bias", "float64 bias",
}  # fmt: skip


def compiles(case, arch):
    """Return whether a case is compiled for an architecture."""
    plain = not (case.options or case.mask or case.bias) and case.head_dim in (64, 128, 512)
    return arch == "sm_90" or plain or case.name in FEATURES


_COLUMNS = {"mask": 1, "band_left": True, "band_right": True}
UTILITIES = [
    ("util/mask_bounds.cu", {"block_m": 64, "block_n": 96, "rows_per_item": 3, **_COLUMNS}),
    ("util/mask_order.cu", {"block_m": 64, "block_n": 32, "rows_per_item": 1, **_COLUMNS, "band_left": False}),
    ("util/mask_order.cu", {"block_m": 64, "block_n": 96, "rows_per_item": 3, **_COLUMNS, "mask": 16}),
    ("util/mask_bounds.cu", {"block_m": 64, "block_n": 32, "rows_per_item": 1, **_COLUMNS, "mask": 3 + 8 + 16}),
    ("util/mask_alive.cu", {**_COLUMNS, "mask": 8, "block_m": 1, "block_n": 1, "rows_per_item": 1}),
    ("util/mask_bits.cu", {**_COLUMNS, "mask": 16, "block_m": 64, "block_n": 112, "rows_per_item": 2}),
    ("util/mask_bits.cu", {**_COLUMNS, "mask": 4 + 8 + 16, "block_m": 16, "block_n": 32, "rows_per_item": 1}),
    ("util/mask_alive.cu", {**_COLUMNS, "mask": 4 + 8 + 16, "block_m": 1, "block_n": 1, "rows_per_item": 1}),
    *(
        (
            "util/merge.cu",
            {
                "acc": "float",
                "part": part,
                "out": out,
                "row_warps": n,
                "stacked": n > 1,
                "tangents": tangents,
                "width": w,
            },
        )
        for part, out, n, w in (("float", "__nv_bfloat16", 4, 1), ("__half", "__half", 1, 1), ("float", "__half", 1, 4))
        for tangents in (False, True)
    ),
]


def once(jobs_of):
    """Return (name, path, constants, arch) of all generations, a text for the first of them that compiles it."""
    found = {}
    for arch in COMPILED:
        for job in jobs_of(arch):
            found.setdefault(job[1:3], job)
    return [pytest.param(*job, id=" ".join((job[3], job[0], job[1]))) for job in found.values()]


def own_texts(call, arch, monkeypatch):
    """Return path, constants and functions of a call's kernels on an architecture, but for those of sm_90."""

    def texts_on(arch):
        monkeypatch.setattr("cuattn.cuda.call.device_of", lambda number: COMPILED[arch])
        found = [kernel._found for kernel in launch_sequence(*call[:3])._kernels]
        return dict.fromkeys((path, constants, traced) for _, path, _, constants, _, _, traced in found)

    mine = texts_on(arch)
    return mine if arch == "sm_90" else [text for text in mine if text not in texts_on("sm_90")]


def spills(name, path, constants, arch, traced=""):
    """Return what uses more local memory than it may."""
    most = SPILL_BYTES if (arch, name) in EXCEPTIONS else 0
    used = kernel_resources(path, constants, arch, traced)
    return {kernel: each for kernel, each in used.items() if each.stack > most}


def forward_jobs(arch):
    """Return the forward's variants on one architecture."""
    for case in CASES:
        if not compiles(case, arch) and (arch, case.name) not in EXCEPTIONS:
            continue
        load_bytes = 16 if case.head_dim % 8 == 0 else 2
        constants = Cut(problem_of(case), COMPILED[arch]).constants(load_bytes)
        yield case.name, "sm80/fwd.cu", tuple(constants.items()), arch
        if case.name in ("float32 d64", "float32 d128", "float64 d64", "float64 d128"):
            deposits = {**constants, "flush_every": 64}
            yield f"{case.name} with flushes", "sm80/fwd.cu", tuple(deposits.items()), arch


def utility_jobs(arch):
    """Return the small kernels."""
    return [(path, path, tuple(constants.items()), arch) for path, constants in UTILITIES]


@pytest.mark.parametrize(("name", "path", "constants", "arch"), [*once(forward_jobs), *once(utility_jobs)])
def test_spills(name, path, constants, arch):
    assert not spills(name, path, constants, arch)
