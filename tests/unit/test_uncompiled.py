"""Where there is no GPU, ranks start without torch's compiler."""

import subprocess
import sys

import pytest
import torch

LOADED = "import sys; print('torch._inductor.compile_fx' in sys.modules)"


def printed(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs run what Megatron has compiled")
def test_a_rank_without_a_gpu_does_not_load_the_compiler() -> None:
    assert printed(f"import rltrain.job; {LOADED}") == "False"
    assert printed(f"import megatron.core; {LOADED}") == "True", "this test has nothing to show any more"


def test_torch_compiles_for_others_as_before() -> None:
    before = "import torch; compiled = torch.compile; import rltrain.training"
    assert printed(f"{before}; print(torch.compile is compiled)") == "True"


def test_a_rank_with_a_gpu_loads_it() -> None:
    program = f"import torch; torch.cuda.is_available = lambda: True; import rltrain.training.layers; {LOADED}"
    assert printed(program) == "True"
