"""Compares the trainer's model with the engine's on the same tokens, layer by layer.

    python tools/parity.py CHECKPOINT [--texts FILE] [--dtype bfloat16] [--residual-dtype float32] ...

CHECKPOINT is a Hugging Face folder. One process runs the training backend's model on all texts at once, as in an
update. It runs the embedded engine token by token, as in generation. With --images each sample begins with an image.
--transformers adds the model of transformers.
Prints the difference at every stage, and the first stage with a difference above --threshold. The exit status is 1 if
there is one.
"""

import argparse
import logging
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from rltrain.cli.parity import (
    THRESHOLDS,
    Checked,
    Difference,
    LogprobDifference,
    Run,
    Samples,
    differences,
    first_beyond,
    logprob_difference,
    random_samples,
    read_samples,
    stages,
    with_images,
)
from rltrain.cli.serve import device_named
from rltrain.config import schema
from rltrain.errors import UserError
from rltrain.models import read_architecture

TRAINER, SHARDED, ENGINE, TRANSFORMERS = "trainer", "sharded trainer", "engine", "transformers"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    made.add_argument(
        "--engine-checkpoint", type=Path, metavar="DIR", help="checkpoint of the engine (default: CHECKPOINT)"
    )
    made.add_argument("--texts", type=Path, metavar="FILE", help="one text per line (default: random tokens)")
    made.add_argument(
        "--images", type=Path, nargs="+", metavar="FILE", help="image files; each sample begins with one of them"
    )
    made.add_argument("--backend", choices=["megatron", "fsdp"], default="megatron", help="training backend")
    made.add_argument("--samples", type=int, default=8, help="number of samples of random tokens")
    made.add_argument("--tokens", type=int, default=64, help="length of random samples, and most tokens of a text")
    made.add_argument("--dtype", choices=sorted(THRESHOLDS), default="bfloat16", help="model.dtype")
    made.add_argument("--residual-dtype", choices=["float32"], help="model.residual_dtype")
    made.add_argument("--head-dtype", choices=["float32"], help="model.head_dtype")
    made.add_argument("--threshold", type=float, help="relative difference (default: by dtype)")
    made.add_argument("--transformers", action="store_true", help="compare the trainer with transformers too")
    made.add_argument("--device", default="cpu")
    return made


def compare(arguments: argparse.Namespace, console: Console) -> bool:
    """Prints the differences. Returns whether no stage is above the threshold. Raises UserError."""
    device = str(device_named(arguments.device))
    types: dict[str, Any] = {"residual_dtype": arguments.residual_dtype, "head_dtype": arguments.head_dtype}
    types = {key: value for key, value in types.items() if value not in (None, arguments.dtype)}
    if types and arguments.backend == "fsdp":
        raise UserError(f"--backend fsdp computes in --dtype only; expected no {', '.join(types)}")
    architecture = read_architecture(arguments.checkpoint, "CHECKPOINT", sees=arguments.images is not None)
    if arguments.texts:
        samples = read_samples(arguments.texts, arguments.checkpoint, arguments.tokens)
    else:
        samples = random_samples(arguments.samples, arguments.tokens, architecture.vocab_size)
    with ExitStack() as stack:
        images = None
        if arguments.images:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            samples, images = with_images(samples, arguments.images, arguments.checkpoint, folder)
            types["vision"] = schema.VisionSettings()
        trained, served = (
            Checked(schema.Model(path=str(path), dtype=arguments.dtype, **types), device, images)
            for path in (arguments.checkpoint, arguments.engine_checkpoint or arguments.checkpoint)
        )
        return compare_models(arguments, trained, served, samples, architecture.num_layers, console)


def compare_models(
    arguments: argparse.Namespace,
    trained: Checked,
    served: Checked,
    samples: Samples,
    num_layers: int,
    console: Console,
) -> bool:
    """Prints the differences between the trainer's and other models on `samples` (see `compare`)."""
    threshold = arguments.threshold or THRESHOLDS[arguments.dtype]
    of_trainer = _run_of(SHARDED if arguments.backend == "fsdp" else TRAINER)(trained, samples)
    others = [(ENGINE, served), *([(TRANSFORMERS, trained)] if arguments.transformers else [])]
    are_alike = True
    for name, checked in others:
        of_other = _run_of(name)(checked, samples)
        found = differences(of_trainer, of_other, stages(num_layers))
        _print(console, name, found, logprob_difference(of_trainer, of_other, samples), threshold)
        are_alike &= first_beyond(found, threshold) is None
    return are_alike


def _run_of(name: str) -> Run:
    """Returns a model's run. Imports it here, because Megatron and transformers take seconds to load."""
    if name == TRAINER:
        from rltrain.cli.parity import run_trainer as run
    elif name == SHARDED:
        from rltrain.cli.parity import run_sharded as run
    elif name == ENGINE:
        from rltrain.cli.parity import run_engine as run
    else:
        from rltrain.cli.parity import run_transformers as run
    return run


def _print(console: Console, name: str, found: list[Difference], logprobs: LogprobDifference, threshold: float) -> None:
    table = Table(title=f"trainer and {name}", title_justify="left")
    table.add_column("stage")
    for column in ("relative", "largest", "at token"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(one.stage, f"{one.relative:.1e}", f"{one.largest:.1e}", str(one.token))
    console.print(table)
    console.print(f"log-probs: {logprobs.mean:.1e} mean, {logprobs.largest:.1e} largest, KL {logprobs.kl:.1e}")
    beyond = first_beyond(found, threshold)
    if beyond is None:
        console.print(f"no stage differs by more than {threshold:.0e}, relative")
    else:
        console.print(f"first stage beyond {threshold:.0e}: {beyond.stage}, by {beyond.relative:.1e}")


def main() -> int:
    warnings.filterwarnings("ignore", module="megatron")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        return 0 if compare(parser().parse_args(), Console()) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
