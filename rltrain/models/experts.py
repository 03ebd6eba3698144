"""The experts of a model, and how config.json describes them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from rltrain.models.config_file import ConfigReader


@dataclass(frozen=True)
class ExpertLayers:
    """Layers whose MLP is a router and experts, of which every token visits `top_k`.

    `ffn_hidden_size` is that of one expert. `shared_ffn_hidden_size` is that of the experts that every token visits,
    taken together; 0 where there are none. With `shared_gate` what they make is weighted, by a number between 0 and 1
    that a gate gives each token. `dense_layers` have the MLP of a dense model instead.

    An expert's weight is its share of `score`, among the chosen ones where `normalized`, times `scaling`. With
    "sigmoid" experts are chosen by score plus a bias that the checkpoint holds, out of the best `top_groups` of
    `num_groups` groups of consecutive experts.

    Experts that are `interleaved` are gpt-oss's (models.gpt_oss): their matrices are [inputs, outputs], gates and what
    these gate in turn, and they have biases, as the router has.
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
    """Whether one of this name, on whichever side, belongs to an expert that some tokens visit, and others do not."""
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


def read_mixtral(config: ConfigReader, num_layers: int) -> ExpertLayers:
    return ExpertLayers(
        num_experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        ffn_hidden_size=config.count("intermediate_size"),
    )


def read_minimax_m2(config: ConfigReader, num_layers: int) -> ExpertLayers:
    if config.values.get("attn_type_list") and not config.are_all("attn_type_list", (1,)):
        raise config.error("attn_type_list", "1 for every layer: attention, which alone is supported")
    return replace(read_mixtral(config, num_layers), score="sigmoid")


def read_gpt_oss(config: ConfigReader, num_layers: int) -> ExpertLayers:
    return replace(read_mixtral(config, num_layers), interleaved=True)


def _read_dense_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """As DeepSeek counts them, or GLM-4.7-Flash lists them by transformers 5."""
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
    # transformers 5 writes GLM-4.5's as num_local_experts, which is a name for the same.
    experts_key = "n_routed_experts" if "n_routed_experts" in config.values else "num_local_experts"
    top_k, num_experts = config.count("num_experts_per_tok"), config.count(experts_key)
    num_groups, top_groups = config.count("n_group", default=1), config.count("topk_group", default=1)
    if num_experts % num_groups:
        raise config.error("n_group", f"a divisor of {experts_key} = {num_experts}")
    # Groups are ranked by their two best experts; megatron-core ranks them by their top_k / top_groups best.
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
    """As DeepSeek-V3 under other keys: unless the first layer alone is dense, layers say what they are."""
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
"""In all layers. Kimi K2 has 23,040."""


def read_moe(read: Callable[[ConfigReader, int], ExpertLayers], config: ConfigReader, num_layers: int) -> ExpertLayers:
    """Returns the experts that a family's `read` finds. CheckpointError where they are too many."""
    moe = read(config, num_layers)
    if moe.top_k > moe.num_experts:
        raise config.error("num_experts_per_tok", f"at most {moe.num_experts}, the number of experts")
    if num_layers * moe.num_experts > MOST_EXPERTS:
        most = MOST_EXPERTS // moe.num_experts
        raise config.error("num_hidden_layers", f"at most {most}, with {moe.num_experts} experts in each layer")
    return moe
