"""Counting the outcomes of marked tests, in one process and in several."""

import pytest

from bench import gpu_check

TESTS = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("i", range(4))
def test_right(i):
    pass

def test_wrong():
    assert 1 == 2

@pytest.fixture
def broken():
    raise ValueError("before the test")

def test_broken(broken):
    pass

def test_skipped():
    pytest.skip("not here")
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_outcomes_are_counted(tmp_path, workers):
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs a GPU"]\n')
    (tmp_path / f"test_with_{workers}.py").write_text(TESTS)
    collector = gpu_check.Collector()
    status = gpu_check.run([f"--rootdir={tmp_path}", str(tmp_path)], workers, collector)
    assert status == 1
    report = collector.report()
    assert report["counts"] == {"passed": 4, "failed": 2, "skipped": 1}
    assert [failure["test"].rpartition("::")[2] for failure in report["failures"]] == ["test_wrong", "test_broken"]
    assert "assert 1 == 2" in report["failures"][0]["error"]
    assert not report["unfinished"]
