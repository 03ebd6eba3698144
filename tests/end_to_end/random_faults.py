"""Causes random or given faults in a job over hosts and prints the outcome of each as JSON. Run it by hand, as root.

    python -m tests.end_to_end.random_faults FOLDER --quickstart FILES [--hosts N] [--seed S] [--number K]
        [--kinds A,B] [--restarts] [key=value ...]

FILES is the output folder of tools/make_quickstart.py.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.host_job import Fault, HostJob, small_job
from tests.support.hosts import Hosts
from tests.support.jobs import read_records, sample_ids

Outcome = dict[str, Any]

# moment -> its approximate seconds
MOMENTS = {
    "join": 0.2,
    "connect": 0.2,
    "build": 0.5,
    "generate": 0.1,
    "update": 0.1,
    "weight_sync": 0.01,
    "write": 0.01,
    "complete": 0.01,
}
KINDS = ("cut", "kill", "stop", "kill agent", "stop agent", "slow")
LIMIT_S = 120.0


def ranks_at(moment: str, num_hosts: int) -> list[int]:
    half = num_hosts // 2
    if moment == "generate":
        return [*range(half, num_hosts)]
    if moment == "update":
        return [*range(half)]
    return [0] if moment == "complete" else [*range(num_hosts)]


def drawn(chance: random.Random, num_hosts: int, kinds: Sequence[str] = KINDS) -> Fault:
    moment, kind = chance.choice([*MOMENTS]), chance.choice(kinds)
    rank = chance.choice(ranks_at(moment, num_hosts))
    fault: Fault = {"moment": moment, "step": 0 if moment in ("join", "connect", "build") else 2, "rank": rank}
    fault |= {"kind": kind, "held": chance.random() < 0.5, "delay_s": chance.uniform(0, MOMENTS[moment])}
    fault["host"] = chance.randrange(num_hosts) + 1 if kind in ("cut", "slow", "kill agent", "stop agent") else rank + 1
    return fault | ({"mbit_per_s": 1.0} if kind == "slow" else {})


def outcome(hosts: Hosts, folder: Path, files: Path, faults: Sequence[Fault], *more: str, restarts: int = 0) -> Outcome:
    begin = time.monotonic()
    job = HostJob(hosts, folder, small_job(folder, files, len(hosts.numbers), *more), faults, restarts)
    try:
        job.run(LIMIT_S)
        last = max(job.happened.values(), default=begin)
        return {
            "faults": faults,
            "happened_s": [round(at - begin, 1) for at in job.happened.values()],
            "ended_s": {host: round(at - last, 1) for host, at in sorted(job.ended.items())},
            "left": {host: len(processes) for host, processes in job.left().items()},
            "statuses": job.statuses,
            "messages": {host: job.messages(host) for host in hosts.numbers},
        }
    finally:
        job.close()


def one_after_the_other(chance: random.Random, number: int, num_hosts: int, kinds: Sequence[str]) -> list[Fault]:
    """Returns faults for a job that continues after each of them. Later faults come at later steps."""
    faults = []
    for i in range(number):
        fault = drawn(chance, num_hosts, kinds)
        if fault["step"]:
            fault["step"] = 2 * (i + 1)
        if fault["kind"] in ("cut", "stop"):
            fault["heals_s"] = chance.uniform(10, 20)
        faults.append(fault)
    return faults


def result(folder: Path) -> tuple[dict[int, dict[str, float]], dict[int, list[int]]]:
    """Returns the metrics of learning, and the ids of the samples, by step."""
    records = read_records(folder / "run")
    learnt = ("train", "rollout/reward", "rollout/response")
    values = {r["step"]: {name: value for name, value in r.items() if name.startswith(learnt)} for r in records}
    assert [*values] == [record["step"] for record in records], "each step is reported once"
    return values, {step: sorted(ids) for step, ids in sample_ids(folder / "run").items()}


def with_restarts(hosts: Hosts, folder: Path, files: Path, faults: Sequence[Fault], *more: str) -> Outcome:
    """Runs with restarts, and compares the run with an undisturbed one."""
    more = (*more, f"steps={2 * len(faults) + 3}")
    whole = outcome(hosts, folder / "whole", files, [], *more)
    assert set(whole["statuses"]) == {0}, whole
    found = outcome(hosts, folder / "disturbed", files, faults, *more, restarts=3 * len(faults))
    (values, ids), (expected_values, expected_ids) = result(folder / "disturbed"), result(folder / "whole")
    counts = Counter(sample for of_step in ids.values() for sample in of_step)
    found["equal"] = {
        "metrics": values == expected_values,
        "ids": ids == expected_ids,
        "ids once": max(counts.values()) == 1 and ids.keys() == expected_ids.keys(),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quickstart", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--fault", type=json.loads, help="one, as JSON, in the place of drawn ones", action="append")
    parser.add_argument("--restarts", action="store_true", help="all of them to one job, which goes on after each")
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_intermixed_args()
    chance, kinds = random.Random(given.seed), given.kinds.split(",")
    given.folder.mkdir(parents=True, exist_ok=True)
    overrides = ["timeouts={no_progress_s: 20, lost_s: 8}", *given.overrides]
    with Hosts(given.folder, given.hosts) as hosts:
        folder = given.folder / str(given.seed)
        if given.restarts:
            faults = given.fault or one_after_the_other(chance, given.number, given.hosts, kinds)
            print(json.dumps(with_restarts(hosts, folder, given.quickstart, faults, *overrides)), flush=True)
            return
        for number, fault in enumerate(given.fault or [drawn(chance, given.hosts, kinds) for _ in range(given.number)]):
            found = outcome(hosts, folder / str(number), given.quickstart, [fault], "steps=4", *overrides)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
