"""Memory that a process frees is there for what it allocates next."""

import os
import subprocess
import sys

import pytest

from rltrain.runtime.machine import VARIABLES

PROGRAM = """
import ctypes, resource, sys
from rltrain.runtime.machine import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
libc, size = ctypes.CDLL(None), 8 << 20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [libc.malloc(size) for _ in range(4)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces:
        libc.free(piece)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, **variables: str) -> tuple[str, int]:
    """Whether memory is said to be kept; how many pages the kernel gave for 32 MB allocated for the third time."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", PROGRAM, mode]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    kept, count = printed.split()
    return kept, int(count)


def test_freed_memory_is_kept() -> None:
    kept, count = faults("keep")
    if kept == "False":
        pytest.skip("the C library is not glibc")
    assert count < 100
    assert faults("leave")[1] > 1000


def test_what_the_environment_says_of_the_allocator_is_left_alone() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
