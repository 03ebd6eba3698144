"""Of a micro-batch the experts that are given, cut as its tokens and the layers are, and those that were chosen."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models.routing_shape import NOT_RECORDED, RoutingShape
from rltrain.reshard.megatron_layout import chunks_of
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.packing import MicroBatch, of_all_tokens


def given_choices(model: LanguageModel, batch: MicroBatch) -> dict[int, Tensor]:
    """`Choices.given` of the layers of this rank, on its device; none where the micro-batch brings none."""
    if not batch.experience.has("routed_experts"):
        return {}
    shape = RoutingShape.of(model.architecture)
    of_rows = batch.rows_of(shape.unpacked(batch.experience.routed_experts))
    if batch.slices is not None:
        of_rows[~_holds_token(model, batch)] = NOT_RECORDED
    padding = shape.unknown(len(batch.padded_tokens) - len(of_rows))
    of_rank = torch.cat([of_rows, padding])
    if model.config.sequence_parallel:
        of_rank = of_rank.chunk(model.pg_collection.tp.size())[model.pg_collection.tp.rank()]
    return {layer: of_rank[:, place].to(model.device) for layer, place in _own_layers(model).items()}


def found_choices(model: LanguageModel, batch: MicroBatch, found: Mapping[int, Tensor]) -> Tensor:
    """[tokens, token_bytes] what routers chose, as the field of an Experience, on the device; NOT_RECORDED in layers of
    other pipeline stages. Collective over: the tensor- and context-parallel groups."""
    shape = RoutingShape.of(model.architecture)
    result = shape.unknown(batch.num_tokens).to(model.device)
    for layer, place in _own_layers(model).items():
        of_rows = found[layer].to(shape.experts)
        if model.config.sequence_parallel:
            of_rows = _gathered(of_rows, model)
        result[:, place] = of_all_tokens(batch, of_rows[: batch.num_rows], model.pg_collection.cp)
    return shape.packed(result)


def _holds_token(model: LanguageModel, batch: MicroBatch) -> Tensor:
    """[rows] of this rank's slices: not those of the samples' padding."""
    assert batch.slices is not None
    share = model.share
    of_all = torch.zeros(share.size * batch.num_rows, dtype=torch.bool)
    of_all[batch.slices.row_of_token.cpu()] = True
    return of_all.chunk(share.size)[share.rank]


def _gathered(of_rank: Tensor, model: LanguageModel) -> Tensor:
    """Of all tensor-parallel ranks, whose tokens follow each other."""
    group = model.pg_collection.tp
    whole = of_rank.new_empty(group.size() * len(of_rank), *of_rank.shape[1:])
    dist.all_gather_into_tensor(whole, of_rank, group=group)
    return whole


def _own_layers(model: LanguageModel) -> dict[int, int]:
    """Those of this rank that have experts, and their places among all that do."""
    places = [layer for layer, sparse in enumerate(model.architecture.sparse_layers) if sparse]
    chunks = chunks_of(model.architecture, model.grid)[model.pg_collection.pp.rank()]
    return {layer: places.index(layer) for chunk in chunks for layer in chunk.layers if layer in places}
