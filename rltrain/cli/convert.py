"""The command `rltrain convert` and tools/convert_checkpoint.py."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from rltrain.checkpoint.conversion import (
    FORMAT_NAMES,
    convert_to_hf,
    convert_to_megatron,
    describe,
    first_difference,
    format_of,
    open_source,
    writers_grid,
)
from rltrain.checkpoint.conversion_sources import (
    CHOICES,
    CheckpointSource,
    HfSource,
    Processes,
    RunSource,
    join_processes,
)
from rltrain.errors import CheckpointError

EXIT_DIFFERENT = 1


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand. Returns the exit status: 0 for success, 1 if `verify` found a difference, 2 for a mistake of
    the user."""
    status: int = arguments.run(arguments, join_processes())
    return status


def _hf_to_megatron(arguments: argparse.Namespace, processes: Processes) -> int:
    _refuse_other_format(arguments.input, "hf")
    source = HfSource(arguments.input, "--input", compare_tied_head=processes.first)
    writers = writers_grid(source.architecture, processes.count, tp=arguments.tp, pp=arguments.pp, ep=arguments.ep)
    return _timed(
        arguments.output,
        processes,
        lambda: convert_to_megatron(
            source,
            arguments.output,
            processes,
            writers=writers,
            dtype=arguments.dtype,
            iteration=arguments.iteration,
        ),
    )


def _megatron_to_hf(arguments: argparse.Namespace, processes: Processes) -> int:
    _refuse_other_format(arguments.input, "megatron")
    return _to_hf(open_source(arguments.input, "--input", settings=arguments.hf_config), arguments, processes)


def _run_to_hf(arguments: argparse.Namespace, processes: Processes) -> int:
    _refuse_other_format(arguments.input, "run")
    share = (processes.rank, processes.count)
    return _to_hf(RunSource(arguments.input, "--input", arguments.hf_config, share=share), arguments, processes)


def _to_hf(source: CheckpointSource, arguments: argparse.Namespace, processes: Processes) -> int:
    max_file_bytes = int(arguments.max_file_gb * 10**9)
    return _timed(
        arguments.output,
        processes,
        lambda: convert_to_hf(
            source, arguments.output, processes, dtype=arguments.dtype, max_file_bytes=max_file_bytes
        ),
    )


def _inspect(arguments: argparse.Namespace, processes: Processes) -> int:
    if processes.first:
        for line in describe(arguments.path, "PATH", settings=arguments.hf_config, tensors=arguments.tensors):
            print(line)
    return 0


def _verify(arguments: argparse.Namespace, processes: Processes) -> int:
    a, b = (
        open_source(path, name, settings=arguments.hf_config) for path, name in ((arguments.a, "A"), (arguments.b, "B"))
    )
    difference = first_difference(a, b, processes, dtype=arguments.dtype)
    if processes.first:
        print(f"different: {difference}" if difference else f"equal: all {len(a.tensors.names)} tensors")
    return EXIT_DIFFERENT if difference else 0


def _timed(output: Path, processes: Processes, convert: Callable[[], None]) -> int:
    begin = time.monotonic()
    convert()
    if processes.first:
        print(f"wrote {output} in {time.monotonic() - begin:.1f} s")
    return 0


def _refuse_other_format(path: Path, wanted: str) -> None:
    found = format_of(path, "--input")
    if found != wanted:
        raise CheckpointError(
            f"{path} is a checkpoint of {FORMAT_NAMES[found]}; expected {FORMAT_NAMES[wanted]} (option --input)"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = (
        "Converts checkpoints between Hugging Face and Megatron, exports those of runs, and compares\nthem. "
        "Under torchrun the work is split over its processes."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    to_megatron = commands.add_parser("hf-to-megatron", help="write Megatron's distributed checkpoint (torch_dist)")
    _add_conversion(to_megatron, _hf_to_megatron)
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        to_megatron.add_argument(f"--{name}", type=_count, help=f"{what}-parallel writers (default: one per process)")
    to_megatron.add_argument(
        "--iteration", type=_count, metavar="N", help="write iter_N, as a training run would (default: a release)"
    )

    for name, run, what in (
        ("megatron-to-hf", _megatron_to_hf, "write a Hugging Face checkpoint (safetensors)"),
        ("run-to-hf", _run_to_hf, "write the actor of a run's checkpoint, with merged adapters"),
    ):
        to_hf = commands.add_parser(name, help=what)
        _add_conversion(to_hf, run)
        _add_hf_config(to_hf)
        to_hf.add_argument(
            "--max-file-gb", type=_size, default=5.0, help="largest safetensors file, in 10^9 bytes (default 5)"
        )

    inspect = commands.add_parser("inspect", help="describe a checkpoint and check that it is complete")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("path", type=Path, metavar="PATH")
    inspect.add_argument("--tensors", action="store_true", help="list all tensors")
    _add_hf_config(inspect)

    verify = commands.add_parser("verify", help="compare two checkpoints of either format, tensor by tensor")
    verify.set_defaults(run=_verify)
    verify.add_argument("a", type=Path, metavar="A")
    verify.add_argument("b", type=Path, metavar="B")
    verify.add_argument("--dtype", choices=CHOICES, help="round values to this type before comparing")
    _add_hf_config(verify)


def _add_conversion(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, Processes], int]) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--input", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--dtype", choices=CHOICES, help="data type of the output (default: as in the input)")


def _add_hf_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer, for checkpoints without them",
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
