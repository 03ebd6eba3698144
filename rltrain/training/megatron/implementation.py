"""Which implementation of layers, and of the way of tokens to experts, can be had for a model, and what stands in the
way of the others."""

import os

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.models import Architecture
from rltrain.models.checkpoint_model import local_mechanisms
from rltrain.runtime.grid import Grid

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Of Transformer Engine's attention over sequences that ranks share out (2.20, utils.get_attention_backend)."""
SINGLE_PARAMETER = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
"""Of Transformer Engine: its grouped products then have one parameter for all experts."""


def uses_transformer_engine(
    model: schema.Model, device: torch.device, architecture: Architecture | None = None, grid: Grid | None = None
) -> bool:
    """Whether model.transformer_impl means Transformer Engine here; ConfigError if it is asked for and cannot be had.

    It has no fused attention over packed sequences in float32, which therefore takes the local layers, no layers of
    some architectures, and for sequences that ranks share out no heads of some sizes and numbers.
    """
    obstacle = obstacle_to_transformer_engine(model, device)
    if obstacle is None and architecture is not None and (mechanisms := local_mechanisms(architecture)):
        obstacle = (
            f"the model has {mechanisms[0]}, which rltrain trains by Megatron's local layers alone",
            "use another",
        )
    if obstacle is None and architecture is not None and grid is not None and grid.cp > 1:
        obstacle = _obstacle_to_shared_sequences(model, architecture, grid)
    if model.transformer_impl == "transformer_engine" and obstacle is not None:
        problem, remedy = obstacle
        raise ConfigError(
            f"model.transformer_impl is transformer_engine, but {problem}; set it to auto or local, or {remedy}"
        )
    return obstacle is None and model.transformer_impl != "local"


def check_names_of_experts(architecture: Architecture) -> None:
    """ConfigError where Transformer Engine would keep a layer's experts in one parameter, under another name."""
    if architecture.moe and os.environ.get(SINGLE_PARAMETER, "0") not in ("", "0"):
        raise ConfigError(
            f"the environment variable {SINGLE_PARAMETER} is {os.environ[SINGLE_PARAMETER]}: Transformer Engine would "
            "keep all experts of a layer in one parameter, where weight syncs and checkpoints expect one for each; "
            "unset it, or set model.transformer_impl to local"
        )


def check_dispatcher(architecture: Architecture, model: schema.Model, grid: Grid, device: torch.device) -> None:
    """ConfigError where model.moe.dispatcher is deepep and that cannot be had."""
    if architecture.moe is None or model.moe.dispatcher != "deepep":
        return
    problem = None
    if device.type != "cuda":
        problem = "this machine has no GPU"
    elif not HAVE_DEEP_EP:
        problem = "megatron-core cannot import Buffer, EventHandle and EventOverlap of deep_ep"
    elif grid.ep * (grid.etp or grid.tp) == 1:
        problem = "every rank has all experts whole (ep and etp are 1)"
    if problem:
        raise ConfigError(f"model.moe.dispatcher is deepep, but {problem}; set it to alltoall")


def obstacle_to_transformer_engine(model: schema.Model, device: torch.device) -> tuple[str, str] | None:
    """(what is in its way, what would help)."""
    if model.dtype == "float32":
        return (
            "model.dtype is float32, for which it has no attention over packed sequences",
            "set model.dtype to bfloat16",
        )
    if not HAVE_TE:
        return "transformer_engine.pytorch cannot be imported", "install transformer-engine for your CUDA version"
    return ("this machine has no GPU", "run it on one that has") if device.type != "cuda" else None


def _obstacle_to_shared_sequences(
    model: schema.Model, architecture: Architecture, grid: Grid
) -> tuple[str, str] | None:
    """(what of context parallelism is in its way, what would help). Its attention then takes the kernels of cuDNN or
    flash-attn alone, and by heads every rank has some keys and values of its own."""
    mla = architecture.mla
    sizes = (architecture.head_dim, mla.value_head_dim if mla else architecture.head_dim)
    if any(size % HEAD_MULTIPLE or size > LARGEST_HEAD for size in sizes):
        return (
            f"with cp {grid.cp} it takes heads of at most {LARGEST_HEAD} elements, a multiple of {HEAD_MULTIPLE}, and "
            f"the model's keys and values have {sizes[0]} and {sizes[1]}",
            "set cp to 1",
        )
    num_kv_heads = max(1, architecture.num_kv_heads // grid.tp)
    if model.cp_communication == "all_to_all" and num_kv_heads % grid.cp:
        return (
            f"by model.cp_communication all_to_all it shares out the {num_kv_heads} key-value heads of a "
            f"tensor-parallel rank, which cp {grid.cp} does not divide",
            "set model.cp_communication to auto",
        )
    return None
