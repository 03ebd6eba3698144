"""The native libraries are built, found and used."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import setuptools

from rltrain.errors import UserError
from rltrain.reshard import native
from rltrain.reshard.copy_table import TILE
from rltrain.reshard.native import SLICE

REPOSITORY = Path(__file__).resolve().parents[2]

# Logs its arguments and writes them to the file after -o, so the "library" contains the digest of its sources.
COMPILER = """#!/bin/sh
echo "$0 $@" >> "$FAKE_LOG"
case "$*" in *--list-gpu-code*) echo sm_80 sm_90; exit 0;; esac
if [ -n "$FAKE_FAILS" ]; then exit 1; fi
for argument; do
  if [ "$previous" = -o ]; then echo "$@" > "$argument"; fi
  previous=$argument
done
"""

BUILT_FROM = (
    *("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "rltrain/__init__.py", "rltrain/errors.py"),
    "rltrain/runtime/json_text.py",
    *("rltrain/models", "rltrain/reshard"),
)
COPY_FOLDER = functools.partial(shutil.copytree, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


class Build:
    """A copy of the inputs of a build, with fake compilers."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.log = folder / "tree", folder / "log"
        for name in BUILT_FROM:
            copy = COPY_FOLDER if (REPOSITORY / name).is_dir() else shutil.copy
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            copy(REPOSITORY / name, self.tree / name)
        self.compilers = {"cxx": folder / "bin/g++", "nvcc": folder / "cuda/bin/nvcc"}
        for program in self.compilers.values():
            program.parent.mkdir(parents=True)
            program.write_text(COMPILER)
            program.chmod(0o755)
        self.environment = {
            # The compilers find only the shell among the system's programs.
            **{name: value for name, value in os.environ.items() if not name.startswith(("RLTRAIN_", "CUDA_", "CXX"))},
            "PATH": str(folder / "bin"),
            "CUDA_HOME": str(folder / "cuda"),
            "FAKE_LOG": str(self.log),
            "PYTHONPATH": str(self.tree),
        }

    def run(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *code.split(" ", 1)] if code.startswith("-c") else [sys.executable, *code.split()],
            cwd=self.tree,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def build(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("setup.py -q build_ext --inplace", **environment)

    def libraries(self) -> list[str]:
        return sorted(path.name for path in (self.tree / "rltrain/reshard").glob("_reshard_*"))

    def compiled(self) -> list[str]:
        """Returns the commands for making a library since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if "--list-gpu-code" not in line]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


BOTH = ["_reshard_cpu.so", "_reshard_cuda.so"]


def test_both_libraries_are_built_once_for_the_same_sources(build: Build) -> None:
    result = build.build()
    assert result.returncode == 0, result.stderr
    assert build.libraries() == BOTH
    cpu, cuda = build.compiled()
    assert "-ffp-contract=off" in cpu
    assert "sm_80" in cuda and "sm_90a" in cuda and "sm_100a" not in cuda, "only targets of this nvcc"
    assert build.build().returncode == 0
    assert build.compiled() == []
    with (build.tree / "csrc/reshard.h").open("a") as header:
        header.write("// changed\n")
    assert build.build().returncode == 0
    assert len(build.compiled()) == 2


def test_without_nvcc_there_is_the_cpu_library_even_where_native_code_is_required(build: Build) -> None:
    build.compilers["nvcc"].unlink()
    result = build.build(RLTRAIN_NATIVE="require")
    assert result.returncode == 0, result.stderr
    assert build.libraries() == ["_reshard_cpu.so"]


def test_without_compilers_nothing_is_built_and_old_libraries_go(build: Build) -> None:
    assert build.build().returncode == 0
    for program in build.compilers.values():
        program.unlink()
    (build.tree / "csrc/reshard_cpu.cpp").write_text("changed")
    (build.tree / "csrc/reshard_cuda.cu").write_text("changed")
    result = build.build()
    assert result.returncode == 0, result.stderr
    assert "a C++ compiler was not found" in result.stderr and "nvcc was not found" in result.stderr
    assert build.libraries() == []
    required = build.build(RLTRAIN_NATIVE="require")
    assert required.returncode != 0
    assert "RLTRAIN_NATIVE is require, but rltrain.reshard._reshard_cpu was not built" in required.stderr


@pytest.mark.parametrize("compiler", ["cxx", "nvcc"])
def test_a_compiler_that_fails_is_an_error_only_where_native_code_is_required(build: Build, compiler: str) -> None:
    program = build.compilers[compiler]
    program.write_text(program.read_text().replace('-n "$FAKE_FAILS"', "1"))
    result = build.build()
    assert result.returncode == 0, result.stderr
    assert build.libraries() == [BOTH[compiler == "cxx"]], "expected the other library, without an unfinished file"
    assert build.build(RLTRAIN_NATIVE="require").returncode != 0


def test_nothing_is_built_when_switched_off_and_other_values_are_refused(build: Build) -> None:
    assert build.build(RLTRAIN_NATIVE="off").returncode == 0
    assert build.compiled() == []
    result = build.build(RLTRAIN_NATIVE="yes")
    assert result.returncode != 0 and "expected one of auto, off, require" in result.stderr


def test_wheels_and_source_archives_hold_what_they_need(build: Build) -> None:
    code = "-c import setuptools.build_meta as b; print(b.build_{0}('dist'))"
    for kind in ("sdist", "wheel", "editable"):
        result = build.run(code.format(kind))
        assert result.returncode == 0, result.stderr
        archive = build.tree / "dist" / result.stdout.splitlines()[-1]
        if kind == "sdist":
            with tarfile.open(archive) as tar:
                names = {name.split("/", 1)[-1] for name in tar.getnames()}
            assert {f"csrc/{path.name}" for path in (REPOSITORY / "csrc").glob("*.[hc]*")} <= names
            assert not [name for name in names if name.endswith(".so")]
            continue
        with zipfile.ZipFile(archive) as wheel:
            packed = [Path(name).name for name in wheel.namelist() if "_reshard_" in name]
        if kind == "wheel":
            assert sorted(packed) == BOTH and build.libraries() == []
            assert not archive.name.endswith("-any.whl"), "a library is for one platform"
        else:
            assert packed == [] and build.libraries() == BOTH, "an editable package has them in its source folder"


def choice(build: Build, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "-c from rltrain.reshard import native; print([native.backend('cpu') for _ in range(3)])"
    return build.run(code, **environment)


def test_without_a_library_torch_replaces_it_which_is_said_once(build: Build) -> None:
    result = choice(build)
    assert result.stdout.strip() == "['torch', 'torch', 'torch']", result.stderr
    assert result.stderr.count("the native library _reshard_cpu.so was not built") == 1
    assert "pip install -e ." in result.stderr
    off = choice(build, RLTRAIN_NATIVE="off")
    assert off.stdout.strip() == "['torch', 'torch', 'torch']" and off.stderr == ""
    required = choice(build, RLTRAIN_NATIVE="require")
    assert required.returncode != 0 and "UserError: RLTRAIN_NATIVE is require, but the native" in required.stderr
    wrong = choice(build, RLTRAIN_NATIVE="1")
    assert wrong.returncode != 0 and "RLTRAIN_NATIVE is '1'; expected one of auto, off, require" in wrong.stderr


def test_a_file_that_is_no_library_counts_as_none(build: Build) -> None:
    (build.tree / "rltrain/reshard/_reshard_cpu.so").write_text("no library")
    result = choice(build)
    assert result.stdout.strip() == "['torch', 'torch', 'torch']", result.stderr
    assert "cannot be loaded" in result.stderr
    assert choice(build, RLTRAIN_NATIVE="require").returncode != 0


@pytest.fixture
def library() -> Path:
    path = Path(native.__file__).with_name("_reshard_cpu.so")
    if not path.exists() and os.environ.get(native.VARIABLE) != "require":
        pytest.skip("the native library was not built")
    return path


def test_a_library_of_other_sources_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.load(library, "rs_cpu", {"slice": SLICE.itemsize})
    with pytest.raises(native.LibraryError, match="sizeof_slice.: 80.*, not .*72"):
        native.load(library, "rs_cpu", {"slice": 72})
    with pytest.raises(native.LibraryError, match="cannot be loaded .*rs_other_abi_version"):
        native.load(library, "rs_other", {})
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    native.cpu_library.cache_clear()
    try:
        with pytest.raises(native.LibraryError, match="built from other sources"):
            native.cpu_library()
        monkeypatch.setenv(native.VARIABLE, "auto")
        assert native.backend("cpu") == "torch"
        monkeypatch.setenv(native.VARIABLE, "require")
        with pytest.raises(UserError, match="built from other sources"):
            native.backend("cpu")
    finally:
        native.cpu_library.cache_clear()


KERNELS = {"Copy", "Amax", "Checksum", "DeltaMark", "DeltaWrite", "DeltaApply"}


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel on one target."""

    kernel: str
    target: str
    stack_bytes: int
    spilled_bytes: int
    registers: int


@pytest.fixture(scope="module")
def setup_commands() -> ModuleType:
    """Returns setup.py as a module, without running a build."""
    spec = importlib.util.spec_from_file_location("build_of_rltrain", REPOSITORY / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        patch.setattr(setuptools, "setup", lambda **_: None)
        spec.loader.exec_module(module)
    if module.nvcc() is None:
        pytest.skip("needs nvcc")
    return module


@pytest.fixture(scope="module")
def compiled(setup_commands: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Compiles the library as setup.py does. Returns its path and the assembler's report."""
    library = tmp_path_factory.mktemp("cuda") / "_reshard_cuda.so"
    flags = [*setup_commands.CUDA_FLAGS, *setup_commands.architecture_flags(), "-Xptxas", "-v"]
    source = REPOSITORY / "csrc/reshard_cuda.cu"
    done = subprocess.run(
        [setup_commands.nvcc(), *flags, source, "-o", library], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return library, done.stdout + done.stderr


def usages(report: str) -> list[Usage]:
    compilations = re.split(r"Compiling entry function ", report)[1:]
    result = []
    for text in compilations:
        name = re.match(r"'(\S+)' for '(sm_\w+)'", text)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        registers = re.search(r"Used (\d+) registers", text)
        assert name and stack and registers, text
        kernel = next((kernel for kernel in KERNELS if kernel in name[1]), name[1])
        numbers = int(stack[1]), int(stack[2]) + int(stack[3]), int(registers[1])
        result.append(Usage(kernel, name[2], *numbers))
    return result


@pytest.mark.slow  # nvcc compiles for three kinds of GPUs
def test_every_kernel_fits_in_registers_on_every_target(compiled: tuple[Path, str]) -> None:
    found = usages(compiled[1])
    assert {(usage.kernel, usage.target) for usage in found} == {
        (kernel, target) for kernel in KERNELS for target in ("sm_80", "sm_90a", "sm_100a")
    }
    for usage in found:
        print(usage)
        assert usage.stack_bytes == usage.spilled_bytes == 0, usage
        assert usage.registers <= 104, f"{usage}: too close to 128, the limit for two blocks on a multiprocessor"


@pytest.mark.slow  # nvcc compiles for three kinds of GPUs
def test_compilers_have_nothing_to_remark(compiled: tuple[Path, str]) -> None:
    assert "warning" not in compiled[1]


@pytest.mark.slow  # nvcc compiles for three kinds of GPUs
def test_the_library_loads_without_a_gpu_and_counts_devices(compiled: tuple[Path, str]) -> None:
    library = native.load(compiled[0], "rs_cuda", {"slice": SLICE.itemsize, "tile": TILE.itemsize})
    assert library.rs_cuda_device_count() >= 0
    if library.rs_cuda_device_count() == 0:
        assert library.rs_cuda_num_blocks(0) < 0
    needed = subprocess.run(["ldd", compiled[0]], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed, "it must load without a driver and a CUDA toolkit"
