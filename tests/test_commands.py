"""Every command that the README and the guides show runs: here, or in .ci; those for a GPU list what they would do."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", ROOT / "kernels" / "README.md"]
PAGES += sorted((ROOT / "cuattn").rglob("*.md"))
ELSEWHERE = (
    *("pip install", "pytest", "python .site/build.py", "python -m bench.fuzz"),  # by .ci/run
    "python -m tests.catalogue",  # by test_catalogue.py
    "mpiexec --allow-run-as-root --oversubscribe",  # options of a command
)
MORE = {  # said beside a command, so that it is a matter of seconds and of no GPU
    "python -m bench.distributed": "--simulate 2",
    "python -m bench.gallery": "chunks --folder .",
    "python -m bench.hopper": "--list",
    "python -m bench.redraw": "--text --folder .",
    "python -m bench.reproduce": "--list",
    "python -m bench.sanitize": "--help",
    "python -m bench.traffic": "--help",
}


def shown():
    """Return the commands of blocks without a language, and of the guides those amid the text."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S):
            found += [] if language else [line.partition("#")[0] for line in block.splitlines()]
        if page.parent.name != "bench":  # whose text is about measurements
            text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
            found += re.findall(r"`((?:python|cuattn|mpiexec) [^`|]*)`", text)
    lines = dict.fromkeys(re.sub(r"^cuattn\b", "python -m cuattn", " ".join(line.split())) for line in found)
    lines.pop("python -m cuattn")  # by .ci/wheel
    return [line for line in lines if line and not line.startswith(ELSEWHERE)]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the files that the commands read."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 300, 16), np.float32)
    np.savez(tmp_path / "in.npz", q=q, k=k, v=v, do=do)
    guide = (ROOT / "cuattn" / "distributed" / "README.md").read_text()
    (program,) = re.findall(r"^```python\n([^`]*connect\(\)[^`]*)^```", guide, flags=re.M)
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("command", shown())
def test_commands(command, folder):
    words = shlex.split(f"{command} {MORE[' '.join(command.split()[:3])] if 'bench' in command else ''}")
    if words[0] == "mpiexec":
        pytest.importorskip("mpi4py")
        words[0] = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if words[0] is None:
            pytest.skip("needs mpiexec")
    words = [{"python": sys.executable}.get(word, word) for word in words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    if "--output" in words:
        names = {"o", "l", "m", *(("dq", "dk", "dv") if "--backward" in words else ())}
        assert names <= set(np.load(folder / "out.npz"))


def test_commands_are_found():
    some = (
        "python -m cuattn --no-check",
        "python -m cuattn --version",
        "python -m bench.redraw",
        "mpiexec -n 8 python program.py",
    )
    assert set(some) <= set(shown())
