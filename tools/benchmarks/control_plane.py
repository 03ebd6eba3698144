"""What the control code of a job costs at 64 to 4,096 ranks: seconds, memory, store traffic, messages, communicators.

    python tools/benchmarks/control_plane.py [--ranks 64 256 1024 4096] [--capacity] [--output FILE]

The classes are those of a job. Only what they talk over is replaced: the store by one in this process that counts
(`counted_store.py`), process groups by objects that count the sizes of messages (`counted_messages.py`). The job is
GRPO in asynchronous order with syncs in flight: actor and reference on the first half of the ranks by TP=8, engines of
TP=2 and the reward on the other half, eight ranks per node. Work that a rank does alone is timed on a few ranks; what
ranks ask of the store is counted on all of them. `--capacity` also measures what one real TCPStore carries over
loopback, and what real gloo groups ask of a store. The last line is one JSON object.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from control_plane_job import Cost, JobAtSize
from control_plane_phases import PHASES
from gloo_start import measure_gloo
from store_capacity import measure_capacity

FORETOLD_RANKS = 16384
LONGEST_START_UP_S = 30.0


def measure(num_ranks: int, folder: Path, told: Callable[[str], None]) -> dict[str, Cost]:
    """By phase."""
    job = JobAtSize(num_ranks, folder / str(num_ranks))
    costs = {}
    for name, phase in PHASES.items():
        costs[name] = phase(job)
        told(f"{num_ranks:6d} ranks  {name:<24}{costs[name]}")
    return costs


def exponent(sizes: list[int], values: list[float]) -> float | None:
    """Of the growth from the last but one size to the last: 1 grows as the ranks do."""
    if len(sizes) < 2 or min(values[-2:]) <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def growth(measured: dict[int, dict[str, Cost]]) -> dict[str, dict[str, float]]:
    """Phase -> by quantity, the exponent of its growth, and what it comes to at FORETOLD_RANKS by that."""
    sizes = sorted(measured)
    found: dict[str, dict[str, float]] = {}
    for name in measured[sizes[-1]]:
        for quantity in Cost.QUANTITIES:
            values = [getattr(measured[size][name], quantity) for size in sizes]
            power = exponent(sizes, values)
            if power is not None:
                foretold = values[-1] * (FORETOLD_RANKS / sizes[-1]) ** max(power, 0.0)
                found.setdefault(name, {}).update({quantity: round(power, 2), f"{quantity} foretold": foretold})
    return found


def lines_of(grown: dict[str, dict[str, float]]) -> Iterable[str]:
    yield f"growth: exponent, and the value at {FORETOLD_RANKS} ranks"
    for name, found in grown.items():
        parts = [f"{q} ^{found[q]:.2f} {found[f'{q} foretold']:.4g}" for q in Cost.QUANTITIES if q in found]
        yield f"  {name:<24}" + "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--capacity", action="store_true", help="measure a real store and real gloo groups too")
    parser.add_argument("--output", type=Path, help="file for the JSON object")
    arguments = parser.parse_args()

    def told(line: str) -> None:
        print(line, flush=True)

    real = {"store": measure_capacity(told), "gloo": measure_gloo(told)} if arguments.capacity else {}
    with tempfile.TemporaryDirectory() as folder:
        measured = {size: measure(size, Path(folder), told) for size in sorted(arguments.ranks)}
    grown = growth(measured)
    for line in lines_of(grown):
        told(line)
    result = {
        "ranks": {size: {name: cost.as_json() for name, cost in costs.items()} for size, costs in measured.items()},
        "growth": grown,
        **real,
    }
    text = json.dumps(result)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
