"""Writes and reads checkpoints in all formats: Hugging Face, Megatron, training states and deltas."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint.conversion import finish_checkpoint, write_checkpoint
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.megatron_arguments import megatron_arguments
from rltrain.checkpoint.megatron_keys import GlobalTensors
from rltrain.checkpoint.megatron_reader import MegatronReader
from rltrain.checkpoint.saved_state import MASTER, Counts, contents, flat_name
from rltrain.models import Architecture, canonical_tensors
from rltrain.models.table import Array
from rltrain.reshard.changes import changes_on
from rltrain.reshard.layout import Layout
from rltrain.rollout.delta_form import encoded, write_changes
from rltrain.rollout.servers.in_sglang import rltrain_delta_files
from rltrain.runtime.grid import Grid
from rltrain.training.shards import answered_for, replica_of, within
from tests.support.family_checkpoints import tiny_config
from tests.support.model_shards import LATENT, tiny_architecture

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
"""Sizes of all families, unless a family's settings override them."""

TOKENIZER_FILES = {
    "tokenizer_config.json": '{"model_max_length": 64}',
    "tiktoken.model": "a vocabulary",
    "tokenization_own.py": "# code that tokenizer_config.json may name",
}


def disturb(checkpoint: Path, folder: Path) -> Path:
    """Writes a checkpoint with noise on its weights to `folder` and returns it. It makes the model much worse."""
    shutil.copytree(checkpoint, folder)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_checkpoint(
    folder: Path, name: str = "qwen3", *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> dict[str, Tensor]:
    """Writes one of CHECKPOINTS and the files of a tokenizer to `folder`, and returns the stored tensors."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, SIZES, **changes)).to(dtype)
    for tensor_name, tensor in model.state_dict(keep_vars=True).items():
        if "e_score_correction_bias" in tensor_name:
            tensor.data = tensor.data.float()  # float32 in models of any dtype
        torch.nn.init.normal_(tensor)  # norms and biases too
    model.save_pretrained(folder, max_shard_size=shard)
    for file, text in TOKENIZER_FILES.items():
        (folder / file).write_text(text)
    return stored_tensors(folder)


def loads_alike(one: Path, other: Path) -> bool:
    """Returns whether transformers loads bitwise equal weights from both folders.

    Compares weights, not outputs. Outputs may differ in the last bits, because the memory alignment of a weight depends
    on its offset in its file.
    """
    first, second = (transformers.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors in the safetensors files of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


ITERATION = 7
ARCHITECTURES = {
    "qwen3": tiny_architecture("qwen3", num_layers=4),
    "qwen2_tied": tiny_architecture("qwen2", num_layers=4, tied_embeddings=True),
    "llama_biases": tiny_architecture("llama", num_layers=4, qkv_bias=True, output_bias=True),
    "qwen3_moe": tiny_architecture("qwen3_moe", num_layers=4),
    "mixtral": tiny_architecture("mixtral", num_layers=4),
    "deepseek_v3": tiny_architecture("deepseek_v3", num_layers=4),
    "moonlight": tiny_architecture("deepseek_v3", num_layers=4, mla=replace(LATENT, q_rank=None)),
    "phi3": replace(tiny_architecture("phi3", num_layers=4), rotary_dim=2),
    "gemma3": replace(tiny_architecture("gemma3_text", num_layers=4), norm_offset=1.0, activation="gelu_tanh"),
    "qwen2_moe": tiny_architecture("qwen2_moe", num_layers=4),
    "glm4_moe": tiny_architecture("glm4_moe", num_layers=4),
    "minimax_m2": tiny_architecture("minimax_m2", num_layers=4),
    "gpt_oss": tiny_architecture("gpt_oss", num_layers=4),
    "value": tiny_architecture("qwen3", num_layers=4).value_model(),
}
WRITERS = Grid(tuple(range(8)), tp=2, pp=2, ep=2, etp=1)


def canonical_values(architecture: Architecture, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns random values for the checkpoint's tensors, by name."""
    generator = torch.Generator().manual_seed(len(architecture.family))
    tensors = canonical_tensors(architecture)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in zip(tensors.names, tensors.shapes, strict=True)
    }


def write_megatron(
    root: Path,
    architecture: Architecture,
    writers: Grid = WRITERS,
    *,
    iteration: int | None = ITERATION,
    dtype: torch.dtype = torch.float32,
    padded_vocab_size: int | None = None,
    leave_out: int | None = None,
) -> None:
    """Writes a Megatron checkpoint of canonical_values(architecture); the writer `leave_out` writes nothing."""
    values = [value.reshape(-1, value.shape[-1]) for value in canonical_values(architecture).values()]

    def read(box: Box) -> Tensor:
        return values[box.tensor][box.row : box.row + box.rows, box.col : box.col + box.cols]

    for rank in writers.ranks:
        if rank == leave_out:
            continue
        write_checkpoint(
            root,
            architecture,
            writers,
            [rank],
            read,
            dtype=dtype,
            iteration=iteration,
            padded_vocab_size=padded_vocab_size,
        )
    arguments = megatron_arguments(architecture, dtype=str(dtype).removeprefix("torch."))
    finish_checkpoint(root, architecture, iteration=iteration, arguments=arguments, padded_vocab_size=padded_vocab_size)


