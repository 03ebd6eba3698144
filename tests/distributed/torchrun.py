"""Runs a function on real torchrun ranks over gloo, forked, and returns what each rank returned."""

import faulthandler
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.forked.popen import run


def run_distributed(
    case: str, num_ranks: int, arguments: dict[str, Any] | None = None, timeout_s: float = 400
) -> list[Any]:
    """Call `case` ("module:function") with `arguments` on every rank; the JSON values it returned, by rank."""
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [__file__, case, json.dumps(arguments or {}), results]
        done = run(command, timeout_s)
        if done.returncode != 0:
            raise AssertionError(f"{case} failed on {num_ranks} ranks:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
        return [json.loads(Path(results, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _main(case: str, arguments: str, results: str) -> None:
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    module, function = case.split(":")
    value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    rank = torch.distributed.get_rank()
    Path(results, f"{rank}.json").write_text(json.dumps(value))
    torch.distributed.barrier()
    # Without teardown: it aborts where a case has left a receive open on purpose.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
