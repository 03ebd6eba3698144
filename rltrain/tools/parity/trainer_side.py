"""The trainer's model, Megatron's, on one rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.hf import load_parameters
from rltrain.config import schema
from rltrain.models import Architecture, read_architecture
from rltrain.models.table import EMBEDDING, FINAL_NORM, LOGITS, LOGPROBS, stages_of_layer
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.tools.parity.states import Checked, Samples, States, next_token_logprobs

GRID = Grid((0,))
TIMEOUT_S = 60.0


def run_trainer(checked: Checked, samples: Samples) -> States:
    """All samples packed into one micro-batch, as in training, in a world of one rank. UserError where the checkpoint
    cannot be read or trained."""
    device = torch.device(checked.device)
    architecture = read_architecture(checked.path)
    with world_of_one(device) as backend:
        return _run(checked, samples, architecture, device, backend)


def _run(checked: Checked, samples: Samples, architecture: Architecture, device: torch.device, backend: str) -> States:
    from rltrain.training.megatron.model import build_model, local_parameters

    model = build_model(
        architecture,
        GRID,
        ProcessGroups(group_lists({"actor": GRID}), backend=backend, timeout_s=TIMEOUT_S),
        model=checked.model,
        parallel=schema.Parallel(),
        device=device,
    ).eval()
    load_parameters(checked.path, model.layout, 0, local_parameters(model), config_key="--checkpoint")
    (chunk,) = model.chunks
    states = _watched(chunk)
    tokens = torch.tensor([token for sample in samples for token in sample], device=device)
    with torch.no_grad():
        logits = chunk(
            input_ids=tokens[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=model.sequences([len(sample) for sample in samples]),
        )[0]
    states[LOGITS] = logits[:, : architecture.vocab_size].float().cpu()
    states[LOGPROBS] = next_token_logprobs(states[LOGITS], samples)
    return states


@contextmanager
def world_of_one(device: torch.device) -> Iterator[str]:
    """A process group of one rank; its backend. RuntimeError where torch.distributed is initialised already."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def _watched(model: Any) -> States:
    """Filled by the model's next forward pass."""
    states: States = {}

    def note(stage: str, hidden: Tensor) -> None:
        states[stage] = hidden.detach().flatten(0, 1).float().cpu().clone()

    model.embedding.register_forward_hook(lambda module, given, made: note(EMBEDDING, made))
    for index, layer in enumerate(model.decoder.layers):
        attention, mlp = stages_of_layer(index)
        layer.pre_mlp_layernorm.register_forward_pre_hook(lambda module, given, stage=attention: note(stage, given[0]))
        layer.register_forward_hook(lambda module, given, made, stage=mlp: note(stage, made[0]))
    model.decoder.final_layernorm.register_forward_hook(lambda module, given, made: note(FINAL_NORM, made))
    return states
