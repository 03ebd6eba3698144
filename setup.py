"""Builds the native libraries of csrc/ into rltrain/reshard/; all else is declared in pyproject.toml.

They have a plain C interface and are loaded by ctypes: neither torch nor Python's headers are needed. The CPU library
needs a C++ compiler (CXX, g++, c++ or clang++), the CUDA library nvcc (of CUDA_HOME or CUDA_PATH where set, else on
PATH or in /usr/local/cuda). RLTRAIN_NATIVE is that of native.py:

    auto     a library that cannot be built is left out (default)
    off      nothing is built
    require  an error where the CPU library cannot be built, or where nvcc is found and the CUDA library cannot be

RLTRAIN_CUDA_ARCHITECTURES, by default "80;90a;100a" as far as nvcc knows them, lists what the CUDA library is made for.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))
CPU = Extension("rltrain.reshard._reshard_cpu", ["csrc/reshard_cpu.cpp"], depends=HEADERS)
CUDA = Extension("rltrain.reshard._reshard_cuda", ["csrc/reshard_cuda.cu"], depends=HEADERS)

ARCHITECTURES = "RLTRAIN_CUDA_ARCHITECTURES"
CUDA_ARCHITECTURES = ("80", "90a", "100a")

# No fused multiply-add: every library rounds as torch does, which multiplies and adds one after the other. Nobody reads
# floating-point exception flags, and heeding them keeps conversions from being vectorised.
CPU_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
CUDA_FLAGS = ("-O3", "-std=c++17", "-fmad=false", "-t", "2", "-cudart", "static", "-Xcompiler", "-fPIC", "-shared")


class BuildNative(build_ext):
    """Compiles each library with one command, unless the one that is there was made from the same sources."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"  # a plain C interface serves every Python

    def run(self) -> None:
        mode = os.environ.get("RLTRAIN_NATIVE") or "auto"
        if mode not in ("auto", "off", "require"):
            raise SystemExit(f"RLTRAIN_NATIVE is {mode!r}; expected one of auto, off, require")
        for extension in self.extensions if mode != "off" else ():
            try:
                self.build_extension(extension)
            except (FileNotFoundError, subprocess.CalledProcessError) as error:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)  # made from other sources
                if mode == "require" and (extension is CPU or nvcc() is not None):
                    raise SystemExit(
                        f"RLTRAIN_NATIVE is require, but {extension.name} was not built: {error}"
                    ) from error
                print(
                    f"rltrain: {extension.name} was not built ({error}); torch operations replace it", file=sys.stderr
                )

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        flags = CPU_FLAGS if ext is CPU else CUDA_FLAGS
        digest = digest_of([*ext.sources, *ext.depends], [*flags, os.environ.get(ARCHITECTURES, "")])
        if library.exists() and digest.encode() in library.read_bytes():
            return
        compiler = cxx() if ext is CPU else [nvcc() or _absent("nvcc"), *architecture_flags()]
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_name(f"{library.name}.{os.getpid()}")
        command = [*compiler, *flags, f'-DRS_SOURCES="{digest}"', *ext.sources, "-o", str(unfinished)]
        print(shlex.join(command), file=sys.stderr)
        try:
            subprocess.run(command, check=True)
            os.replace(unfinished, library)
        finally:
            unfinished.unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        libraries = (self.get_ext_fullpath(extension.name) for extension in self.extensions)
        return [library for library in libraries if Path(library).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # with `pip install -e` they are written where they are used


def digest_of(sources: list[str], flags: list[str]) -> str:
    """Stands in the library as well (csrc/reshard.h), so that it shows what it was made from."""
    digest = hashlib.sha256(repr(flags).encode())
    for source in sources:
        digest.update(Path(source).read_bytes())
    return f"rltrain sources {digest.hexdigest()}"


def cxx() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return [next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None) or _absent("a C++ compiler")]


def nvcc() -> str | None:
    folder = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{folder}/bin/nvcc"] if folder else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, candidates)), None)


def architecture_flags() -> list[str]:
    """Machine code for every architecture, and for GPUs newer than those the intermediate code of the first."""
    chosen = os.environ.get(ARCHITECTURES, "").split(";")
    if chosen == [""]:
        command = [nvcc() or _absent("nvcc"), "--list-gpu-code"]
        known = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        chosen = [name for name in CUDA_ARCHITECTURES if f"sm_{name.rstrip('a')}" in known]
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in chosen]
    return [*codes, f"-gencode=arch=compute_{chosen[0]},code=compute_{chosen[0]}"]


def _absent(what: str) -> str:
    raise FileNotFoundError(f"{what} was not found")


setup(ext_modules=[CPU, CUDA], cmdclass={"build_ext": BuildNative})
