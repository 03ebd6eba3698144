"""Writing Megatron's distributed checkpoint from canonical tensors."""

from pathlib import Path

from torch import Tensor

from rltrain.checkpoint.conversion.accounting import CountedSource
from rltrain.checkpoint.conversion.element_type import CHOICES, target_type
from rltrain.checkpoint.conversion.megatron_source import HF_FOLDER, MegatronSource
from rltrain.checkpoint.conversion.output_folder import output_folder
from rltrain.checkpoint.conversion.processes import Processes
from rltrain.checkpoint.conversion.progress import ConversionProgress
from rltrain.checkpoint.conversion.sources import Source, num_bytes
from rltrain.checkpoint.hf_files import copy_carried_files, write_config
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.megatron.arguments import megatron_arguments
from rltrain.checkpoint.megatron.writer import finish_checkpoint, write_checkpoint
from rltrain.checkpoint.prediction_layers import PredictionLayers
from rltrain.errors import CheckpointError
from rltrain.models import Architecture
from rltrain.runtime.grid import Grid


def convert_to_megatron(
    source: Source,
    output: Path,
    processes: Processes,
    *,
    writers: Grid,
    dtype: str | None = None,
    iteration: int | None = None,
) -> None:
    """Write `source` into the new folder `output`, which Megatron-LM and slime load at any layout.

    Its files are those that ranks of `writers` would write. `dtype` None keeps the source's; `iteration` None makes it
    a release: weights to start from. Config, tokenizer and layers that predict further tokens go into the folder `hf`
    in it. CheckpointError where the source or the output cannot be used. Collective over: all processes, which share
    out the writers.
    """
    dtype = target_type(source, dtype)
    counted = CountedSource(source)
    arguments = megatron_arguments(source.architecture, dtype=dtype)
    with (
        output_folder(output, processes) as folder,
        ConversionProgress(processes, output.name, num_bytes(source)) as bar,
    ):

        def read(tensor: int, row: int, col: int, rows: int, cols: int) -> Tensor:
            values = counted.read(Box(tensor, row, col, rows, cols))
            bar.advance(values.nbytes)
            return values

        write_checkpoint(
            folder,
            source.architecture,
            writers,
            writers.ranks[processes.rank :: processes.count],
            read,
            dtype=CHOICES[dtype],
            iteration=iteration,
        )
        counted.refuse_other_than_once(processes)
        if processes.first:
            finish_checkpoint(folder, source.architecture, iteration=iteration, arguments=arguments)
            (folder / HF_FOLDER).mkdir()
            write_config(source.settings, folder / HF_FOLDER, dtype)
            copy_carried_files(source.settings, folder / HF_FOLDER)
            PredictionLayers(source.settings, source.option).write_into(folder / HF_FOLDER)
            MegatronSource(folder, "--output")


def writers_grid(architecture: Architecture, processes: int, *, tp: int | None, pp: int | None, ep: int | None) -> Grid:
    """The writers that were asked for; where nothing was, one per process. They need not divide the model evenly.

    CheckpointError for expert-parallel writers of a model that has fewer experts.
    """
    if (tp, pp, ep) == (None, None, None):
        tp = processes
    tp, pp, ep = tp or 1, pp or 1, ep or 1
    if ep > max(1, architecture.num_experts):
        raise CheckpointError(
            f"--ep is {ep}, but the model ({architecture.family}) has {architecture.num_experts} experts; expected at "
            "most as many writers of experts"
        )
    return Grid(tuple(range(tp * pp * ep)), tp=tp, pp=pp, ep=ep)
