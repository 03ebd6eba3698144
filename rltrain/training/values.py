"""A value model's estimates, token by token."""

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.training.forward import make_micro_batches, run_schedule
from rltrain.training.model import LanguageModel
from rltrain.training.packing import MicroBatch


def token_values(model: LanguageModel, batch: MicroBatch, outputs: Tensor) -> Tensor:
    """[tokens] fp32: at every token the value of the state before it was drawn, 0 at a sample's first token.

    `outputs` [tokens] are what `model` makes of a sample's tokens up to and with each one. Gradients flow to them.
    ValueError where `model` has no value head.
    """
    if model.architecture.head != "value":
        raise ValueError(f"values come from a value head; this model has the {model.architecture.head} head")
    drawn = torch.ones(batch.num_tokens, device=outputs.device)
    drawn[batch.experience.offsets()[:-1]] = 0
    return outputs.roll(1) * drawn


@torch.no_grad()
def compute_values(model: LanguageModel, experience: Experience, *, max_tokens: int) -> Tensor:
    """[tokens] fp32 host values of the replica's samples under `model`, as token_values places them.

    Every rank of the replica passes the same samples and gets the same result; `max_tokens` per micro-batch.
    Collective over: the replica's tensor- and pipeline-parallel groups.
    """
    values = torch.zeros(experience.num_tokens, device=model.device)
    if experience.num_samples == 0:
        return values.cpu()

    def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, Tensor]:
        kept = token_values(model, batch, of_tokens)
        return kept.new_zeros(()), kept

    was_training = model.training
    model.eval()
    micro_batches = make_micro_batches(model, experience, max_tokens)
    kept = run_schedule(model, micro_batches, outputs, backward=False)
    model.train(was_training)

    for batch, of_batch in zip(micro_batches, kept, strict=False):
        values[batch.token_index.to(values.device)] = of_batch
    pipeline = model.pg_collection.pp
    if pipeline.size() > 1:
        dist.broadcast(values, group=pipeline, group_src=pipeline.size() - 1)
    return values.cpu()
