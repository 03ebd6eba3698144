"""The conversion command as users start it: alone, by torchrun, and interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rltrain.cli.main import main
from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, SETTING, Popen, run
from tests.support.checkpoint_files import make_checkpoint, stored_tensors

ALONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
COMMAND = "tools/convert_checkpoint.py"


def convert(launcher: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return run([*launcher, COMMAND, *map(str, arguments)], timeout_s=120)


def succeed(launcher: list[str], *arguments: object) -> str:
    done = convert(launcher, *arguments)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_two_processes_convert_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converts in unforked processes like a user's, and back in forked ones."""
    original, megatron, back = tmp_path / "original", tmp_path / "megatron", tmp_path / "back"
    tensors = make_checkpoint(original, "qwen3_moe", dtype=torch.bfloat16, shard="20KB")
    with monkeypatch.context() as not_forked:
        not_forked.setenv(SETTING, "off")
        printed = succeed(TWO, "hf-to-megatron", "--input", original, "--output", megatron)
    assert printed.count(f"wrote {megatron}") == 1
    assert sorted(path.name for path in (megatron / "release").glob("__*_0.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    succeed(TWO, "megatron-to-hf", "--input", megatron, "--output", back, "--max-file-gb", 2e-5)
    written = stored_tensors(back)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron", "original"]

    assert main(["convert", "verify", str(original), str(megatron)]) == 0
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["model.layers.0.mlp.experts.2.up_proj.weight"][3, 4] = 100.0
    changed["model.norm.weight"][0] = 100.0
    (back / "model.safetensors.index.json").unlink()
    save_file(changed, back / "model.safetensors")
    found = convert(ALONE, "verify", megatron, back)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert found.stdout.startswith("different: model.layers.0.mlp.experts.2.up_proj.weight[3, 4] is")
    assert f"and 100.0 in {back}\n" in found.stdout


def test_mistakes_are_told_without_a_traceback(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original")
    refused = convert(ALONE, "hf-to-megatron", "--input", tmp_path / "original", "--output", tmp_path / "original")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert f"refused: {tmp_path / 'original'} exists" in refused.stderr


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Returns a checkpoint large enough that its conversion takes a moment."""
    make_checkpoint(tmp_path / "large", "llama", vocab_size=300_000)
    return tmp_path / "large"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_an_interrupted_conversion_leaves_nothing_that_looks_complete(number: signal.Signals, large: Path) -> None:
    output, partial = large.with_name("output"), large.with_name(".output.partial")
    command = [*ALONE, COMMAND, "hf-to-megatron", "--input", str(large), "--output", str(output)]
    process = Popen(command, cwd=REPOSITORY, env={**os.environ, **FORKED_ENVIRONMENT}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(partial.glob("release/*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(number)
    status = process.wait(timeout=60)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM)
    assert not output.exists()
    assert partial.exists() is (number == signal.SIGKILL)
    assert main(["convert", "hf-to-megatron", "--input", str(large), "--output", str(output)]) == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["large", "output"]
    assert main(["convert", "verify", str(large), str(output)]) == 0
