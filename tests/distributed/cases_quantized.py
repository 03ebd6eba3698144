"""FP8 syncs on real ranks. Every rank compares its parameters with whole tensors, quantised and cut by formula."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models import Architecture, ExpertLayers
from rltrain.reshard.copy_table import quantize_blocks
from rltrain.reshard.execute import Resharding
from rltrain.reshard.fp8_blocks import quantized
from rltrain.reshard.fp8_scales import BlockScales, BlockTable
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import RankPlan, plan
from rltrain.reshard.verify import full_gather_sync, verify
from rltrain.rollout.layout import engine_by_names, engine_layout
from rltrain.runtime.grid import Grid
from tests.support.model_shards import (
    PADDING,
    Place,
    Tensors,
    engine_shard,
    full_tensors,
    megatron_shard,
    tiny_architecture,
)

ALL = (0, 1, 2, 3)
PLACEMENTS = {
    "tp2 pp2 -> tp1 dp4, one node": (Grid(ALL, tp=2, pp=2), Grid(ALL), 4),
    "tp4 -> tp2 dp2, two nodes": (Grid(ALL, tp=4), Grid(ALL, tp=2), 2),
    "tp2 dp2 -> tp4, two nodes": (Grid(ALL, tp=2), Grid(ALL, tp=4), 2),
    "tp2 -> tp1 dp2 on another node": (Grid((0, 1), tp=2), Grid((2, 3)), 2),
    "pp2 -> tp2, overlapping": (Grid((1, 2), pp=2), Grid((2, 3), tp=2), 4),
    "tp4 -> tp2 dp2, by names": (Grid(ALL, tp=4), Grid(ALL, tp=2), 4),
}
"""Grids of an actor and a rollout; ranks per node."""

# No size is a multiple of 128; with four shards every one of them cuts blocks.
ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": tiny_architecture("qwen2", hidden_size=192, head_dim=48, ffn_hidden_size=200, vocab_size=70),
    "one KV head": tiny_architecture("llama", hidden_size=132, num_kv_heads=1, head_dim=20, ffn_hidden_size=520),
    "experts": tiny_architecture(
        "qwen3_moe", hidden_size=192, head_dim=48, moe=ExpertLayers(num_experts=4, top_k=2, ffn_hidden_size=152)
    ),
}


BUCKET_BYTES = 20_000
"""A small bucket, so that tensors, rows and blocks are cut between rounds."""


@dataclass
class Sync:
    """One rank's part in a sync, and the expected result."""

    source: Layout
    destination: Layout
    plan: RankPlan
    blocks: BlockTable | None
    held: dict[str, Tensor] | None
    wanted: dict[str, Tensor] | None
    expected: dict[str, Tensor]
    group: dist.ProcessGroup | None

    def wrong(self) -> list[str]:
        """Returns the names of parameters that differ from the expected bits, and wipes those of `wanted`."""
        found = [
            name for name, tensor in self.expected.items() if not torch.equal(bits(self.wanted[name]), bits(tensor))
        ]
        self.wipe()
        return found

    def wipe(self) -> None:
        for name, tensor in self.expected.items():
            self.wanted[name].copy_(blank(tensor))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def blank(tensor: Tensor) -> Tensor:
    """Returns a parameter as before a sync. Padding keeps this value, because no sync writes it."""
    return torch.full_like(tensor, PADDING, dtype=torch.float32).to(tensor.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts with the NaNs prescribed by csrc/reshard.h."""
    if x.dtype == dtype:
        return x.clone()
    result = x.to(dtype)
    if x.dtype == torch.float32:
        bits(result)[x.isnan()] = 0x7FFF
    return result


def model(architecture: Architecture, dtype: torch.dtype) -> Tensors:
    """Returns whole tensors with values of `dtype`: different magnitudes, some zeros, infinities and NaNs."""
    generator, full = torch.Generator().manual_seed(7), full_tensors(architecture)
    for number, (name, values) in enumerate(full.items()):
        magnitudes = 10.0 ** torch.randint(-3, 3, values.shape, generator=generator)
        x = torch.randn(values.shape, generator=generator) * magnitudes
        if x.dim() == 2 and number % 3 == 0:
            row, col = (int(torch.randint(0, size, (), generator=generator)) for size in x.shape)
            x[row, col] = (torch.inf, -torch.inf, torch.nan)[number // 3 % 3]
            x[-8:] = 0
        full[name] = cast(x, dtype).float().numpy()
    return full


def sync(
    architecture: Architecture,
    placement: str,
    groups: dict[tuple[int, ...], dist.ProcessGroup],
    *,
    source_dtype: torch.dtype = torch.float32,
    destination_dtype: torch.dtype = torch.float32,
    fp8: bool = False,
) -> Sync | None:
    """Returns this rank's part, or None if it has none. With `fp8` the matrices of layers are quantised."""
    rank, (actor, rollout, ranks_per_node) = dist.get_rank(), PLACEMENTS[placement]
    union = union_of(placement)
    if rank not in union:
        return None
    actor = replace(actor, ep=actor.dp if architecture.moe else 1)
    source = megatron_layout(architecture, actor, dtype=str(source_dtype)[6:])
    by_names = placement.endswith("by names")
    destination = engine_layout(architecture, rollout, dtype=str(destination_dtype)[6:])
    if by_names:
        destination = engine_by_names(architecture, rollout, dtype=str(destination_dtype)[6:], fp8=False).plain
    full, held, wanted, expected, blocks = model(architecture, source_dtype), None, None, {}, None
    if rank in source.ranks:
        at = actor.coordinates(rank)
        place = Place(actor.tp, at.tp, actor.pp, at.pp, ep=actor.ep, ep_rank=at.dp if actor.ep > 1 else 0)
        shard = megatron_shard(architecture, full, place)
        held = {name: cast(torch.tensor(values), source_dtype) for name, values in shard.items()}
    if rank in destination.ranks:
        place = Place(rollout.tp, rollout.coordinates(rank).tp)
        names = [name for name, _ in destination.on(rank).parameters]
        shard = {name: full[name] for name in names} if by_names else engine_shard(architecture, full, place)
        expected = {name: cast(cast(torch.tensor(v), source_dtype), destination_dtype) for name, v in shard.items()}
        if fp8:
            expected |= quantised_tensors(full, names) if by_names else quantised_shard(architecture, full, place)
        wanted = {name: blank(tensor) for name, tensor in expected.items()}
    if fp8:
        layouts = quantized(source, destination, np.array([in_layer(name) for name in source.tensors.names]))
        source, destination, blocks = layouts.source, layouts.destination, BlockTable(layouts, rank)
    made = plan(source, destination, rank, ranks_per_node)
    return Sync(source, destination, made, blocks, held, wanted, expected, groups[union])


def in_layer(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantised_tensors(full: Tensors, names: list[str]) -> dict[str, Tensor]:
    """Returns the tensors of layers among `names` as a checkpoint in FP8 has them."""
    found = {}
    for name in filter(in_layer, names):
        found[name], found[f"{name}_scale_inv"] = quantize_blocks(torch.tensor(full[name]))
    return found


def quantised_shard(a: Architecture, full: Tensors, place: Place) -> dict[str, Tensor]:
    """Returns the engine's parameters in layers: whole matrices quantised, then cut, and their scales."""
    names = [name for name in full if in_layer(name)]
    whole = {name: quantize_blocks(torch.tensor(full[name])) for name in names}
    cut = engine_shard(a, full | {name: whole[name][0].view(torch.uint8).numpy() for name in names}, place)
    found = {name: torch.tensor(v).view(torch.float8_e4m3fn) for name, v in cut.items() if v.dtype == np.uint8}
    tp, rank = place.tp, place.tp_rank
    query = a.num_heads // tp * a.head_dim
    kv = max(a.num_kv_heads // tp, 1) * a.head_dim
    first_kv = rank * a.num_kv_heads // tp * a.head_dim
    ffn = (a.moe.ffn_hidden_size if a.moe else a.ffn_hidden_size) // tp
    gate_up = [("gate", rank * ffn, ffn), ("up", rank * ffn, ffn)]

    def fused(block: str, parts: list[tuple[str, int, int]]) -> Tensor:
        return torch.cat([whole[f"{block}.{p}_proj.weight"][1][touched(first, size)] for p, first, size in parts])

    def columns(name: str, size: int) -> Tensor:
        return whole[f"{name}_proj.weight"][1][:, touched(rank * size, size)].contiguous()

    for i in range(a.num_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = [("q", rank * query, query), ("k", first_kv, kv), ("v", first_kv, kv)]
        found[f"{attention}.qkv_proj.weight_scale_inv"] = fused(attention, qkv)
        found[f"{attention}.o_proj.weight_scale_inv"] = columns(f"{attention}.o", query)
        if a.moe:
            experts = [f"{mlp}.experts.{e}" for e in range(a.moe.num_experts)]
            found[f"{mlp}.experts.w13_weight_scale_inv"] = torch.stack([fused(e, gate_up) for e in experts])
            found[f"{mlp}.experts.w2_weight_scale_inv"] = torch.stack([columns(f"{e}.down", ffn) for e in experts])
        else:
            found[f"{mlp}.gate_up_proj.weight_scale_inv"] = fused(mlp, gate_up)
            found[f"{mlp}.down_proj.weight_scale_inv"] = columns(f"{mlp}.down", ffn)
    return found


def touched(first: int, count: int) -> slice:
    return slice(first // 128, -(-(first + count) // 128))


def make_groups() -> dict[tuple[int, ...], dist.ProcessGroup]:
    return {ranks: dist.new_group(list(ranks)) for ranks in sorted({*map(union_of, PLACEMENTS)})}


def union_of(placement: str) -> tuple[int, ...]:
    actor, rollout, _ = PLACEMENTS[placement]
    return tuple(sorted({*actor.ranks, *rollout.ranks}))


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 to bf16": {"destination_dtype": torch.bfloat16},
    "bf16 to fp32": {"source_dtype": torch.bfloat16},
    "fp32 to fp8": {"destination_dtype": torch.bfloat16, "fp8": True},
    "bf16 to fp8": {"source_dtype": torch.bfloat16, "destination_dtype": torch.bfloat16, "fp8": True},
}

CASES = [
    *((list(PLACEMENTS)[3], "qwen2", kind) for kind in KINDS),
    *((placement, "qwen2", "fp32 to fp8") for placement in PLACEMENTS if placement != list(PLACEMENTS)[3]),
    *((placement, "one KV head", "fp32 to fp8") for placement in list(PLACEMENTS)[:2]),
    *((placement, "experts", "bf16 to fp8") for placement in (*list(PLACEMENTS)[:4], list(PLACEMENTS)[5])),
]


def all_syncs() -> dict[str, dict[str, Any]]:
    """Returns this rank's results by case."""
    groups, results = make_groups(), {}
    for placement, name, kind in CASES:
        case = sync(ARCHITECTURES[name], placement, groups, **KINDS[kind])
        if case is not None:
            results[f"{placement}, {name}, {kind}"] = _run(case)
    return results


def _run(case: Sync) -> dict[str, Any]:
    """Prepares a reshard through shared memory and one over the wire, and runs each twice.

    The second run has smaller values and magnitudes. Full gathers give the expected results.
    """
    found: dict[str, Any] = {"wrong before": len(case.wrong()), "compared": len(case.expected)}
    full_gather_sync(case.source, case.destination, case.held, case.wanted, case.group)
    found["full_gather"] = case.wrong()
    wired, shared = _resharding(case, share_memory=False), _resharding(case, share_memory=True)
    wired.run(case.held, case.wanted)
    found["wired"] = case.wrong()
    shared.run(case.held, case.wanted)
    found["shared"] = case.wrong()
    for tensor in (case.held or {}).values():
        tensor.mul_(0.3)
    full_gather_sync(case.source, case.destination, case.held, case.wanted, case.group)
    case.expected = {name: tensor.clone() for name, tensor in (case.wanted or {}).items()}
    case.wipe()
    wired.run(case.held, case.wanted)
    found["wired again"] = case.wrong()
    report = shared.run(case.held, case.wanted)
    verify(case.plan, case.source, case.destination, case.held, case.wanted, group=case.group, blocks=case.blocks)
    found["shared again"] = case.wrong()
    return found | {
        "rounds": report.num_rounds,
        "split": case.blocks.num_split if case.blocks else 0,
        "fanned out": len(case.plan.fan_out.sends),
    }


def _resharding(case: Sync, *, share_memory: bool) -> Resharding:
    return Resharding(
        case.plan,
        group=case.group,
        cpu_group=case.group,
        bucket_bytes=BUCKET_BYTES,
        device=torch.device("cpu"),
        magnitudes=case.blocks and BlockScales(case.blocks, torch.device("cpu")),
        share_memory=share_memory,
    )
