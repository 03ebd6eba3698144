"""The experts of a model, and their description in config.json."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from rltrain.models.config_file import ConfigReader


@dataclass(frozen=True)
class ExpertLayers:
    """The layers with a router and experts as their MLP. Every token visits `top_k` experts.

    - `ffn_hidden_size`: the size of one expert.
    - `shared_ffn_hidden_size`: the total size of the shared experts, visited by every token. 0 if there are none.
    - `shared_gate`: a gate weights the output of shared experts by a number between 0 and 1 per token.
    - `dense_layers`: layers with the MLP of a dense model.
    - `score`, `normalized`, `scaling`: the weight of an expert is its score, divided by the sum over the chosen ones if
      `normalized`, times `scaling`. With "sigmoid", a bias of the checkpoint is added to the scores to choose experts.
    - `num_groups`, `top_groups`: only experts in the best `top_groups` of `num_groups` groups of consecutive experts
      can be chosen.
    - `interleaved`: gpt-oss's experts (models.families). Their matrices are [inputs, outputs] with interleaved gates
      and up projections. Experts and router have biases.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    dense_layers: tuple[int, ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared_gate: bool = False
    interleaved: bool = False


def is_expert(parameter: str) -> bool:
    """Returns whether the parameter belongs to a routed expert. Works with the names of every side."""
    return ".experts." in parameter


def read_qwen3_moe(config: ConfigReader, num_layers: int) -> ExpertLayers:
    step = config.count("decoder_sparse_step", default=1)
    listed = config.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise config.error("mlp_only_layers", "a list of layer numbers")
    # transformers 5 writes num_local_experts, 4 wrote num_experts.
    experts_key = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    return ExpertLayers(
        num_experts=config.count(experts_key),
        top_k=config.count("num_experts_per_tok"),
        ffn_hidden_size=config.count("moe_intermediate_size"),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step),
        normalized=config.take("norm_topk_prob", bool, default=config.values["model_type"] == "qwen3_next"),
    )


def read_qwen2_moe(config: ConfigReader, num_layers: int) -> ExpertLayers:
    routed = read_qwen3_moe(config, num_layers)
    return replace(routed, shared_ffn_hidden_size=config.count("shared_expert_intermediate_size"), shared_gate=True)


def read_qwen3_5_moe(config: ConfigReader, num_layers: int) -> ExpertLayers:
    return replace(read_qwen2_moe(config, num_layers), normalized=True)


def read_qwen3_vl_moe(config: ConfigReader, num_layers: int) -> ExpertLayers:
    """Like transformers, ignores norm_topk_prob."""
    return replace(read_qwen3_moe(config, num_layers), normalized=True)


def read_mixtral(config: ConfigReader, num_layers: int) -> ExpertLayers:
    return ExpertLayers(
        num_experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        ffn_hidden_size=config.count("intermediate_size"),
    )


def read_minimax_m2(config: ConfigReader, num_layers: int) -> ExpertLayers:
    if config.values.get("attn_type_list") and not config.are_all("attn_type_list", (1,)):
        raise config.error("attn_type_list", "1 for every layer, since only attention is supported")
    return replace(read_mixtral(config, num_layers), score="sigmoid")


def read_gpt_oss(config: ConfigReader, num_layers: int) -> ExpertLayers:
    return replace(read_mixtral(config, num_layers), interleaved=True)


def _read_dense_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Returns the dense layers. DeepSeek's configs have their number, those of GLM-4.7-Flash by transformers 5 a list
    of types."""
    kinds = config.values.get("mlp_layer_types")
    if kinds is not None:
        if not config.are_all("mlp_layer_types", ("dense", "sparse"), num_layers):
            raise config.error("mlp_layer_types", f"dense or sparse for each of {num_layers} layers")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    num_dense = config.take("first_k_dense_replace", int)
    if not 0 <= num_dense <= num_layers:
        raise config.error("first_k_dense_replace", f"from 0 to num_hidden_layers = {num_layers}")
    return tuple(range(num_dense))


def read_deepseek_v3(config: ConfigReader, num_layers: int) -> ExpertLayers:
    dense_layers = _read_dense_layers(config, num_layers)
    expert_size = config.count("moe_intermediate_size")
    # transformers 5 writes GLM-4.5's number as num_local_experts.
    experts_key = "n_routed_experts" if "n_routed_experts" in config.values else "num_local_experts"
    top_k, num_experts = config.count("num_experts_per_tok"), config.count(experts_key)
    num_groups, top_groups = config.count("n_group", default=1), config.count("topk_group", default=1)
    if num_experts % num_groups:
        raise config.error("n_group", f"a divisor of {experts_key} = {num_experts}")
    # transformers ranks groups by their two best experts, megatron-core by their top_k / top_groups best.
    if top_groups < num_groups and top_k != 2 * top_groups:
        raise config.error("topk_group", f"half of num_experts_per_tok = {top_k}, or n_group = {num_groups}")
    if not config.take("norm_topk_prob", bool, default=True) or top_k == 1:
        raise config.error("norm_topk_prob", "true, with num_experts_per_tok of at least 2")
    return ExpertLayers(
        num_experts=num_experts,
        top_k=top_k,
        ffn_hidden_size=expert_size,
        shared_ffn_hidden_size=config.count("n_shared_experts") * expert_size,
        dense_layers=dense_layers,
        score="sigmoid",
        scaling=config.take("routed_scaling_factor", float, default=1.0),
        num_groups=num_groups,
        top_groups=top_groups,
    )


def read_hy_v3(config: ConfigReader, num_layers: int) -> ExpertLayers:
    """Reads DeepSeek-V3's values under other keys. By default only the first layer is dense."""
    expert_size = config.count("moe_intermediate_size")
    listed = config.values.get("mlp_layer_types") is not None or "first_k_dense_replace" in config.values
    return ExpertLayers(
        num_experts=config.count("num_experts"),
        top_k=config.count("num_experts_per_tok"),
        ffn_hidden_size=expert_size,
        shared_ffn_hidden_size=config.count("num_shared_experts", default=1) * expert_size,
        dense_layers=_read_dense_layers(config, num_layers) if listed else (0,),
        score="sigmoid",
        scaling=config.take("router_scaling_factor", float, default=2.826),
    )


MOST_EXPERTS = 2**18
"""Maximal number of experts over all layers. Kimi K2 has 23,040."""


def read_moe(read: Callable[[ConfigReader, int], ExpertLayers], config: ConfigReader, num_layers: int) -> ExpertLayers:
    """Returns the experts read by a family's `read`. Raises CheckpointError if there are too many."""
    moe = read(config, num_layers)
    if moe.top_k > moe.num_experts:
        raise config.error("num_experts_per_tok", f"at most {moe.num_experts}, the number of experts")
    if num_layers * moe.num_experts > MOST_EXPERTS:
        most = MOST_EXPERTS // moe.num_experts
        raise config.error("num_hidden_layers", f"at most {most}, with {moe.num_experts} experts in each layer")
    return moe
