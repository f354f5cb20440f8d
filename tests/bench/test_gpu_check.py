"""Counting the outcomes of marked tests, in one process and in several."""

import os
import signal

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
    assert report["counts"] == {"passed": 4, "failed": 2, "skipped": 1, "not begun": 0}
    assert [failure["test"].rpartition("::")[2] for failure in report["failures"]] == ["test_wrong", "test_broken"]
    assert "assert 1 == 2" in report["failures"][0]["error"]
    assert not report["unfinished"]


def test_what_an_interrupted_run_did_not_begin_is_counted(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs a GPU"]\n')
    (tmp_path / "test_interrupted.py").write_text(TESTS)
    collector = gpu_check.Collector()
    gpu_check.run([f"--rootdir={tmp_path}", "-x", str(tmp_path)], 0, collector)
    assert collector.report()["counts"] == {"passed": 4, "failed": 1, "skipped": 0, "not begun": 2}


def test_a_second_signal_ends_nothing_else():
    before = signal.signal(signal.SIGTERM, gpu_check.end)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


BREAKING = """
import sys, types
import pytest

pytestmark = pytest.mark.gpu

class Lost(Exception):
    status = 700

@pytest.mark.parametrize("i", range(8))
def test_others(i):
    assert "cupy" not in sys.modules

def test_breaks():
    def synchronize():
        raise Lost("an illegal memory access was encountered")
    runtime = types.SimpleNamespace(deviceSynchronize=synchronize, CUDARuntimeError=Lost)
    sys.modules["cupy"] = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    synchronize()
"""


def test_a_process_that_loses_its_gpu_is_replaced(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs a GPU"]\n')
    (tmp_path / "test_lost.py").write_text(BREAKING)
    collector = gpu_check.Collector()
    assert gpu_check.run([f"--rootdir={tmp_path}", str(tmp_path)], 1, collector) == 1
    report = collector.report()
    assert report["counts"] == {"passed": 8, "failed": 1, "skipped": 0, "not begun": 0}
    assert "illegal memory access" in report["failures"][0]["error"]