def read_megatron(path: Path, architecture: Architecture) -> dict[str, Tensor]:
    """Returns the whole tensors of a Megatron checkpoint, by canonical name."""
    reader = MegatronReader(path, "--input")
    keys = GlobalTensors.stored_as(architecture, {key: shape for key, (shape, _) in reader.tensors.items()})
    tensors = canonical_tensors(architecture)
    whole = {}
    for number, (name, shape) in enumerate(zip(tensors.names, tensors.shapes, strict=True)):
        matrix = torch.full((prod(shape[:-1]), shape[-1]), float("nan"))
        for box in keys.location(number):
            chunk = keys.chunk_of(box)
            rows, cols = slice(box["row"], box["row"] + box["rows"]), slice(box["col"], box["col"] + box["cols"])
            matrix[rows, cols] = reader.read(chunk.key, chunk.offsets, chunk.shape).view(box["rows"], box["cols"])
        whole[name] = matrix.view(shape)
    return whole


PADDING = -1.0
COUNTS = Counts(num_updates=7, optimizer_steps=5)


def places(pieces: Array) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    """Yields ((tensor, row, column), (parameter, position)) of every element."""
    for piece in pieces:
        for row in range(piece["rows"]):
            for col in range(piece["cols"]):
                position = piece["offset"] + row * piece["stride"] + col
                yield (
                    (int(piece["tensor"]), int(piece["row"] + row), int(piece["col"] + col)),
                    (int(piece["parameter"]), int(position)),
                )


def ranges_of(layout: Layout, rank: int, draw_cuts: Callable[[int], list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts, stops) of a rank's share of each of its parameters.

    Replicas make the same cuts and have consecutive shares.
    """
    index, _ = replica_of(layout, rank)
    sizes = [int(np.prod(shape)) for _, shape in layout.on(rank).parameters]
    cuts = [[0, *draw_cuts(number), size] for number, size in enumerate(sizes)]
    limits = np.array([sorted(min(cut, size) for cut in of) for of, size in zip(cuts, sizes, strict=True)])
    return limits[:, index], limits[:, index + 1]


def random_cuts(seed: int, layout: Layout, rank: int) -> Callable[[int], list[int]]:
    part, (_, replicas) = layout.parts[layout.ranks.index(rank)], replica_of(layout, rank)
    return lambda number: np.random.default_rng((seed, part, number)).integers(0, 900, replicas - 1).tolist()


@cache
def whole_tensors(layout: Layout) -> list[Tensor]:
    """Returns the tensors as matrices. Every element has a different value."""
    sizes = layout.tensors.matrix_shapes.prod(axis=1)
    starts = np.cumsum(sizes) - sizes
    shapes = layout.tensors.matrix_shapes.tolist()
    return [
        torch.arange(start, start + size, dtype=torch.float32).view(shape)
        for start, size, shape in zip(starts.tolist(), sizes.tolist(), shapes, strict=True)
    ]


@cache
def flats_of(layout: Layout, rank: int) -> list[Tensor]:
    """Returns the rank's flattened parameters. They are cached: callers must not write to them."""
    whole, on = whole_tensors(layout), layout.on(rank)
    flats = [torch.full((int(np.prod(shape)),), PADDING) for _, shape in on.parameters]
    for (tensor, row, col), (parameter, position) in places(on.pieces):
        flats[parameter][position] = whole[tensor][row, col]
    return flats


def save(layout: Layout, folder: Path, seed: int = 0, counts: Counts = COUNTS) -> list[Path]:
    """Writes one file per rank and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for rank in layout.ranks:
        starts, stops = ranges_of(layout, rank, random_cuts(seed, layout, rank))
        pieces = within(answered_for(layout, rank), starts, stops)
        names, flats = [name for name, _ in layout.on(rank).parameters], flats_of(layout, rank)
        tensors = {
            flat_name(MASTER, names[i]): flats[i][starts[i] : stops[i]].clone() for i in np.unique(pieces["parameter"])
        }
        saved = contents(layout.tensors, names, pieces, tensors, counts)
        files.append(folder / f"rank_{rank:05d}.safetensors")
        save_file(dict(saved.tensors), files[-1], dict(saved.metadata))
    return files


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}


def changed_somewhat(tensors: Mapping[str, Tensor], seed: int, share: float = 0.01) -> dict[str, Tensor]:
    """Returns copies of the tensors with some changed elements, at least one in every second tensor."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        made[name] = tensor.clone()
        flat = made[name].view(-1)
        if number % 2 == seed % 2:
            places = torch.randperm(flat.numel(), generator=generator)[: max(1, int(share * flat.numel()))]
            flat[places] += torch.randn(len(places), generator=generator).to(flat.dtype)
    return made


def write_version(folder: Path, tensors: Mapping[str, Tensor], like: Path, version: str) -> Path:
    """Writes the whole checkpoint with the other files of `like`, and returns its folder."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    (folder / rltrain_delta_files.VERSION_FILE).write_text(rltrain_delta_files.version_text(version))
    return folder


def write_delta(
    folder: Path, old: Mapping[str, Tensor], new: Mapping[str, Tensor], base: str, version: str, num_files: int = 2
) -> Path:
    """Writes the differences between `old` and `new` to `num_files` files."""
    folder.mkdir(parents=True)
    names = [*new]
    files = {}
    for number in range(num_files):
        some = {name: new[name] for name in names[number::num_files]}
        kept = {name: old[name].clone() for name in some}
        if changed := encoded(changes_on(torch.device("cpu")), some, kept):
            path = folder / f"changes-{number}.delta"
            files[path.name] = write_changes(path, changed)
        assert all(torch.equal(kept[name], some[name]) for name in some), "the writer updates its kept copy"
    (folder / rltrain_delta_files.MANIFEST).write_text(rltrain_delta_files.manifest_text(base, version, files))
    return folder


def damage(folder: Path) -> None:
    """Flips one bit of a delta file."""
    path = sorted(folder.glob("*.delta"))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    told = json.loads((folder / rltrain_delta_files.MANIFEST).read_text())["delta"]["files"]
    return {name: (num_bytes, crc32) for name, (num_bytes, crc32) in told.items()}
