"""The report, the self-check and the device that they choose."""

import io
import sys
import types

import numpy as np
import pytest

import cuattn
from cuattn.cli import check, console, devices, main, textbook
from cuattn.errors import UnsupportedError
from tests import oracle
from tests.cli.helpers import HOST
from tests.tolerances import assert_close

# Devices


def test_without_cupy_the_cpu_is_used_and_the_reason_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device = devices.best()
    assert (device.backend, device.xp) == ("cpu", np)
    assert "CuPy cannot be imported" in device.reason
    for wanted, kernel in (("cuda", None), ("auto", "sm90")):
        with pytest.raises(UnsupportedError, match="needs a GPU, but CuPy cannot be imported"):
            devices.pick(wanted, kernel)
    assert devices.pick("auto", "cpu").backend == devices.pick("cpu", None).backend == "cpu"


def test_a_gpu_is_used_where_a_kernel_runs_on_it(monkeypatch):
    fake = types.SimpleNamespace(__version__="14", is_available=lambda: True, zeros=np.zeros)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cuattn, "plan", lambda *args: types.SimpleNamespace(kernel="sm80"))
    assert devices.best()[:2] == ("cuda", "CuPy finds a CUDA device, kernel sm80")
    assert devices.pick("auto", "sm80").xp is fake

    def refuse(*args):
        raise UnsupportedError("too old")

    monkeypatch.setattr(cuattn, "plan", refuse)
    assert devices.best()[:2] == ("cpu", "the GPU cannot be used: too old")
    fake.is_available = lambda: False
    assert devices.best()[:2] == ("cpu", "CuPy 14 finds no CUDA device")


# Report and self-check


@pytest.fixture
def quick(monkeypatch):
    """Make the self-check small."""
    monkeypatch.setattr(check, "LENGTH", 70)
    monkeypatch.setattr(check, "RATE_LENGTH", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(devices, "best", lambda: HOST)


def test_report_and_check_pass(quick, capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    for word in ("NumPy", "BLAS", "CuPy", "Caches", "for the test", "GFLOP/s", "allowed", "all 16 checks"):
        assert word in out
    assert err.count("[") == len(check.CASES)
    assert " off" not in out


def test_report_alone(quick, capsys):
    assert main(["--no-check"]) == 0
    out, err = capsys.readouterr()
    assert "Self-check" not in out
    assert not err


@pytest.mark.parametrize("case", check.CASES, ids=lambda case: f"{case.name} {np.dtype(case.dtype)}")
@pytest.mark.filterwarnings("error")
def test_a_wrong_result_is_off(quick, monkeypatch, capsys, case):
    right = cuattn.backward

    def wrong(*args, **options):
        grads = right(*args, **options)
        dv = grads.dv.copy()
        dv.flat[5] += np.abs(dv).max() * dv.dtype.type(0.125)
        return grads._replace(dv=dv)

    monkeypatch.setattr(cuattn, "backward", wrong)
    assert check.show(console.open_console(), HOST, [case]) == 1
    out, _ = capsys.readouterr()
    assert "1 of 2 checks are off" in out
    assert [row.verdict for row in check.check(case, HOST)] == ["ok", "off"]


def test_failures_and_missing_features_are_told_apart(quick, monkeypatch, capsys):
    def broken(*args, **options):
        raise ZeroDivisionError("oh")

    def unsupported(*args, **options):
        raise UnsupportedError("not on this device")

    monkeypatch.setattr(cuattn, "forward", broken)
    assert main([]) == 1
    assert "ZeroDivisionError: oh" in capsys.readouterr().out
    monkeypatch.setattr(cuattn, "forward", unsupported)
    assert main([]) == 1  # nothing was checked
    assert "not on this device" in capsys.readouterr().out


def test_float64_is_not_judged_by_itself(monkeypatch):
    monkeypatch.setattr(textbook, "EXTENDED", False)
    case = next(case for case in check.CASES if case.dtype is np.float64)
    assert [row.verdict for row in check.check(case, HOST)] == ["not checked"]


def test_not_a_number_is_off():
    exact = {"o": np.ones(3)}
    for bad in (np.array([1, np.nan, 1]), np.array([1, np.inf, 1])):
        _, error, limit = textbook.worst({"o": bad}, exact, exact)
        assert error > limit
    empty = {"lse": np.array([-np.inf, 1.0])}
    assert textbook.worst(empty, empty, empty)[1] == 0


@pytest.mark.parametrize("case", check.CASES, ids=lambda case: f"{case.name} {np.dtype(case.dtype)}")
def test_the_textbook_agrees_with_the_oracle_of_the_tests(case):
    problem = check._problem(case, 4, 40)
    arguments = check._spelled_out(problem)
    mine, plain = (textbook.solve(**arguments, exact=exact) for exact in (True, False))
    shared = {name: arguments[name] for name in ("visible", "keep", "keep_scale", "bias", "scale", "softcap")}
    q, k, v, do = (problem[name] for name in ("q", "k", "v", "do"))
    o, l, m = oracle.forward(q, k, v, **shared)
    theirs = dict(zip(("dq", "dk", "dv", "dbias"), oracle.backward(do, q, k, v, **shared), strict=True))
    for name, value in {"o": o, "lse": m + np.log(l), **theirs}.items():
        if value is not None:
            assert_close(mine[name], value, plain[name], dtype=case.dtype, name=name)


@pytest.mark.parametrize("make", [console._Plain, console._Rich])
def test_consoles_print_everything(make, capsys):
    if make is console._Rich:
        pytest.importorskip("rich")
    screen = make()
    screen.section("Title", [("name", "value [not markup]"), ("longer name", "x")])
    screen.table("Rows", ("a", "b", "c"), [("1", "two", "[3]"), ("four", "5", "6")])
    screen.line("done [really]", good=False)
    assert list(screen.progress([1, 2], lambda item: f"item [{item}]")) == [1, 2]
    out = capsys.readouterr().out
    for word in ("Title", "value [not markup]", "longer name", "Rows", "four", "[3]", "done [really]"):
        assert word in out


def test_rich_is_used_on_a_terminal_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert isinstance(console.open_console(), console._Plain)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(console.open_console(), console._Plain)
    monkeypatch.delitem(sys.modules, "rich")
    pytest.importorskip("rich")
    assert isinstance(console.open_console(), console._Rich)
