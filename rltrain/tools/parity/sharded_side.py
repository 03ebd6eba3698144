"""The trainer's model of backend fsdp, which is that of transformers, on one rank."""

from typing import Any

import torch

from rltrain.checkpoint.hf import load_parameters
from rltrain.config import schema
from rltrain.models import read_architecture
from rltrain.models.table import LOGITS, LOGPROBS
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.tools.parity.states import Checked, Notes, Samples, States, next_token_logprobs
from rltrain.tools.parity.trainer_side import TIMEOUT_S, world_of_one
from rltrain.tools.parity.transformers_side import watch

GRID = Grid((0,), copies=1)


def run_sharded(checked: Checked, samples: Samples) -> States:
    """All samples packed into one micro-batch, as in training, in a world of one rank. UserError where the checkpoint
    cannot be read or trained."""
    device = torch.device(checked.device)
    with world_of_one(device) as backend:
        from rltrain.training.fsdp_attention import SEQUENCES
        from rltrain.training.fsdp_model import ShardedModel

        model = ShardedModel(
            read_architecture(checked.path),
            GRID,
            ProcessGroups(group_lists({"actor": GRID}), backend=backend, timeout_s=TIMEOUT_S),
            folder=checked.path,
            model=checked.model,
            fsdp=schema.Fsdp(),
            device=device,
            trains=False,
        )
        load_parameters(checked.path, model.layout, 0, dict(model.parameters), config_key="--checkpoint")
        module: Any = model.module
        notes = Notes()
        watch(module.language_model.model, notes.add)
        tokens = torch.tensor([token for sample in samples for token in sample], device=device)
        sequences = model.sequences([len(sample) for sample in samples])
        with torch.no_grad():
            logits = module(
                input_ids=tokens[None],
                position_ids=sequences.positions[None],
                use_cache=False,
                **{SEQUENCES: sequences},
            )
            notes.add(LOGITS, logits)
    states = notes.states()
    return {**states, LOGPROBS: next_token_logprobs(states[LOGITS], samples)}
