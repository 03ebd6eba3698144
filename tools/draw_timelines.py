"""Draws the timelines of docs/placement.md from traces of short jobs: the same job in every mode, and colocated.

python tools/draw_timelines.py [--output docs/pictures] [--steps 8] [NAME ...]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools/benchmarks")]

from orders import CASES, MODES, run_mode  # noqa: E402

from rltrain.cli.report import picture  # noqa: E402
from rltrain.cli.report_run import read_run  # noqa: E402

COLOCATED = [
    "placement={'actor, rollout, reward': 0-2}",
    *("actor.offload=true", "rollout.offload=true", "rollout.parallel={tp: 1}"),
]
PICTURES = {
    "sequential": MODES["sequential"],
    "pipelined": [*MODES["pipelined"], "schedule.chunks=4"],
    "asynchronous": MODES["asynchronous-1"],
    "colocated": COLOCATED,
}
SHOWN = 2
"""Number of steps shown, from the middle of the run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs/pictures")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} (default: all)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start")
        make = [sys.executable, "tools/make_quickstart.py", "--output", str(start), "--seed", "0"]
        subprocess.run(make, cwd=REPOSITORY, check=True, capture_output=True)
        for name in arguments.names or PICTURES:
            output = Path(folder, name)
            run_mode(start, output, [f"steps={arguments.steps}", *CASES["slow_rewards"], *PICTURES[name]])
            last = arguments.steps // 2 + SHOWN - 1
            drawn = picture(read_run(output).ranks, last - SHOWN + 1, last)
            (arguments.output / f"{name}.svg").write_text(drawn, encoding="utf-8")
            print(arguments.output / f"{name}.svg", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
