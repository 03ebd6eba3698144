"""What `inspect` tells about a checkpoint."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from rltrain.checkpoint.conversion.element_type import type_name
from rltrain.checkpoint.conversion.formats import FORMAT_NAMES, format_of, open_source
from rltrain.checkpoint.conversion.megatron_source import MegatronSource
from rltrain.checkpoint.conversion.run_source import RunSource
from rltrain.checkpoint.conversion.sources import num_bytes

SHOWN = "{:<20}{}"


def describe(path: Path, option: str, *, settings: Path | None = None, tensors: bool = False) -> Iterator[str]:
    """Lines about the checkpoint at `path`; with `tensors` every canonical tensor's name, shape and type too.

    Opening it is the check that conversions make too: CheckpointError where it is not complete.
    """
    yield SHOWN.format("format", FORMAT_NAMES[format_of(path, option)])
    source = open_source(path, option, settings=settings)
    if isinstance(source, MegatronSource):
        yield SHOWN.format("iteration", source.reader.iteration)
        yield SHOWN.format("vocabulary rows", source.keys.padded_vocab_size)
        yield SHOWN.format("global tensors", len(source.keys.keys))
        yield SHOWN.format("layers stacked", "yes" if source.keys.stacked else "no")
    if isinstance(source, RunSource):
        yield SHOWN.format("step", source.checkpoint.step)
    for field in fields(source.architecture):
        yield SHOWN.format(field.name, getattr(source.architecture, field.name))
    elements = source.tensors.matrix_shapes.prod(axis=1)
    yield SHOWN.format("tensors", len(source.tensors.names))
    yield SHOWN.format("parameters", f"{int(elements.sum()):,}")
    yield SHOWN.format("bytes", f"{num_bytes(source):,}")
    counts = Counter(map(type_name, source.dtypes))
    yield SHOWN.format("types", ", ".join(f"{name} ({count} tensors)" for name, count in counts.most_common()))
    if tensors:
        width = max(map(len, source.tensors.names)) + 2
        for name, shape, dtype in zip(source.tensors.names, source.tensors.shapes, source.dtypes, strict=True):
            yield f"{name:<{width}}{list(shape)!s:<20}{type_name(dtype)}"
