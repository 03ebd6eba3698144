"""Where there is no GPU, ranks start without torch's compiler."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("has_gpu", [False, True])
def test_only_a_rank_with_a_gpu_loads_the_compiler_and_torch_compiles_as_before(has_gpu: bool) -> None:
    program = f"""
import sys, torch
torch.cuda.is_available = lambda: {has_gpu}
compiled = torch.compile
import rltrain.job
print("torch._inductor.compile_fx" in sys.modules, torch.compile is compiled)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(has_gpu), "True"]
