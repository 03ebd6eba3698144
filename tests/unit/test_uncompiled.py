"""Where there is no GPU, ranks start without torch's compiler."""

import subprocess
import sys

import pytest
import torch

LOADED = "'torch._inductor.compile_fx' in sys.modules"


def printed(program: str) -> str:
    program = f"import sys, torch; {program}"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs run what Megatron has compiled")
def test_a_rank_without_a_gpu_does_not_load_the_compiler_and_leaves_it_to_others() -> None:
    program = f"compiled = torch.compile; import rltrain.job; print({LOADED}, torch.compile is compiled)"
    assert printed(program) == "False True"


def test_a_rank_with_a_gpu_loads_it() -> None:
    assert printed(f"torch.cuda.is_available = lambda: True; import rltrain.training.layers; print({LOADED})") == "True"
