"""A weight sync, and what it is measured against beside Megatron's refit: gather and broadcast, and the bare wire."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weight_sync_case import Case, broadcast_lists

from rltrain.models.table import ITEM_BYTES, wire_types
from rltrain.reshard.layout import elements
from rltrain.reshard.plan import RankPlan


class Ours:
    """Resharding.run, set up once; with `share_memory` as it is within a node, without as it is between nodes."""

    def __init__(
        self,
        case: Case,
        plan: RankPlan,
        bucket_bytes: int,
        source: Mapping[str, Tensor] | None,
        destination: Mapping[str, Tensor] | None,
        *,
        share_memory: bool,
    ) -> None:
        from rltrain.reshard.execute import Resharding

        self.source, self.destination = source, destination
        self.resharding = Resharding(
            plan,
            group=case.groups[case.union] if len(case.union) > 1 else None,
            cpu_group=case.cpu_group if len(case.union) > 1 else None,
            bucket_bytes=bucket_bytes,
            device=case.device,
            share_memory=share_memory,
        )
        self.reports: list[dict[str, Any]] = []

    def __call__(self) -> None:
        self.reports.append(asdict(self.resharding.run(self.source, self.destination)))

    def parts(self) -> dict[str, float]:
        """Medians of this rank's reports."""
        numbers = [name for name, value in self.reports[-1].items() if isinstance(value, int | float)]
        return {name: statistics.median(report[name] for report in self.reports) for name in numbers}


