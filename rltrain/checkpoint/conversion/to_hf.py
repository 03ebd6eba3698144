"""Writing a Hugging Face checkpoint from canonical tensors."""

from pathlib import Path

from rltrain.checkpoint.conversion.accounting import CountedSource, row_blocks
from rltrain.checkpoint.conversion.element_type import target_type
from rltrain.checkpoint.conversion.output_folder import output_folder
from rltrain.checkpoint.conversion.processes import Processes
from rltrain.checkpoint.conversion.progress import ConversionProgress
from rltrain.checkpoint.conversion.sources import HfSource, Source
from rltrain.checkpoint.durable_file import BEHIND_BYTES
from rltrain.checkpoint.hf_files import METADATA, HfFile, copy_carried_files, planned_files, write_config, write_index
from rltrain.checkpoint.prediction_layers import PredictionLayers
from rltrain.checkpoint.safetensors_file import SafetensorsFile
from rltrain.reshard.layout import hf_layout


def convert_to_hf(
    source: Source, output: Path, processes: Processes, *, dtype: str | None = None, max_file_bytes: int = 5 * 10**9
) -> None:
    """Write `source` into the new folder `output`, with the config and tokenizer of `source.settings`.

    `dtype` None keeps the source's. No file is larger than `max_file_bytes` unless one tensor is. CheckpointError where
    the source or the output cannot be used. Collective over: all processes, of which each writes about as many bytes.
    """
    dtype = target_type(source, dtype)
    layout = hf_layout(source.architecture, tuple(range(processes.count)), dtype=dtype)
    further = PredictionLayers(source.settings, source.option, trained=source.tensors.numbers)
    files = planned_files(layout, max_file_bytes, further.entries)
    counted = CountedSource(source)
    total_bytes = sum(entry.bytes for file in files for entry in file.entries)
    with output_folder(output, processes) as folder, ConversionProgress(processes, output.name, total_bytes) as bar:
        for file in files:
            if file.writer == processes.rank:
                _write_file(folder / file.name, file, counted, further, bar)
        if processes.first:
            write_index(folder, files)
            write_config(source.settings, folder, dtype)
            copy_carried_files(source.settings, folder)
        counted.refuse_other_than_once(processes)
        if processes.first:
            HfSource(folder, "--output", compare_tied_head=False)


def _write_file(
    path: Path, file: HfFile, counted: CountedSource, further: PredictionLayers, bar: ConversionProgress
) -> None:
    numbers = counted.source.tensors.numbers
    with SafetensorsFile(path, file.entries, METADATA, behind_bytes=BEHIND_BYTES) as opened:
        for entry in opened.entries:
            if entry.name in further:
                opened.append(entry.name, further.read(entry.name))
                bar.advance(entry.bytes)
                continue
            tensor = numbers[entry.name]
            for box in row_blocks(counted.source, tensor):
                values = counted.read(box).to(entry.dtype)
                opened.append(entry.name, values)
                bar.advance(values.nbytes)
