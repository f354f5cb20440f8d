"""The wheel ships every kernel source and works from a fresh environment."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cuattn

ROOT = Path(__file__).resolve().parent.parent
KERNELS = sorted(path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*") if path.is_file())


def printed(*command, cwd=ROOT):
    """Return what a program prints."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel with the build backend itself; no network is needed."""
    out = tmp_path_factory.mktemp("wheel")
    code = f"import hatchling.build as b; print(b.build_wheel({str(out)!r}))"
    return out / printed(sys.executable, "-c", code).splitlines()[-1]


def test_wheel_holds_every_kernel_file(wheel):
    assert KERNELS, "kernels/ is empty"
    assert {path.suffix for path in KERNELS} <= {".cu", ".cuh", ".md"}, "kernels/ holds CUDA source, and its guide"
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in KERNELS:
        assert f"cuattn/kernels/{path.as_posix()}" in names
    assert "cuattn/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "kernels/"))]


def test_wheel_requires_four_packages_and_no_cupy(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", archive.read(metadata).decode(), flags=re.M)
    assert sorted(line.replace("-", "_") for line in lines) == ["ml_dtypes", "numpy", "rich", "threadpoolctl"]


def test_the_version_has_one_source(wheel):
    archive = zipfile.ZipFile(wheel)
    place = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
    assert f"\nVersion: {cuattn.__version__}\n" in archive.read(f"{place}METADATA").decode()
    assert "cuattn = cuattn.cli:main" in archive.read(f"{place}entry_points.txt").decode()
    assert f"\nversion: {cuattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {cuattn.__version__} " in (ROOT / ".github" / "CHANGELOG.md").read_text()


def test_the_sdist_holds_what_builds_and_tests_it(tmp_path):
    code = f"import hatchling.build as b; print(b.build_sdist({str(tmp_path)!r}))"
    with tarfile.open(tmp_path / printed(sys.executable, "-c", code).splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = (
        "pyproject.toml README.md LICENSE CITATION.cff .ci/run cuattn/py.typed kernels/sm90/fwd.cu tests/conftest.py"
    )
    assert {*wanted.split(), "bench/harness.py", "bench/gallery/__init__.py"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_extras_say_nothing_twice_and_ask_for_the_same():
    """A package has one requirement, wherever it stands; the two CUDA extras never meet in another one."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    seen: dict[str, str] = {}
    for extra in (project["dependencies"], *project["optional-dependencies"].values()):
        for wanted in extra:
            name = re.match(r"[\w-]+", wanted)[0]
            assert name == "cuattn" or seen.setdefault(name, wanted) == wanted, wanted
            if name == "cuattn":
                own = set(re.search(r"\[([\w,]+)\]", wanted)[1].split(","))
                assert own < {*project["optional-dependencies"]} - {"cuda12", "cuda13"}


def test_installed_wheel_finds_its_kernels(wheel, tmp_path):
    """Install into a fresh environment (its dependencies are borrowed), read each kernel file and run there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(printed(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    zipfile.ZipFile(wheel).extractall(site)
    import numpy

    borrowed = Path(numpy.__file__).resolve().parent.parent
    code = f"""
import sys
sys.path.append({str(borrowed)!r})
import cuattn
from cuattn.cuda import source
assert cuattn.__file__.startswith({str(site)!r}), cuattn.__file__
for name in {[path.as_posix() for path in KERNELS]!r}:
    assert source.kernel_root().joinpath(name).read_text(), name
import numpy as np
q = np.ones((3, 8), np.float32)
print(cuattn.attention(q, q, q).sum())
from cuattn.cli import main
main(["--no-check"])
"""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    first, title, *report = printed(python, *safe, "-c", code, cwd=tmp_path).splitlines()
    assert float(first) == 24.0
    assert title == "Versions"
    assert str(site) in " ".join(report[:2])  # words are not cut, but may go onto a line of their own
