"""The report: versions, devices, what will be used and why, where caches are."""

import importlib.util
import os
import pathlib
import platform
import textwrap
from itertools import zip_longest

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_info

import cuattn
from cuattn.cli import devices
from cuattn.cpu.threads import usable_cores
from cuattn.cuda.compile import cache_dir, nvrtc_version
from cuattn.errors import CompileError

_GPU_HINT = 'pip install "cuattn[cuda13]" or "cuattn[cuda12]", one of the two'


def show(console, device):
    """Print the report.

    Parameters
    ----------
    console : rich.console.Console
        Where to print.
    device : Device
        What the self-check will run on.
    """
    _print(console, {"Versions": _versions(), "Devices": _devices(), "In use": _in_use(device), "Caches": _caches()})


def show_next(console, device, well):
    """Print what to do after the report.

    Parameters
    ----------
    console : rich.console.Console
        Where to print.
    device : Device
        What was reported on.
    well : bool
        Whether the self-check found all as it should be.
    """
    steps = {} if well else {"tell us": "open an issue with all of this output"}
    if importlib.util.find_spec("cupy") is None:
        steps["on a GPU"] = _GPU_HINT
    steps |= {
        "in Python": "import cuattn; o = cuattn.attention(q, k, v, is_causal=True)",
        "why so": "print(cuattn.plan(q, k, v)): kernel, tiles, memory and reasons",
        "on files": "cuattn run in.npz --output out.npz; cuattn run --help",
    }
    _print(console, {"Next": steps})


def _print(console, sections):
    """Print facts by name under titles; words longer than a line, paths, are not cut."""
    for title, facts in sections.items():
        console.print(title, style="bold")
        width = max(map(len, facts))
        for name, value in facts.items():
            text = textwrap.wrap(
                str(value), max(console.width - width - 4, 20), break_long_words=False, break_on_hyphens=False
            )
            for label, line in zip_longest([name], text, fillvalue=""):
                console.print(f"  {label:<{width}}  {line}", markup=False, soft_wrap=True)


def _versions():
    """Return the version of everything that takes part, by name."""
    text = "{internal_api} {version}, {num_threads} threads"
    blas = [text.format_map(pool) for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "cuattn": f"{cuattn.__version__} in {pathlib.Path(cuattn.__file__).parent}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "NumPy": f"{np.__version__}, ml_dtypes {ml_dtypes.__version__}",
        "BLAS": "; ".join(blas) or "not recognised",
        **_cuda_versions(),
    }


def _cuda_versions():
    """Return the versions of CuPy, NVRTC, CUDA and the driver, or why there are none."""
    try:
        import cupy
    except Exception as error:  # a broken installation raises more than ImportError
        return {"CuPy": f"not importable ({type(error).__name__}: {error})"}
    try:
        compiler = f"CUDA {nvrtc_version()}"
    except CompileError:
        compiler = f"cannot be loaded; {_GPU_HINT}"
    driver = cupy.cuda.runtime.driverGetVersion()
    driver = f"for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "none"
    return {"CuPy": cupy.__version__, "NVRTC": compiler, "driver": driver}


def _devices():
    """Return the CPU and the GPUs."""
    found = {"CPU": f"{platform.machine()}, {usable_cores()} of {os.cpu_count()} cores usable"}
    cupy, _ = devices.cupy_with_gpu()
    for index in range(cupy.cuda.runtime.getDeviceCount() if cupy else 0):
        facts = cupy.cuda.runtime.getDeviceProperties(index)
        found[f"GPU {index}"] = (
            f"{facts['name'].decode()}, sm_{facts['major']}{facts['minor']}, {facts['multiProcessorCount']} "
            f"multiprocessors, {facts['totalGlobalMem'] / 2**30:.0f} GiB"
        )
    return found


def _in_use(device):
    """Return what calls will run on, with the plans of an example."""
    shape, dtype = ((1, 8, 1024, 64), "float32") if device.backend == "cpu" else ((1, 8, 4096, 128), "bfloat16")
    q = device.put(np.zeros(shape, dtype))
    facts = {"backend": f"{device.backend}: {device.reason}", "example": f"{dtype} {shape}"}
    for direction in ("forward", "backward"):
        plan = cuattn.plan(q, q, q, direction=direction)
        facts[direction] = f"{plan.kernel}, tile {plan.block_m} x {plan.block_n}: {plan.reason}"
    return facts


def _caches():
    """Return the folders of compiled kernels."""
    folder = cache_dir()
    sizes = [file.stat().st_size for file in folder.glob("*.cubin")]
    cupy_folder = os.environ.get("CUPY_CACHE_DIR") or pathlib.Path.home() / ".cupy" / "kernel_cache"
    return {
        "kernels": f"{folder} ({len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB; see CUATTN_CACHE_DIR)",
        "CuPy": cupy_folder,
    }
