"""Milliseconds per weight sync: rltrain's, and what else does it, side by side on one model.

    python tools/benchmarks/weight_sync.py --ranks 2 --src tp2 --dst tp1 --params 100m
    python tools/benchmarks/weight_sync.py --ranks 4 --src tp2.ep4.etp1 --dst tp2 --experts 32
    python tools/benchmarks/weight_sync.py --ranks 4 --src tp2.pp2 --dst tp1 [--dtype bfloat16] [--bucket-mb 32] ...

Starts its own ranks on this machine, joined over the loopback interface. --src is Megatron's layout, --dst the
engine's, each on all ranks unless --src-ranks and --dst-ranks say otherwise ("0-1"); ranks that are left over hold
replicas. The rivals:

ours              Resharding.run, from Megatron's parameters into the engine's; ranks on CPUs read each other's memory
ours_wire         the same over the wire alone, as between nodes
refit             megatron-core's swap_model_weights, which knows Megatron's layouts alone: into a second Megatron model
                  of the layout --dst, not into the engine's fused parameters
gather_broadcast  tensor by tensor: all-gather over tensor parallelism, broadcast to the inference ranks, cut
raw               one all-to-all of as many bytes between the same ranks as our plan moves, from plain buffers: the
                  bound; with one rank, one copy of the same bytes
raw_buckets       the same in all-to-alls of at most --bucket-mb per rank

Each round times every rival once, in turn first, so that other load on the machine meets all alike; reported are
medians of the slowest rank. Before that each rival writes into spoilt parameters, which are then compared with the
checkpoint's values. The last line is one JSON object.

With --device cuda the ranks are the machine's GPUs, joined by NCCL. Then the overlap of pack and wire is measured too,
in two more runs: with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron wants it, and without.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from weight_sync_case import parse_count, parse_grid, parse_ranks
from weight_sync_run import RIVALS, run_rank

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: 2, or with --device cuda the number of GPUs")
    parser.add_argument("--src", help="layout of training, such as tp2.pp2; default: tp2, or tp1 on one rank")
    parser.add_argument("--dst", default="tp1", help="layout of inference, such as tp1")
    parser.add_argument("--src-ranks", default="", help="such as 0-1; default: all ranks")
    parser.add_argument("--dst-ranks", default="", help="such as 2-3; default: all ranks")
    parser.add_argument("--params", default="100m", help="about how many parameters, such as 100m or 1.5b")
    parser.add_argument(
        "--experts", type=int, default=0, help="of every layer, such as 32; layouts then have ep and etp"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--bucket-mb", type=float, default=32)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rivals", default=",".join(RIVALS), help="which of them, separated by commas")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--timeout-s", type=float, default=600, help="for each run of ranks")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where rank 0 writes the JSON
    parser.add_argument("--overlap-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rivals = [name for name in arguments.rivals.split(",") if name]
    if unknown := set(arguments.rivals) - set(RIVALS):
        parser.error(f"--rivals has {', '.join(sorted(unknown))}; known are {', '.join(RIVALS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use: there is none here")
    if arguments.ranks is None:
        arguments.ranks = torch.cuda.device_count() if arguments.device == "cuda" else 2
    if arguments.device == "cuda" and arguments.ranks > torch.cuda.device_count():
        parser.error(
            f"--ranks {arguments.ranks}: there are {torch.cuda.device_count()} GPUs, and NCCL needs one per rank"
        )
    arguments.src = arguments.src or ("tp2" if arguments.ranks > 1 else "tp1")
    _check_layouts(parser, arguments)
    return arguments


def _check_layouts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        source, destination = (
            parse_ranks(text, arguments.ranks) for text in (arguments.src_ranks, arguments.dst_ranks)
        )
        parse_grid(arguments.src, source)
        parse_grid(arguments.dst, destination)
        if idle := set(range(arguments.ranks)) - {*source, *destination}:
            raise ValueError(f"ranks {sorted(idle)} are neither in --src-ranks nor in --dst-ranks")
        if "pp" in arguments.dst:
            raise ValueError(f"--dst {arguments.dst}: engines split by tensor parallelism alone")
        parse_count(arguments.params)
    except ValueError as error:
        parser.error(str(error))


def launch(arguments: argparse.Namespace, extra: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Run this file on --ranks ranks with the same options and `extra` ones, in `variables`; what rank 0 found."""
    repository = Path(__file__).resolve().parents[2]
    python_path = os.pathsep.join(filter(None, (str(repository), variables.get("PYTHONPATH"))))
    # Dependencies warn at length about packages that are optional here.
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    environment = {**defaults, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        command += [__file__, *sys.argv[1:], f"--result={result}", *extra]
        with subprocess.Popen(command, env=environment) as torchrun:
            try:
                status = torchrun.wait(arguments.timeout_s)
            except subprocess.TimeoutExpired:
                torchrun.terminate()  # it ends its ranks first
                raise SystemExit(f"not done after --timeout-s {arguments.timeout_s:g}") from None
        if status:
            raise SystemExit(f"a rank failed: its message is above (torchrun ended with status {status})")
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def measure_overlap(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both settings of CUDA_DEVICE_MAX_CONNECTIONS, which is read when a process first uses CUDA."""
    unset = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    return {
        "max_connections_1": launch(arguments, ["--overlap-only"], {**os.environ, CONNECTIONS: "1"}),
        "max_connections_unset": launch(arguments, ["--overlap-only"], unset),
    }


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    found = launch(arguments, [], dict(os.environ))
    if arguments.device == "cuda":
        print(json.dumps(found), flush=True)  # two more runs follow
        found["overlap"] = measure_overlap(arguments)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
