"""Tiny models of every kind with random tensors, and their checkpoints in Megatron's format."""

from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.conversion import finish_checkpoint, write_checkpoint
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.megatron_arguments import megatron_arguments
from rltrain.checkpoint.megatron_keys import GlobalTensors
from rltrain.checkpoint.megatron_reader import MegatronReader
from rltrain.models import Architecture, canonical_tensors
from rltrain.runtime.grid import Grid
from tests.model_shards import LATENT, tiny_architecture

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
    """Random values of the checkpoint's tensors, by name."""
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
    """A checkpoint of canonical_values(architecture); `leave_out` is a writer that writes nothing."""
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
    """The checkpoint's tensors put together, by their canonical names."""
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
