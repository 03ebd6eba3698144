"""Finds names and shapes of the parameters of real megatron-core models, on every rank of a grid, without
communication.

    python megatron_shapes.py CASES.json RESULTS.json

A case is {"family" or "variant", "architecture", "ranks", "grid"}. Its result by rank has these keys:

- "parameters": {name: shape}
- "layers": {name: number}
- "latent_norm_eps": [eps of each fused norm]
- "context_parallel": [[ranks, method] of each attention]
- "whole": [names of unsharded matrices]
- "adapters": {name: shape}
- "misfits": [weights that do not fit their adapters]
- "added": on one rank, [error of the adapters' contribution in each layer]

Models use the local implementation. With the stand-in for Transformer Engine on PYTHONPATH they use rltrain's modules
of Transformer Engine with adapters; the real one needs a GPU.
"""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.testing._internal.distributed.fake_pg import FakeStore

from rltrain.config.models import Lora
from rltrain.models import Architecture
from rltrain.reshard.megatron_layout import megatron_layout, padded_vocab_size
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import model_group_lists
from rltrain.training.megatron.context_parallel import RING
from rltrain.training.megatron.layers import block_spec, mark_parallel_weights
from rltrain.training.megatron.lora import Adapters
from rltrain.training.megatron.model_config import HAVE_TE
from rltrain.training.megatron.platform import adapt_to_platform
from tests.support.model_shards import VARIANTS, tiny_architecture

LORA = Lora(rank=4, alpha=8)
EXPERT_GROUPS = {"ep": (2,), "expt_tp": (3,), "expt_dp": (1,), "tp_ep": (2, 3), "tp_ep_pp": (0, 2, 3)}


def config_of(a: Architecture, grid: Grid) -> TransformerConfig:
    values: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_heads,
        "ffn_hidden_size": a.ffn_hidden_size,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.qk_norm or a.mla is not None,
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "virtual_pipeline_model_parallel_size": grid.vpp if grid.vpp > 1 else None,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    if HAVE_TE:  # as on a GPU, except for the place of parameters
        values |= {"use_cpu_initialization": False, "init_model_with_meta_device": True}
        values |= {"context_parallel_size": grid.cp, "cp_comm_type": RING}
    if grid.layers_per_stage is not None:
        stages = [["decoder"] * count for count in grid.layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        values["pipeline_model_parallel_layout"] = stages
    if moe := a.moe:
        values |= {
            "num_moe_experts": moe.num_experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "moe_layer_freq": [int(sparse) for sparse in a.sparse_layers],
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
            "moe_token_dispatcher_type": "alltoall" if HAVE_TE else "allgather",
            "moe_grouped_gemm": HAVE_TE,
            "moe_router_load_balancing_type": "none",
            "moe_router_enable_expert_bias": a.family == "deepseek_v3",
            "moe_router_score_function": "sigmoid" if a.family == "deepseek_v3" else "softmax",
            "expert_model_parallel_size": grid.ep,
            "expert_tensor_parallel_size": grid.expert_array.shape[-1],
        }
    if a.mla is None:
        return TransformerConfig(num_query_groups=a.num_kv_heads, kv_channels=a.head_dim, **values)
    return MLATransformerConfig(
        q_lora_rank=a.mla.q_rank,
        kv_lora_rank=a.mla.kv_rank,
        qk_head_dim=a.mla.plain_head_dim,
        qk_pos_emb_head_dim=a.mla.rope_head_dim,
        v_head_dim=a.mla.value_head_dim,
        rope_type="rope",
        **values,
    )


def collection_of(grid: Grid) -> ProcessGroupCollection:
    fields = model_group_lists(Grid(grid.ranks, tp=grid.tp, pp=grid.pp, cp=grid.cp))
    collection = ProcessGroupCollection()
    for field, rank_lists in fields.items():
        if field in EXPERT_GROUPS:
            array, inner = grid.expert_array, EXPERT_GROUPS[field]
            outer = [axis for axis in range(4) if axis not in inner]
            size = int(torch.tensor([array.shape[axis] for axis in inner]).prod())
            rank_lists = array.transpose((*outer, *inner)).reshape(-1, size).tolist()
        mine = next((ranks for ranks in rank_lists if dist.get_rank() in ranks), None)
        setattr(collection, field, None if mine is None else dist.new_group(list(mine)))
    return collection


def spec_of(a: Architecture, config: TransformerConfig, vp_stage: int | None, stage: int) -> TransformerBlockSubmodules:
    if HAVE_TE:
        return block_spec(a, config, range(a.num_layers), transformer_engine=True)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage, pp_rank=stage
    )
    for layer in spec.layer_specs:  # the local one lacks latent attention; it has no parameters
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    return spec


