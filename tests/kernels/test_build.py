"""How the library is built, with a compiler that tells what it was asked and fails where it is told to."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from tenure.kernels import build as building
from tenure.kernels.binding import bind
from tenure.kernels.build import BuildError, build, load
from tenure.kernels.native import native

REAL = next(filter(shutil.which, ("cc", "gcc", "clang")), None)

pytestmark = pytest.mark.skipif(REAL is None or os.name == "nt", reason="no C compiler")

COMPILER = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
*" -dM "*) {real} "$@"; cat {macros}; exit;;
*"{fails}"*) echo first >&2; echo "no such thing as {fails}" >&2; exit 3;;
esac
exec {real} "$@"
"""


class Compiler:
    """The real compiler behind a script."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log, self._macros = folder / "cc", folder / "log", folder / "macros"
        self.macros = ""
        self.fails_at("nothing-at-all")

    def fails_at(self, option: str) -> None:
        text = COMPILER.format(log=self.log, real=REAL, macros=self._macros, fails=option)
        self.path.write_text(text)
        self.path.chmod(0o755)

    @property
    def macros(self) -> str:
        return self._macros.read_text()

    @macros.setter
    def macros(self, text: str) -> None:
        self._macros.write_text(text)

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def links(self) -> list[bool]:
        """For each link, whether it took OpenMP."""
        return ["-fopenmp" in line for line in self.asked if "-shared" in line]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Builds one small file, in a cache of its own."""
    source = tmp_path / "seven.c"
    source.write_text("int tenure_seven(void) { return 7; }\n")
    monkeypatch.setattr(building, "_SOURCES", (source,))
    monkeypatch.setattr(building, "_HEADERS", ())
    monkeypatch.setattr(building, "openmp", lambda: object())
    monkeypatch.setenv("TENURE_CACHE", str(tmp_path / "cache"))
    return Compiler(tmp_path)


def test_built_once(compiler: Compiler) -> None:
    assert load([str(compiler.path)]).tenure_seven() == 7
    first = len(compiler.asked)
    assert load([str(compiler.path)]).tenure_seven() == 7
    assert len(compiler.asked) == first + 1, "only which processor it is"


@pytest.mark.parametrize("content", [b"", b"\x7fELF and no more"], ids=["empty", "cut short"])
def test_a_damaged_library_is_built_again(compiler: Compiler, content: bytes) -> None:
    library = build([str(compiler.path)])
    library.write_bytes(content)
    assert load([str(compiler.path)]).tenure_seven() == 7


def test_what_a_killed_build_has_left_goes_with_the_next(compiler: Compiler) -> None:
    script = compiler.path.read_text()
    compiler.path.write_text(
        script.replace("exec", 'case "$*" in *-fPIC*) kill -9 $PPID; sleep 9;; esac; exec')
    )
    process = os.fork()
    if not process:
        build([str(compiler.path)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -9
    folder = compiler.path.parent / "cache" / "native"
    assert list(folder.iterdir())
    compiler.path.write_text(script)
    library = build([str(compiler.path)])
    assert list(folder.iterdir()) == [library]


OWN = """
static int threads;
void omp_set_num_threads(int count) { threads = count; }
int tenure_threads(void) { return threads; }
"""


def test_a_library_with_an_openmp_of_its_own_follows_the_threads_of_torch(compiler: Compiler) -> None:
    building._SOURCES[0].write_text(OWN)
    threads = bind(load([str(compiler.path)]), "tenure_threads", [], ctypes.c_int)
    before, found = torch.get_num_threads(), []
    try:
        for count in (3, 1, 2):
            torch.set_num_threads(count)
            found.append(threads())
    finally:
        torch.set_num_threads(before)
    assert found == [3, 1, 2]


def test_another_processor_has_another_library(compiler: Compiler) -> None:
    first = build([str(compiler.path)])
    compiler.macros = "#define __AVX9000__ 1\n"
    assert build([str(compiler.path)]) != first


def test_the_openmp_of_torch_is_shared_with_gcc_only(compiler: Compiler) -> None:
    build([str(compiler.path)])
    compiler.macros = "#define __clang__ 1\n"
    build([str(compiler.path)])
    assert compiler.links == [False, True]


def test_without_the_library_of_openmp_there_is_one_thread(compiler: Compiler) -> None:
    compiler.macros = "#define __clang__ 1\n"
    compiler.fails_at("-lm -fopenmp")
    assert load([str(compiler.path)]).tenure_seven() == 7
    assert compiler.links == [True, False]
    assert not any("-fopenmp" in line for line in compiler.asked[-2:])


def test_a_compiler_with_arguments(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"'{compiler.path}' -DSEVEN=7")
    with pytest.warns(UserWarning, match="tenure_rms_norm"):  # the small library has none of the kernels
        assert native.__wrapped__() is None
    assert all("-DSEVEN=7" in line for line in compiler.asked)


def test_what_the_compiler_said_is_in_the_warning(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.fails_at("-fPIC")
    with pytest.raises(BuildError, match=r"gave 3: first \| no such thing as -fPIC"):
        build([str(compiler.path)])
    monkeypatch.setenv("CC", str(compiler.path))
    with pytest.warns(UserWarning, match="no such thing as -fPIC"):
        assert native.__wrapped__() is None


@pytest.mark.parametrize("command", ["no-such-compiler", "'half a quote"])
def test_a_compiler_that_is_none_costs_a_warning(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.warns(UserWarning, match="could not be built"):
        assert native.__wrapped__() is None


def test_a_blank_name_is_no_compiler_of_ones_own(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", " ")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.__wrapped__() is None


PROCESSORS = {
    "x86-64-v2": False,
    "znver3": False,
    "icelake-server": False,
    "cooperlake": True,
    "cooperlake -mno-avx512vl": False,
    "cooperlake -mno-avx512bw": False,
}
"""And whether they have bf16 products."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 processors")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_each_processor_has_a_whole_library(tmp_path: Path, processor: str) -> None:
    sources = [str(path) for path in building._SOURCES]
    command = [str(REAL), "-O0", *f"-march={processor}".split(), "-fPIC", "-shared", *sources]
    built = tmp_path / "native.so"
    subprocess.run([*command, "-o", str(built), "-lm", "-Wl,--no-undefined"], check=True)
    library = ctypes.CDLL(str(built))
    assert hasattr(library, "tenure_linear_i8")
    assert hasattr(library, "tenure_attention_bf16")
    assert hasattr(library, "tenure_attend") is PROCESSORS[processor]
