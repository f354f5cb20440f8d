"""The compiler, its disk cache, and what they say when something is missing."""

import pytest

from cuattn.cuda import compile as compiler
from cuattn.errors import CompileError

KERNEL = 'extern "C" __global__ void k() {}'


@pytest.mark.parametrize("lost", ["NVRTC", "headers"])
def test_a_missing_compiler_says_what_to_install(lost, tmp_path, monkeypatch):
    from cupy._core import core
    from cupy.cuda import nvrtc

    def fail(*_):
        raise RuntimeError(f"no {lost} here")

    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    target, name = (nvrtc, "getVersion") if lost == "NVRTC" else (core, "assemble_cupy_compiler_options")
    monkeypatch.setattr(target, name, fail)
    for cached in (compiler._nvrtc, compiler._include_options):
        cached.cache_clear()
    with pytest.raises(CompileError, match=rf"no {lost} here.*pip install .cuattn\[cuda13\]"):
        compiler.compile_cubin(KERNEL, "sm_80")


def test_cache_survives_an_unwritable_folder(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(blocked))
    assert compiler.compile_cubin(KERNEL, "sm_80").startswith(b"\x7fELF")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the disk cache."""
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    compiler._trusted.cache_clear()
    yield tmp_path
    compiler._trusted.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """The architectures that were compiled for."""
    done, compile_log = [], compiler.compile_log

    def counted(text, arch, *arguments):
        done.append(arch)
        return compile_log(text, arch, *arguments)

    monkeypatch.setattr(compiler, "compile_log", counted)
    return done


def test_cache_is_used(folder, compiled):
    first = compiler.compile_cubin(KERNEL, "sm_80")
    assert first.startswith(b"\x7fELF") and compiler.compile_cubin(KERNEL, "sm_80") == first
    compiler.compile_cubin(KERNEL, "sm_90")
    assert compiled == ["sm_80", "sm_90"] and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-9], lambda content: content + b"x"])
def test_a_damaged_file_is_compiled_again(folder, compiled, damage):
    first = compiler.compile_cubin(KERNEL, "sm_80")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert compiler.compile_cubin(KERNEL, "sm_80") == first
    assert file.read_bytes() == whole and len(compiled) == 2


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o757])
def test_a_folder_that_others_write_to_is_not_used(folder, compiled, mode):
    (folder / "one").mkdir()
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match="others may write there"):
        compiler.compile_cubin(KERNEL, "sm_80")
    compiler.compile_cubin(KERNEL, "sm_80")
    assert len(compiled) == 2 and [file.name for file in folder.iterdir()] == ["one"]


def test_a_new_folder_is_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "new"))
    compiler.compile_cubin(KERNEL, "sm_80")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_the_folder_may_be_in_ones_home(monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(compiler.cache_dir()) == "/home/somebody/kernels"


def test_machine_code_that_the_driver_refuses_is_a_compile_error(monkeypatch):
    cupy = pytest.importorskip("cupy")
    driver = pytest.importorskip("cupy_backends.cuda.api.driver")

    class Refused(driver.CUDADriverError):
        def __init__(self):  # its own needs a driver
            RuntimeError.__init__(self, "INVALID_IMAGE")

    class Module:
        def load(self, cubin):
            raise Refused

    monkeypatch.setattr(cupy.cuda, "Module", Module)
    with pytest.raises(CompileError, match="the driver cannot load k"):
        compiler.load(b"no machine code", "k")