def shapes_on(a: Architecture, grid: Grid) -> dict[str, Any]:
    """Returns this rank's parameters and the numbers of its layers. The router's bias is a buffer in Megatron, and
    included."""
    stage = grid.coordinates(dist.get_rank()).pp
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(grid.pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(grid.vpp if grid.vpp > 1 else None)
    config = config_of(a, grid)
    collection = collection_of(grid)
    chunks = []
    for chunk in range(grid.vpp):
        vp_stage = chunk if grid.vpp > 1 else None
        spec = spec_of(a, config, vp_stage, stage)
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=padded_vocab_size(a.vocab_size, grid.tp),
                max_sequence_length=a.max_positions,
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == grid.pp - 1 and chunk == grid.vpp - 1,
                share_embeddings_and_output_weights=a.tied_embeddings,
                position_embedding_type="rope",
                pg_collection=collection,
                vp_stage=vp_stage,
            )
        )
    module = torch.nn.ModuleList(chunks) if grid.vpp > 1 else chunks[0]
    held = [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if n.endswith("expert_bias"))]
    if HAVE_TE:
        mark_parallel_weights(module)
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, TransformerLayer)]
    parameters = {name: list(tensor.shape) for name, tensor in held}
    return {
        "parameters": parameters,
        "layers": {name: layer.layer_number - 1 for name, layer in layers},
        "latent_norm_eps": sorted(
            {m.eps for name, m in module.named_modules() if name.endswith("_up_proj") and HAVE_TE}
        ),
        "context_parallel": [
            [dist.get_process_group_ranks(m.cp_group), m.cp_comm_type]
            for name, m in module.named_modules()
            if HAVE_TE and name.endswith("core_attention") and m.cp_group
        ],
        "whole": [n for n, p in module.named_parameters() if p.dim() > 1 and not vars(p).get("tensor_model_parallel")],
        **(with_adapters(a, grid, chunks, collection, parameters) if HAVE_TE and grid.vpp == 1 else {}),
    }


def with_adapters(
    a: Architecture,
    grid: Grid,
    chunks: list[GPTModel],
    collection: ProcessGroupCollection,
    parameters: dict[str, list[int]],
) -> dict[str, Any]:
    layout = megatron_layout(a.adapted(LORA.rank, None), grid, transformer_engine=True)
    computes = len(grid.ranks) == 1
    if computes:  # adapters put row indices on the model's device
        chunks[0].to_empty(device="cpu")
    adapters = Adapters(chunks, layout, dist.get_rank(), LORA, collection, sequence_parallel=False)
    fits = {
        name: parameters[name] == [len(adapter.b), adapter.a.shape[1]] for name, adapter in adapters.of_weight.items()
    }
    return {
        "adapters": {name: list(tensor.shape) for name, tensor in adapters.parameters.items()},
        "misfits": [name for name, fit in fits.items() if not fit],
        "added": _differences_of_layers(chunks[0], adapters) if computes else [],
    }


@torch.no_grad()
def _differences_of_layers(chunk: GPTModel, adapters: Adapters) -> list[float]:
    """Returns the difference from the result of the merged weight, for each layer with adapters."""
    torch.manual_seed(0)
    for parameter in chunk.parameters():
        parameter.normal_()
    found = []
    for name in sorted({name.rpartition(".weight")[0] for name in adapters.of_weight}):
        linear: Any = chunk.get_submodule(name)
        own = (one for one, _ in linear.named_parameters() if f"{name}.{one}" in adapters.of_weight)
        weights = {one: adapters.of_weight[f"{name}.{one}"] for one in own}
        splits = [[3] * len(weights)] if hasattr(linear, "num_gemms") else []
        inputs = torch.randn(3 * len(weights), linear.in_features)
        output = linear(inputs, *splits)[0]
        with adapters.off():
            plain = linear(inputs, *splits)[0]
            for one, adapter in weights.items():
                getattr(linear, one).copy_(adapter.merged(getattr(linear, one)))
            merged = linear(inputs, *splits)[0]
        assert not torch.allclose(plain, merged), name
        found.append(float((output - merged).abs().max() / merged.abs().max()))
    return found


def main(cases: Path, results: Path) -> None:
    adapt_to_platform()
    if HAVE_TE:  # instead of a CUDA stream
        TEDotProductAttention.cp_stream = object()
    multi_latent_attention.HAVE_TE = HAVE_TE  # it mistakes megatron-core's importable wrappers for Transformer Engine
    initialize_rng_tracker(inference_rng_tracker=True)
    found = []
    for case in json.loads(cases.read_text()):
        grid = Grid(tuple(range(case["ranks"])), **case["grid"])
        changes = case.get("architecture", {})
        variant = case.get("variant")
        a = replace(VARIANTS[variant], **changes) if variant else tiny_architecture(case["family"], **changes)
        by_rank = []
        for rank in grid.ranks:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(grid.ranks))
            by_rank.append(shapes_on(a, grid))
            dist.destroy_process_group()
        found.append(by_rank)
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
