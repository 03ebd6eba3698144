"""Writes docs/benchmarks/cpu.md: words from cpu.template.md, numbers from the results in the folder cpu.

    python tools/benchmarks/page.py                                  the page from the results that are there
    python tools/benchmarks/page.py --measure                        all of it measured anew first, for half an hour
    python tools/benchmarks/page.py --measure weight_sync orders     these sections only

Nothing else may run on the machine meanwhile. A section's results are replaced once all of its benchmarks have ended
well, so its table and its sentences are always of the same runs. The rollout's benchmark needs .venv-sglang, which
`bash tests/run.sh --sglang` makes.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import torch
from page_sections import SECTIONS, Section
from weight_sync_timing import describe_machine

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "docs/benchmarks"


def render(folder: Path) -> str:
    """The page from cpu.template.md and cpu/*.json in `folder`. SystemExit where these are of different machines."""
    found = {name: json.loads((folder / "cpu" / f"{name}.json").read_text()) for name in SECTIONS}
    machines = {json.dumps(data["machine"], sort_keys=True) for data in found.values()}
    if len(machines) > 1:
        raise SystemExit(f"measured on different machines: {'; '.join(sorted(machines))}. Measure all sections anew")
    values = describe(found["rollout"]["machine"], sorted({data["date"] for data in found.values()}))
    for name, section in SECTIONS.items():
        runs = found[name]["runs"]
        values[f"{name}_commands"] = "\n".join(
            f"    {command}" for command in dict.fromkeys(r["command"] for r in runs)
        )
        values |= {f"{name}_{field}": text for field, text in section.describe([r["result"] for r in runs]).items()}
    return Template((folder / "cpu.template.md").read_text()).substitute(values)


def describe(machine: dict[str, Any], dates: list[str]) -> dict[str, str]:
    python = ".".join(machine["python"].split(".")[:2])
    return {
        "cores": str(machine["cores"]),
        "cpu": machine["cpu"],
        "versions": f"Python {python}, torch {machine['torch'].split('+')[0]} (CPU), transformers "
        f"{machine['transformers']}, megatron-core {machine['megatron_core']}",
        "dates": " to ".join(dict.fromkeys((dates[0], dates[-1]))),
    }


def measure(section: Section) -> dict[str, Any]:
    """What its benchmarks find now. SystemExit where one fails."""
    machine = describe_machine(torch.device("cpu")) | {"transformers": version("transformers")}
    date = machine.pop("date")
    runs = [{"command": command, "result": run(command)} for _ in range(section.times) for command in section.commands]
    return {"date": date, "machine": machine, "runs": runs}


def run(command: str) -> Any:
    """The JSON object in the last line that `command` prints, run from the repository's root with this Python."""
    start, (program, *arguments) = time.monotonic(), shlex.split(command)
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    python_path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    print(command, flush=True)
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: ended with status {done.returncode}\n{done.stdout[-4000:]}")
    print(f"  {time.monotonic() - start:.0f} s", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the template, the results and the page")
    arguments = parser.parse_args()
    measured = () if arguments.measure is None else arguments.measure or SECTIONS
    for name in measured:
        found = json.dumps(measure(SECTIONS[name]), indent=1)
        (arguments.folder / "cpu" / f"{name}.json").write_text(found + "\n")
    (arguments.folder / "cpu.md").write_text(render(arguments.folder))


if __name__ == "__main__":
    main()
