"""The report, the self-check and the device that they choose."""

import importlib.util
import re
import sys
import types

import numpy as np
import pytest
from rich.console import Console

import cuattn
from cuattn import rng
from cuattn.cli import check, devices, main
from cuattn.errors import UnsupportedError
from cuattn.reference import textbook
from tests import oracle
from tests.cli.helpers import HOST
from tests.tolerances import assert_close

# Devices


def test_without_cupy_the_cpu_is_used_and_the_reason_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device = devices.best()
    assert (device.backend, device.xp) == ("cpu", np)
    assert "CuPy cannot be imported" in device.reason
    for wanted, kernel, asked in (("cuda", None, "--device cuda"), ("auto", "sm90", "--kernel sm90")):
        with pytest.raises(UnsupportedError, match=f"^{asked} needs a GPU, but CuPy cannot be imported"):
            devices.pick(wanted, kernel)
    assert devices.pick("auto", "cpu").backend == devices.pick("cpu", None).backend == "cpu"


def test_a_gpu_is_used_where_a_kernel_runs_on_it(monkeypatch):
    fake = types.SimpleNamespace(__version__="14", is_available=lambda: True, zeros=np.zeros)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cuattn, "plan", lambda *args: types.SimpleNamespace(kernel="sm80"))
    assert devices.best()[:2] == ("cuda", "CuPy finds a CUDA device that a kernel runs on")
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
    assert all(case in out for case in check.CASES)
    assert not err  # the bar shows on a terminal alone
    assert " off" not in out
    short = [line for line in out.splitlines() if "/" not in line]  # paths are not cut
    assert max(map(len, short)) <= 80
    assert out.splitlines()[-1].startswith("  on files")


def test_the_plans_of_forward_and_backward_are_shown(quick, monkeypatch, capsys):
    """The kernel of an example of ordinary size, so that a Hopper GPU shows its own."""
    monkeypatch.setattr(devices, "best", lambda: HOST._replace(backend="cuda"))
    asked = []

    def plan(q, k, v, direction):
        asked.append((q.shape, str(q.dtype)))
        return types.SimpleNamespace(kernel="sm90", block_m=128, block_n=176, reason=f"quick {direction}")

    monkeypatch.setattr(cuattn, "plan", plan)
    assert main(["--no-check"]) == 0
    out = capsys.readouterr().out
    for direction in ("forward", "backward"):
        assert re.search(f"  {direction} +sm90, tile 128 x 176: quick {direction}\n", out)
    assert set(asked) == {((1, 8, 4096, 128), "bfloat16")}


def test_without_cupy_the_report_says_what_to_install(quick, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--no-check"]) == 0
    assert 'on a GPU   pip install "cuattn[cuda13]" or "cuattn[cuda12]", one of the two' in capsys.readouterr().out


def test_version_and_help(capsys):
    for words, text in (
        (["--version"], f"cuattn {cuattn.__version__}\n"),
        (["--help"], "exit codes: 0 all is well"),
        (["run", "--help"], "exit codes: 0 all is well"),
    ):
        with pytest.raises(SystemExit) as done:
            main(words)
        assert done.value.code == 0
        assert text in capsys.readouterr().out


def test_report_alone(quick, capsys):
    assert main(["--no-check"]) == 0
    out, err = capsys.readouterr()
    assert "Self-check" not in out
    assert not err


@pytest.mark.parametrize("case", check.CASES)
@pytest.mark.filterwarnings("error")
def test_a_wrong_result_is_off(quick, monkeypatch, capsys, case):
    right = cuattn.backward

    def wrong(*args, **options):
        grads = right(*args, **options)
        dv = grads.dv.copy()
        dv.flat[5] += np.abs(dv).max() * dv.dtype.type(0.125)
        return grads._replace(dv=dv)

    monkeypatch.setattr(cuattn, "backward", wrong)
    assert check.show(Console(width=200), HOST, [case]) == 1
    out, _ = capsys.readouterr()
    assert "1 of 2 checks are off" in out
    assert f"{case}: off: backward, dv" in out
    assert [row[-2] for row in check.check(case, HOST)] == ["ok", "off"]


def test_failures_and_missing_features_are_told_apart(quick, monkeypatch, capsys):
    def broken(*args, **options):
        raise error

    monkeypatch.setattr(cuattn, "forward", broken)
    for error, verdict in ((ZeroDivisionError("oh"), "failed"), (UnsupportedError("not here"), "skipped")):
        assert main([]) == 1  # nothing was checked
        out = capsys.readouterr().out
        assert f"no mask, float32: {verdict}: {type(error).__name__}: {error}" in out
        assert "open an issue with all of this output" in out


def test_float64_is_not_judged_by_itself(monkeypatch):
    monkeypatch.setattr(textbook, "EXTENDED", False)
    assert [row[-2] for row in check.check("no mask, float64", HOST)] == ["skipped"]


def test_not_a_number_is_off():
    exact = {"o": np.ones(3)}
    for bad in (np.nan, np.inf):
        _, error, limit = check._worst({"o": np.array([1, bad, 1])}, exact, exact)
        assert error > limit
    assert check._worst(exact, exact, exact)[1] == 0


@pytest.mark.parametrize("case", check.CASES)
def test_the_check_asks_the_textbook_what_it_asks_cuattn(case):
    """Masks, causality, windows and dropout reach the textbook: it agrees with the oracle of the tests."""
    (q, k, v, do), given, visible = check._problem(case, 4, 40)
    mine, plain = (check._textbook((q, k, v, do), given, visible, low) for low in (None, q.dtype))
    assert not ("is_causal" in given and np.triu(visible, 1).any())
    assert "mask" not in given or np.array_equal(visible, given["mask"].dense())
    options = {"visible": visible, "bias": given.get("bias"), "softcap": given.get("softcap")}
    if "dropout_p" in given:
        options["keep"] = np.stack([rng.keep(check.STATE, 6554, head, (0, 40), (0, 40)) for head in range(4)])
        options["keep_scale"] = 65536 / (65536 - 6554)
    o, l, m = oracle.forward(q, k, v, **options)
    theirs = dict(zip(("dq", "dk", "dv", "dbias"), oracle.backward(do, q, k, v, **options), strict=True))
    for name, value in {"o": o, "lse": m + np.log(l), **theirs}.items():
        if value is not None:
            assert_close(mine[name], value, plain[name], dtype=q.dtype, name=name)


def test_progress_shows_on_a_terminal(quick, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert check.show(Console(width=200), HOST, check.CASES[:2]) == 0
    assert "Self-check" in capsys.readouterr().err
