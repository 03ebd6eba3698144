"""Triton's kernels without a GPU: run by Triton's interpreter, and compiled for GPUs that are not here.

`tests/conftest.py` calls `interpret` before any test imports Triton, which reads the setting when it is imported and
for every kernel. Kernels then take CPU tensors. The interpreter computes what a kernel says, one program after the
other. It shows neither races nor speed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTING = "TRITON_INTERPRET"
ARCHITECTURES = (80, 90, 100)
"""Compute capabilities of A100, H100 and B200, times ten."""


def interpret() -> None:
    """Lets Triton interpret kernels in this process and its children, unless this machine has an NVIDIA GPU."""
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault(SETTING, "1")


def interprets() -> bool:
    """Returns whether kernels take CPU tensors here."""
    return os.environ.get(SETTING) == "1"


def mend() -> None:
    """Lets interpreted kernels loop over ranges of loaded numbers with numpy 2.4 and later.

    The interpreter's numbers are arrays with one element, which numpy no longer converts. Does nothing before Triton is
    imported.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "mended"):
        return
    patch, interpreter.mended = interpreter._patch_lang_tensor, True

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def compiled(
    module: str, kernels: Mapping[str, tuple[Mapping[str, str], Mapping[str, object]]], num_warps: int = 4
) -> dict[str, dict[int, dict[str, int]]]:
    """Compiles kernels of `module` for every architecture, in another process because this one interprets.

    `kernels` has for each name its signature, such as {"x": "*bf16", "rows": "i32"}, and its compile-time constants.
    Returns `registers` and bytes of `spills` of each by name and architecture. A kernel that does not compile is an
    error.
    """
    request = json.dumps([module, {name: list(of_kernel) for name, of_kernel in kernels.items()}, num_warps])
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    command = [sys.executable, "-m", "tests.support.triton_interpreter", request]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return {name: {int(number): figures for number, figures in of.items()} for name, of in answer.items()}


def _compile_all(request: str) -> dict[str, dict[int, dict[str, int]]]:
    import importlib

    name, kernels, num_warps = json.loads(request)
    module = importlib.import_module(name)
    return {
        kernel: {number: _compile(getattr(module, kernel), *of_kernel, number, num_warps) for number in ARCHITECTURES}
        for kernel, of_kernel in kernels.items()
    }


def _compile(
    kernel: object, signature: dict[str, str], constants: dict[str, object], architecture: int, num_warps: int
) -> dict[str, int]:
    import re
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (
        int(found[1]) if (found := re.search(rf"\b{what}:(\d+)", usage.stdout)) else 0
        for what in ("REG", "STACK", "LOCAL")
    )
    return {"registers": registers, "spills": stack + local}


if __name__ == "__main__":
    print(json.dumps(_compile_all(sys.argv[1])))
