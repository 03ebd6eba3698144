"""Weights alone, saved and loaded through layouts: for models that learn nothing and yet change."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.checkpoint.saved_state import Counts, Destination, SavedState, contents, flat_name
from rltrain.reshard.layout import Layout
from rltrain.training.shards import answered_for, replica_of

WEIGHTS = "weights"


def save_weights(layout: Layout, rank: int, read: Callable[[str], Tensor]) -> Contents:
    """The parameters that `rank` answers for: of ranks with the same ones, the first. `read` gives a parameter by its
    name, flat and on the host."""
    names = [name for name, _ in layout.on(rank).parameters]
    pieces = answered_for(layout, rank)
    if replica_of(layout, rank)[0]:
        pieces = pieces[:0]
    flats = {flat_name(WEIGHTS, names[number]): read(names[number]) for number in sorted({*pieces["parameter"]})}
    return contents(layout.tensors, names, pieces, flats, Counts(0, 0))


def load_weights(layout: Layout, rank: int, files: Sequence[AnyFile], parameters: Mapping[str, Tensor]) -> None:
    """Fill `parameters`, those of `rank` in `layout`, from the files of all ranks that saved, whatever their layout.

    CheckpointError as `SavedState` raises it. Not collective.
    """
    mine = layout.on(rank)
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    SavedState(files, layout.tensors).read([Destination(WEIGHTS, mine.pieces, flats)])
