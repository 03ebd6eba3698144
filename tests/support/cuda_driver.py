"""The parts of torch.cuda needed for shared memory, on a stand-in for NVIDIA's driver (cuda_driver.c)."""

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
UUID = "GPU-stand-in"


def build(folder: Path) -> Path:
    """Builds the library and returns its path.

    Its soname is libcuda.so.1, so once it is loaded a lookup under that name finds it too.
    """
    library, compiler = folder / "libcuda_stand_in.so", shutil.which("cc") or shutil.which("gcc")
    assert compiler, "needs a C compiler, as rltrain itself does"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


def install(library: Path) -> ctypes.CDLL:
    """Makes this process appear to have a GPU, except for computing on it. Only for subprocesses of a test."""
    driver = ctypes.CDLL(str(library))
    driver.stand_in_host_address.restype = ctypes.c_void_p
    as_tensor = torch.as_tensor

    def of_device(data: Any, device: Any = None, **settings: Any) -> Tensor:
        if not hasattr(data, "__cuda_array_interface__"):
            return as_tensor(data, device=device, **settings)
        assert str(device) == "cuda:0"
        return _tensor_at(driver, data)

    fakes: dict[str, Any] = {
        "synchronize": lambda device=None: driver.stand_in_make_current(),
        "device": lambda device: nullcontext(),
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(uuid=UUID),
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    torch.as_tensor = of_device  # type: ignore[assignment]
    return driver


def _tensor_at(driver: ctypes.CDLL, owner: Any) -> Tensor:
    """Returns the bytes at the address of a CUDA array interface, as described in numba's documentation."""
    interface = owner.__cuda_array_interface__
    assert {name: interface[name] for name in ("typestr", "strides", "version")} == {
        "typestr": "|u1",
        "strides": None,
        "version": 3,
    }
    (num_bytes,), (address, is_read_only) = interface["shape"], interface["data"]
    assert isinstance(address, int) and is_read_only is False
    host = driver.stand_in_host_address(ctypes.c_uint64(address))
    assert host, f"{address:#x} is no address on the device"
    memory = (ctypes.c_uint8 * num_bytes).from_address(host)
    memory.owner = owner  # type: ignore[attr-defined]  # torch keeps it as long as the storage
    return torch.frombuffer(memory, dtype=torch.uint8)
