"""Replaces launch/train.py: a job whose second node differs from the first as `FAULT` says."""

import os
import sys
from pathlib import Path

FAULT, NODE = os.environ["FAULT"], os.environ["GROUP_RANK"]


def disturb() -> None:
    """Changes the second node before the job begins."""
    from rltrain.runtime import machine, nodes

    if NODE != "1":
        return
    if FAULT == "code":
        nodes.digest_of_code = lambda _: "another"  # type: ignore[assignment]
    if FAULT == "full disk":
        machine.LEAST_FREE_BYTES = 1 << 60
    if FAULT == "folder":
        os.chdir(os.environ["OTHER_FOLDER"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from rltrain.cli.main import run_script

    disturb()
    sys.exit(run_script("train"))
