"""Attention on files: arrays in and out, options, complaints."""

import io
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cuattn
from cuattn import masks
from cuattn.cli import devices, files, main
from tests.cli.helpers import BFLOAT16, ROOT, problem, run, save

# Files


@pytest.fixture
def paths(tmp_path):
    """Return the path of an input file and of an output."""
    return save(tmp_path / "in.npz", **problem()), tmp_path / "out.npz"


def write(path, out):
    assert main(["run", path, "--output", str(out)]) == 0


def refused(capsys, *words):
    """Run the command, expect exit code 2 and return its one line of complaint."""
    assert main(["run", *map(str, words)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("computing on")]
    assert len(lines) == 1
    assert lines[0].startswith("cuattn: error: ")
    return lines[0]


@given(
    hnp.array_shapes(min_dims=0, min_side=0),
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    st.sampled_from(["<", ">"]),
    st.booleans(),
)
def test_files_round_trip(tmp_path_factory, shape, dtype, order, fortran):
    path = tmp_path_factory.getbasetemp() / "round-trip.npz"
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    stored = array.view(np.uint16) if dtype == "bfloat16" else array
    stored = np.asarray(stored, order="F" if fortran else "C").astype(stored.dtype.newbyteorder(order))
    np.savez_compressed(path, q=stored, mask=array > 1, dtype=np.array(dtype))
    archive = files.Archive(str(path), ("q",))
    assert list(archive.arrays) == ["q", "mask"]
    q, described = archive.load("q"), archive.arrays["q"]
    assert q.dtype == described.dtype == array.dtype
    assert q.shape == described.shape == shape
    assert q.dtype.isnative
    assert np.array_equal(q, array)
    files.write(str(path), {"q": q, "mask": archive.load("mask")})
    again = files.Archive(str(path), ()).load("q")
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)


def test_bfloat16_saved_without_the_detour_is_understood(tmp_path):
    array = np.arange(6).astype(BFLOAT16)
    np.savez(tmp_path / "x.npz", q=array, dtype=np.array([b"bfloat16"]))
    assert np.array_equal(files.Archive(str(tmp_path / "x.npz"), ()).load("q"), array)


