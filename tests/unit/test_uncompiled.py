"""Where there is no GPU, ranks start without torch's compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import popen as forked

PROGRAM = """
import sys, torch
torch.cuda.is_available = lambda: {has_gpu}
compiled = torch.compile
import rltrain.trainer, rltrain.training.megatron.backend
print("torch._inductor.compile_fx" in sys.modules, torch.compile is compiled)
"""


def test_a_rank_without_a_gpu_does_not_load_the_compiler(tmp_path: Path) -> None:
    """Nor does what ranks of tests are forked from."""
    script = tmp_path / "rank.py"
    script.write_text(PROGRAM.format(has_gpu=False))
    done = forked.run([sys.executable, str(script)], timeout_s=120)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.slow  # the compiler takes long to load
def test_a_rank_with_a_gpu_does_and_torch_compiles_as_before() -> None:
    program = PROGRAM.format(has_gpu=True)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
