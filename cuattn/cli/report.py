"""The report: versions, devices, what will be used and why, where caches are."""

import os
import pathlib
import platform

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_info

import cuattn
from cuattn.cli import devices
from cuattn.cpu.threads import usable_cores
from cuattn.cuda.compile import cache_dir, nvrtc_version
from cuattn.errors import CompileError


def show(console, device):
    """Print the report.

    Parameters
    ----------
    console : rich.console.Console
        Where to print.
    device : Device
        What the self-check will run on.
    """
    sections = {"Versions": _versions(), "Devices": _devices(), "In use": _in_use(device), "Caches": _caches()}
    for title, facts in sections.items():
        console.print(title, style="bold")
        width = max(map(len, facts))
        for name, value in facts.items():
            console.print(f"  {name:<{width}}  {value}", markup=False, soft_wrap=True)


def _versions():
    """Return the version of everything that takes part, by name."""
    text = "{internal_api} {version}, {num_threads} threads ({filepath})"
    blas = [text.format_map(pool) for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "cuattn": f"{cuattn.__version__} in {pathlib.Path(cuattn.__file__).parent}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "NumPy": f"{np.__version__}, ml_dtypes {ml_dtypes.__version__}",
        "BLAS": "; ".join(blas),
        **_cuda_versions(),
    }


def _cuda_versions():
    """Return the versions of CuPy, NVRTC, CUDA and the driver, or why there are none."""
    hint = 'for a GPU: pip install "cuattn[cuda13]" or "cuattn[cuda12]"'
    try:
        import cupy
    except Exception as error:  # a broken installation raises more than ImportError
        return {"CuPy": f"not importable ({type(error).__name__}: {error}); {hint}"}
    try:
        compiler = f"CUDA {nvrtc_version()}"
    except CompileError:
        compiler = f"cannot be loaded; {hint}"
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
    """Return what calls will run on, with the plan of an example."""
    q = device.put(np.zeros((1, 8, 1024, 64), np.float32 if device.backend == "cpu" else np.float16))
    plan = cuattn.plan(q, q, q)
    return {
        "backend": f"{device.backend}: {device.reason}",
        "kernel": f"{plan.kernel}: {plan.reason}",
        "tile": f"{plan.block_m} x {plan.block_n} for {q.dtype} (1, 8, 1024, 64)",
    }


def _caches():
    """Return the folders of compiled kernels."""
    folder = cache_dir()
    sizes = [file.stat().st_size for file in folder.glob("*.cubin")]
    cupy_folder = os.environ.get("CUPY_CACHE_DIR") or pathlib.Path.home() / ".cupy" / "kernel_cache"
    return {
        "kernels": f"{folder} ({len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB; CUATTN_CACHE_DIR moves it)",
        "CuPy": cupy_folder,
    }