def bad_files(folder):
    """Yield files that cannot be a problem, with a word of the complaint that each must cause."""
    good = {name: array[0] for name, array in problem().items()}
    yield folder / "absent.npz", "No such file"
    yield folder, "directory"
    for name, content in (("empty.npz", b""), ("text.npz", b"q = 1\n")):
        (folder / name).write_bytes(content)
        yield folder / name, "not a zip file"
    np.save(folder / "array.npy", good["q"])
    yield folder / "array.npy", "not a zip file"
    whole = pathlib.Path(save(folder / "whole.npz", **good)).read_bytes()
    (folder / "short.npz").write_bytes(whole[: len(whole) // 2])
    yield folder / "short.npz", "not a zip file"
    damaged = bytearray(whole)
    damaged[200:2000] = bytes(1800)  # the data of q
    (folder / "damaged.npz").write_bytes(damaged)
    yield folder / "damaged.npz", "cannot be read"
    short = io.BytesIO()
    np.save(short, good["k"])
    for file, ending, content, complaint in (
        ("cut", ".npy", short.getvalue()[:-8], "cut.npz cannot be read: EOF"),
        ("no-array", "", b"text", "no-array.npz cannot be read"),
    ):
        with zipfile.ZipFile(folder / f"{file}.npz", "w") as archive:
            for name in good:
                archive.writestr(name + ending, content)
        yield folder / f"{file}.npz", complaint
    no_kv = {name: good[name] for name in ("q", "do")}
    yield save(folder / "missing.npz", **no_kv), "has no k and no v; it holds q, do"
    for number, (changed, complaint) in enumerate((
        ({"v": np.array([{}, None])}, "v has dtype object"),
        ({"masks": good["q"]}, "entries ['masks']"),
        ({"k": good["k"].astype(np.uint16)}, "k has dtype uint16"),
        ({"dtype": np.array("float16")}, "the entry dtype says 'float16'"),
        ({"dtype": np.array(["float32", "float32"])}, "expected one string"),
        ({"dtype": np.array(32)}, "expected one string"),
        ({"q": good["q"].astype(np.int64)}, "q"),
        ({"v": good["v"][:, :5]}, "v"),
        ({"q": good["q"][0, 0]}, "q"),
    )):  # fmt: skip
        yield save(folder / f"{number}.npz", **{**good, **changed}), complaint


def test_bad_files_get_one_clear_line(tmp_path, capsys):
    for path, complaint in bad_files(tmp_path):
        line = refused(capsys, path, "--output", tmp_path / "out.npz", "--backward")
        assert complaint in line
        assert not (tmp_path / "out.npz").exists()


def test_outputs_that_cannot_be_written_are_refused_before_computing(tmp_path, paths, capsys, monkeypatch):
    path, out = paths
    out.write_bytes(b"keep")
    out.chmod(0o444)
    monkeypatch.setattr(cuattn, "forward", lambda *args, **options: pytest.fail("computed"))
    absent = tmp_path / "absent" / "out.npz"
    for output, complaint in ((tmp_path, "cannot be written"), (absent, "cannot be written"), (out, "is read-only")):
        assert f"--output {output} {complaint}" in refused(capsys, path, "--output", output)
    assert out.read_bytes() == b"keep"


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [(OSError(28, "No space left"), 2, "No space left"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_a_failed_write_leaves_the_old_file_alone(tmp_path, paths, capsys, monkeypatch, error, code, word):
    def fail(file, **arrays):
        file.write(b"half")
        raise error

    path, out = paths
    out.write_bytes(b"old")
    monkeypatch.setattr(np, "savez", fail)
    assert main(["run", path, "--output", str(out)]) == code
    assert word in capsys.readouterr().err
    assert out.read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.npz", "out.npz"]


def test_a_replaced_file_keeps_its_permissions(paths):
    out, umask = paths[1], os.umask(0o027)
    try:
        write(*paths)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o640  # a new file's
    for mode in (0o600, 0o664):
        out.chmod(mode)
        write(*paths)
        assert stat.S_IMODE(out.stat().st_mode) == mode


def test_links_lead_to_the_file(tmp_path, paths):
    there, link = tmp_path / "there", tmp_path / "link.npz"
    there.mkdir()
    link.symlink_to(there / "out.npz")
    write(paths[0], link)
    assert link.is_symlink()
    assert [entry.name for entry in there.iterdir()] == ["out.npz"]


def test_a_pipe_is_written_into(paths):
    pipe = paths[1]
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(*paths)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(timeout=10)
    with np.load(io.BytesIO(read[0])) as file:
        assert set(file.files) == {"o", "l", "m"}


@pytest.mark.parametrize("name", ["q", "bias", "do"])
def test_shapes_are_refused_before_they_take_memory(tmp_path, capsys, name):
    shapes = {"q": (6, 4), "k": (6, 4), "v": (6, 4), "do": (6, 4), name: (400, 100_000)}
    path = tmp_path / "bomb.npz"  # a thousandth of what it unpacks to
    np.savez_compressed(path, **{name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()})
    tracemalloc.start()
    try:
        assert name in refused(capsys, path, "--output", tmp_path / "out.npz", "--backward")
        assert tracemalloc.get_traced_memory()[1] < 40e6  # the array is 160 MB
    finally:
        tracemalloc.stop()


# Results


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
def test_run_writes_what_the_api_returns(tmp_path, dtype):
    arrays = problem(dtype)
    bias = np.random.default_rng(1).standard_normal((3, 24, 1)).astype(dtype)
    mask = np.random.default_rng(2).random((24, 24)) < 0.7
    written = run(tmp_path, {**arrays, "bias": bias, "mask": mask}, "--backward", "--scale", "0.3")
    q, k, v, do = arrays.values()
    fwd = cuattn.forward(q, k, v, bias=bias, mask=mask, scale=0.3)
    grads = cuattn.backward(do, q, k, v, fwd, bias=bias, mask=mask, scale=0.3)
    expected = {"o": fwd.o, "l": fwd.l, "m": fwd.m, **grads._asdict()}
    if dtype == BFLOAT16:
        assert str(written.pop("dtype")) == "bfloat16"
        expected = {name: a.view(np.uint16) if a.dtype == BFLOAT16 else a for name, a in expected.items()}
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert written[name].dtype == value.dtype
        assert np.array_equal(written[name], value), name


@pytest.mark.parametrize(
    ("words", "keywords"),
    [
        ("--causal", {"is_causal": True}),
        ("--causal bottom_right", {"is_causal": "bottom_right"}),
        ("--window 3 1", {"window": (3, 1)}),
        ("--window none 0 top_left", {"window": (None, 0, "top_left")}),
        ("--softcap 2.5 --deterministic", {"softcap": 2.5}),
        ("--mask sliding_window 4", {"mask": masks.sliding_window(24, 4)}),
        ("--mask causal_document 10 14 --causal", {"mask": masks.causal_document([10, 14]), "is_causal": True}),
        ("--kernel cpu --out-dtype float32", {"kernel": "cpu"}),
        ("--device cpu", {}),
    ],
)
def test_options_mean_the_keyword_of_the_same_name(tmp_path, words, keywords):
    arrays = problem()
    written = run(tmp_path, arrays, "--backward", *words.split())
    q, k, v, do = arrays.values()
    fwd = cuattn.forward(q, k, v, **keywords)
    assert np.array_equal(written["o"], fwd.o)
    assert np.array_equal(written["dk"], cuattn.backward(do, q, k, v, fwd, **keywords).dk)
    assert "dbias" not in written
    assert "rng_state" not in written


def test_grouped_heads_and_unrounded_output(tmp_path):
    arrays = problem(np.float16)
    arrays |= {"q": np.tile(arrays["q"], (1, 2, 1, 1)), **{name: arrays[name][:, :2] for name in "kv"}}
    written = run(tmp_path, arrays, "--enable-gqa", "--out-dtype", "float32")
    assert written["o"].dtype == np.float32
    expected = cuattn.forward(arrays["q"], arrays["k"], arrays["v"], enable_gqa=True, out_dtype=np.float32).o
    assert np.array_equal(written["o"], expected)


def test_dropout_keeps_its_state_and_repeats_it(tmp_path):
    arrays = problem()
    words = ["--dropout-p", "0.25", "--backward"]
    first = run(tmp_path, arrays, *words)
    assert first["rng_state"].dtype == np.uint64
    seed, offset = map(str, first["rng_state"])
    again = run(tmp_path, arrays, *words, "--seed", seed, "--offset", offset)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    other = run(tmp_path, arrays, *words, "--seed", seed, "--offset", "9")
    assert not np.array_equal(first["o"], other["o"])


def test_the_output_may_replace_the_input_and_leaves_other_files_alone(tmp_path, paths):
    path, _ = paths
    stale = tmp_path / f".in.npz.{os.getpid()}.tmp"
    stale.write_bytes(b"theirs")
    write(path, path)
    with np.load(path) as file:
        assert set(file.files) == {"o", "l", "m"}
    assert stale.read_bytes() == b"theirs"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [stale.name, "in.npz"]


# Options


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--mask causal", "expected one mask"),
        ("--window 3 x", "window"),
        ("--window 3 (", "--window: '(' is not a number"),
        ("--window 3", "window"),
        ("--window 3 -1", "window"),
        ("--window 3 1 middle", "alignment"),
        ("--offset 3", "without --seed"),
        ("--dropout-p 1.5", "dropout_p"),
        ("--dropout-p 0.5 --seed -1", "seed"),
        ("--scale nan", "scale"),
        ("--softcap 0", "softcap"),
        ("--device cuda --kernel cpu", "--device cuda --kernel cpu: expected"),
    ],
)
def test_bad_options_get_one_clear_line(tmp_path, capsys, words, complaint):
    path = save(tmp_path / "in.npz", **problem(), mask=np.ones((24, 24), bool))
    assert complaint in refused(capsys, path, "--output", tmp_path / "out.npz", *words.split())


def test_the_parser_itself_exits_with_2(capsys):
    for words in ("run", "run x.npz", "walk", "run x.npz --output y.npz --causal maybe"):
        with pytest.raises(SystemExit) as caught:
            main(words.split())
        assert caught.value.code == 2


def test_progress_shows_on_a_terminal(paths, monkeypatch, capsys):
    path, out = paths
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["run", path, "--output", str(out), "--backward"]) == 0
    assert "backward" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert main(["run", path, "--output", str(out), "--backward"]) == 0
    assert capsys.readouterr().err.count("\n") == 1


# As a user starts it


def test_the_module_runs(tmp_path, paths):
    def start(*words):
        command, env = [sys.executable, "-m", "cuattn", "run", *words], {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)

    done = start("in.npz", "--output", "out.npz", "--causal", "--backward")
    assert done.returncode == 0, done.stderr
    assert "dq (2, 3, 24, 8) float32" in done.stdout
    done = start("absent.npz", "--output", "x.npz")
    assert done.returncode == 2
    assert done.stderr == "cuattn: error: absent.npz cannot be read: No such file or directory\n"


def test_an_interrupt_ends_in_one_line(tmp_path):
    arrays = {name: np.zeros((16, 20_000, 64), np.float32) for name in "qkv"}
    words = ["run", save(tmp_path / "in.npz", **arrays), "--output", str(tmp_path / "out.npz")]
    command = [sys.executable, "-m", "cuattn", *words]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in a shell's background ignore it
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heard) as run:
        assert run.stderr.readline().startswith("computing on cpu")
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (130, "cuattn: interrupted\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.npz"]


@pytest.mark.gpu
def test_gpu_self_check_and_run(tmp_path):
    pytest.importorskip("cupy")
    assert devices.best().backend == "cuda"
    assert main([]) == 0
    arrays = problem(np.float16, (2, 3, 200, 64))
    device = run(tmp_path, arrays, "--backward", "--device", "cuda", "--causal")
    host = run(tmp_path, arrays, "--backward", "--device", "cpu", "--causal")
    assert {name: (a.shape, a.dtype) for name, a in device.items()} == {n: (a.shape, a.dtype) for n, a in host.items()}