class GatherBroadcast:
    """Tensor by tensor: shards are all-gathered over tensor parallelism, the whole is broadcast to inference ranks, and
    each cuts its part out. One buffer of the largest tensor is kept and used for all."""

    def __init__(self, case: Case, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
        self.case, self.source, self.destination = case, source, destination
        self.rank = dist.get_rank()
        self.in_pipeline = set(case.destination.ranks) <= set(case.source.ranks)
        self.place = case.source.coordinates(self.rank) if self.rank in case.source.ranks else None
        self.stages = [case.source_layout.on(int(stage[0, 0, 0])).parameters for stage in case.source.array]
        largest = max(torch.Size(shape).numel() for stage in self.stages for _, shape in stage)
        self.buffer = torch.empty(largest * case.source.tp, dtype=case.dtype, device=case.device)
        self.cuts = EngineCuts(case, case.destination.coordinates(self.rank).tp, destination) if destination else None

    @torch.no_grad()
    def __call__(self) -> None:
        first_layer = 0
        layers_of_stages = self.case.source.layers_of_chunks(self.case.architecture.num_layers)
        for stage, parameters in enumerate(self.stages):
            for name, shape in parameters:
                whole = self.buffer[: torch.Size(shape).numel() * self._shards(name)].view(-1, *shape)
                self._gather(stage, name, whole)
                self._broadcast(stage, whole)
                if self.cuts is not None:
                    self.cuts.load(name, whole, first_layer)
            first_layer += layers_of_stages[stage]

    def _shards(self, name: str) -> int:
        return 1 if name.endswith("norm.weight") else self.case.source.tp

    def _gather(self, stage: int, name: str, whole: Tensor) -> None:
        """`whole` is [shards, *shard]."""
        if self.place is None or self.place.pp != stage or not (self.in_pipeline or self.place.dp == 0):
            return
        if len(whole) == 1:
            whole[0].copy_(self.source[name])
            return
        tp_ranks = next(ranks for ranks in self.case.source.lists("tp") if self.rank in ranks)
        dist.all_gather_into_tensor(whole.view(-1), self.source[name].view(-1), group=self.case.groups[tp_ranks])

    def _broadcast(self, stage: int, whole: Tensor) -> None:
        lists = broadcast_lists(self.case.source, self.case.destination)
        if self.in_pipeline:
            ranks = next(ranks for ranks in lists if self.rank in ranks)
            root = ranks[stage]
        else:
            ranks, root = lists[stage], int(self.case.source.array[stage, 0, 0, 0])
        if len(ranks) > 1 and self.rank in ranks:
            dist.broadcast(whole, root, group=self.case.groups[ranks])


class EngineCuts:
    """Puts what an engine's rank needs of a whole Megatron parameter into the engine's, as weight loaders do."""

    def __init__(self, case: Case, index: int, parameters: Mapping[str, Tensor]) -> None:
        self.model, self.tp, self.index, self.parameters = case.architecture, case.destination.tp, index, parameters

    def load(self, name: str, shards: Tensor, first_layer: int) -> None:
        """`shards` [shards, *shard] of Megatron's parameter `name` of a stage whose first layer is `first_layer`."""
        if name == "embedding.word_embeddings.weight":
            self._rows("model.embed_tokens.weight", shards.flatten(0, 1))
        elif name == "output_layer.weight":
            self._rows("lm_head.weight", shards.flatten(0, 1))
        elif name == "decoder.final_layernorm.weight":
            self.parameters["model.norm.weight"].copy_(shards[0])
        else:
            number, _, kind = name.removeprefix("decoder.layers.").partition(".")
            self._layer(f"model.layers.{first_layer + int(number)}", kind, shards)

    def _layer(self, layer: str, kind: str, shards: Tensor) -> None:
        match kind:
            case "self_attention.linear_qkv.weight":
                self._attention(self.parameters[f"{layer}.self_attn.qkv_proj.weight"], shards.flatten(0, 1))
            case "mlp.linear_fc1.weight":
                gate, up = (half.flatten(0, 1) for half in shards.chunk(2, dim=1))
                target = self.parameters[f"{layer}.mlp.gate_up_proj.weight"].chunk(2)
                target[0].copy_(self._mine(gate))
                target[1].copy_(self._mine(up))
            case "self_attention.linear_proj.weight":
                self._columns(f"{layer}.self_attn.o_proj.weight", shards)
            case "mlp.linear_fc2.weight":
                self._columns(f"{layer}.mlp.down_proj.weight", shards)
            case _:
                self.parameters[f"{layer}.{NORMS[kind]}.weight"].copy_(shards[0])

    def _mine(self, whole: Tensor, dim: int = 0) -> Tensor:
        return whole.chunk(self.tp, dim)[self.index]

    def _rows(self, name: str, whole: Tensor) -> None:
        self.parameters[name].copy_(self._mine(whole))

    def _columns(self, name: str, shards: Tensor) -> None:
        self.parameters[name].copy_(self._mine(torch.cat(list(shards), dim=1), dim=1))

    def _attention(self, target: Tensor, whole: Tensor) -> None:
        """Megatron keeps each KV group's heads together; the engine all queries, then all keys, then all values."""
        model = self.model
        per_group = model.num_heads // model.num_kv_heads
        groups = self._mine(whole.view(model.num_kv_heads, per_group + 2, model.head_dim, -1))
        queries = len(groups) * per_group * model.head_dim
        keys = len(groups) * model.head_dim
        parts = (groups[:, :per_group], groups[:, per_group], groups[:, per_group + 1])
        for part, rows in zip(parts, target.split([queries, keys, keys]), strict=True):
            rows.view(part.shape).copy_(part)


NORMS = {
    "input_layernorm.weight": "input_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "self_attention.q_layernorm.weight": "self_attn.q_norm",
    "self_attention.k_layernorm.weight": "self_attn.k_norm",
}


class RawWire:
    """As many bytes between the same ranks as a plan moves, from and to plain buffers, in all-to-alls of about
    `bucket_bytes` each. Where nothing leaves a rank: one copy of as many bytes as the plan copies."""

    def __init__(self, case: Case, sent: list[int], received: list[int], local: int, rounds: int) -> None:
        """`sent` and `received` are bytes per rank of `case.union`."""
        self.group = case.groups[case.union]
        self.rounds = [tuple([_cut(n, k, rounds) for n in sizes] for sizes in (sent, received)) for k in range(rounds)]
        largest = [max(map(sum, sizes)) or local for sizes in zip(*self.rounds, strict=True)]
        # Written, so that no page is first touched while the time runs.
        self.outgoing, self.incoming = (torch.zeros(n, dtype=torch.uint8, device=case.device) for n in largest)
        self.alone = len(case.union) == 1

    def __call__(self) -> None:
        if self.alone:
            self.incoming.copy_(self.outgoing)
            return
        for sent, received in self.rounds:
            outgoing, incoming = self.outgoing[: sum(sent)], self.incoming[: sum(received)]
            dist.all_to_all_single(incoming, outgoing, received, sent, group=self.group)


def _cut(num_bytes: int, part: int, parts: int) -> int:
    """Bytes in number `part` of `parts` about equal parts."""
    return num_bytes * (part + 1) // parts - num_bytes * part // parts


def bytes_by_peer(plan: RankPlan, ranks: tuple[int, ...]) -> tuple[list[int], list[int], int]:
    """What this rank sends to and receives from each of `ranks`, and what it copies within itself, in bytes."""
    wire = wire_types(plan.source_types, plan.destination_types)
    sent, received = ({rank: 0 for rank in ranks} for _ in range(2))
    for stage, types in ((plan.direct, wire), (plan.fan_out, plan.destination_types)):
        for moved, boxes in ((sent, stage.sends), (received, stage.receives)):
            sizes = elements(boxes) * ITEM_BYTES[types[boxes["tensor"]]]
            for peer, size in zip(boxes["peer"].tolist(), sizes.tolist(), strict=True):
                moved[peer] += size
    local = int((elements(plan.copies) * ITEM_BYTES[plan.destination_types[plan.copies["tensor"]]]).sum())
    return list(sent.values()), list(received.values()), local
