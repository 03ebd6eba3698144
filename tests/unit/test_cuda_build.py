"""What nvcc says of the CUDA kernels, and the library where there is no GPU."""

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import setuptools

from rltrain.reshard import native
from rltrain.reshard.copy_table import TILE
from rltrain.reshard.native import SLICE

pytestmark = pytest.mark.slow  # nvcc compiles for three kinds of GPUs

REPOSITORY = Path(__file__).parents[2]
KERNELS = {"Copy", "Amax", "Checksum", "DeltaMark", "DeltaWrite", "DeltaApply"}


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one target."""

    kernel: str
    target: str
    stack_bytes: int
    spilled_bytes: int
    registers: int


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py, for the commands it would run."""
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
def compiled(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library, compiled as setup.py does, and the report of the assembler."""
    library = tmp_path_factory.mktemp("cuda") / "_reshard_cuda.so"
    flags = [*build.CUDA_FLAGS, *build.architecture_flags(), "-Xptxas", "-v"]
    source = REPOSITORY / "csrc/reshard_cuda.cu"
    done = subprocess.run([build.nvcc(), *flags, source, "-o", library], capture_output=True, text=True, timeout=300)
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


def test_every_kernel_fits_in_registers_on_every_target(compiled: tuple[Path, str]) -> None:
    found = usages(compiled[1])
    assert {(usage.kernel, usage.target) for usage in found} == {
        (kernel, target) for kernel in KERNELS for target in ("sm_80", "sm_90a", "sm_100a")
    }
    for usage in found:
        print(usage)
        assert usage.stack_bytes == usage.spilled_bytes == 0, usage
        assert usage.registers <= 104, f"{usage}: too near to the 128 at which two blocks still fit a multiprocessor"


def test_compilers_have_nothing_to_remark(compiled: tuple[Path, str]) -> None:
    assert "warning" not in compiled[1]


def test_the_library_loads_without_a_gpu_and_counts_devices(compiled: tuple[Path, str]) -> None:
    library = native.load(compiled[0], "rs_cuda", {"slice": SLICE.itemsize, "tile": TILE.itemsize})
    assert library.rs_cuda_device_count() >= 0
    if library.rs_cuda_device_count() == 0:
        assert library.rs_cuda_num_blocks(0) < 0
    needed = subprocess.run(["ldd", compiled[0]], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed, "it must load where there is neither a driver nor a CUDA toolkit"
