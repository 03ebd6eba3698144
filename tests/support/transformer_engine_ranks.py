"""Trains models with Transformer Engine's modules (stand-ins) and with Megatron's own, for comparison.

    python transformer_engine_ranks.py FOLDER      # with the stand-ins on PYTHONPATH

The script forks its ranks. Each writes its results, by case and by model, to FOLDER/RANK.json.
"""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import deep_ep
import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer import multi_latent_attention
from transformer_engine.pytorch import attention_rules

from rltrain.algorithms.losses import likelihood_loss
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.models import Architecture, LinearScaling, YarnScaling
from rltrain.models.architecture import MLA
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron import model as model_module
from rltrain.training.megatron import model_config
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model_config import activation_settings, uses_transformer_engine
from rltrain.training.megatron.platform import adapt_to_platform
from tests.distributed.cases_context_parallel import BALANCED, MAX_TOKENS, NUM_STEPS, experience, write_weights
from tests.distributed.cases_prefixes import experience as alike
from tests.support.model_shards import tiny_architecture
from tests.support.tolerances import ADAM_EPS

ALL = (0, 1, 2, 3)
HEADS = MLA(q_rank=8, kv_rank=16, plain_head_dim=16, rope_head_dim=8, value_head_dim=16)
"""Queries and keys of 24 elements, values of 16: sizes supported by its kernels."""
YARN = YarnScaling(factor=4.0, original_max_positions=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.5)
SIZES: dict[str, Any] = {"hidden_size": 32, "vocab_size": 61, "num_layers": 2}
MODELS: dict[str, Architecture] = {
    "deepseek_v3": tiny_architecture("deepseek_v3", head_dim=24, mla=HEADS, rope_scaling=YARN, **SIZES),
    "moonlight": tiny_architecture("deepseek_v3", head_dim=24, mla=replace(HEADS, q_rank=None), **SIZES),
    "yarn": tiny_architecture(
        "qwen2", qkv_bias=True, head_dim=8, rope_scaling=replace(YARN, mscale=0.0, mscale_all_dim=0.0), **SIZES
    ),
    "latent linear": tiny_architecture("deepseek_v3", head_dim=24, mla=HEADS, rope_scaling=LinearScaling(3.0), **SIZES),
    "qwen3_moe": tiny_architecture("qwen3_moe", num_heads=8, num_kv_heads=2, head_dim=8, **SIZES),
}
OF_MODEL: dict[str, dict[str, Any]] = {"rounded": {"fake_quantization": schema.FakeQuantization(group_size=4)}}
"""Settings of a model for all of its layers."""
MODELS["rounded"] = MODELS["qwen3_moe"]
MODELS["further"] = MODELS["deepseek_v3"].predicting()
MODELS["further of dense"] = tiny_architecture("mimo", qkv_bias=True, head_dim=8, **SIZES).predicting()
OF_MODEL |= dict.fromkeys(("further", "further of dense"), {"mtp": schema.Mtp(trains="model")})
SHARED = {"share_prefixes": True}
MODELS["alike"] = MODELS["qwen3_moe"]
MODELS["alike of yarn"] = MODELS["yarn"]
MODELS["alike latent"] = MODELS["deepseek_v3"]
OF_MODEL |= dict.fromkeys(("alike", "alike of yarn", "alike latent"), SHARED)
MODELS["alike further"] = MODELS["further"]
OF_MODEL["alike further"] = OF_MODEL["further"] | SHARED
BY_HEADS, DEEPEP = {"cp_communication": "all_to_all"}, {"dispatcher": "deepep"}
CASES: dict[str, tuple[str, Grid, dict[str, Any]]] = {
    "latent tp2": ("deepseek_v3", Grid((0, 1), tp=2), {}),
    "latent pp2 cp2 ep2": ("deepseek_v3", Grid(ALL, pp=2, cp=2, ep=2), {"recompute": "selective"}),
    "latent tp2 cp2 ep4 etp1": ("deepseek_v3", Grid(ALL, tp=2, cp=2, ep=4, etp=1), {"recompute": "full"}),
    "latent tp2 cp2 etp2 by heads": ("deepseek_v3", Grid(ALL, tp=2, cp=2, etp=2), BY_HEADS),
    "latent tp2 ep2 deepep": ("deepseek_v3", Grid(ALL, tp=2, ep=2), DEEPEP),
    "further pp2 cp2 ep2": ("further", Grid(ALL, pp=2, cp=2, ep=2), {"recompute": "full"}),
    "further of dense tp2 pp2": ("further of dense", Grid(ALL, tp=2, pp=2), {}),
    "yarn tp2 pp2": ("yarn", Grid(ALL, tp=2, pp=2), {}),
    "yarn cp2": ("yarn", Grid((0, 1), cp=2), {}),
    "latent linear tp2 ep2": ("latent linear", Grid(ALL, tp=2, ep=2), {}),
    "moonlight tp2 cp2 ep2": ("moonlight", Grid(ALL, tp=2, cp=2, ep=2), {}),
    "alike tp2 ep2": ("alike", Grid(ALL, tp=2, ep=2), {"recompute": "selective"}),
    "alike cp2 ep4": ("alike", Grid(ALL, cp=2, ep=4), {"recompute": "full"}),
    "alike of yarn tp2 pp2": ("alike of yarn", Grid(ALL, tp=2, pp=2), {}),
    "alike of yarn tp2 cp2 by heads": ("alike of yarn", Grid(ALL, tp=2, cp=2), BY_HEADS),
    "alike latent tp2 ep2": ("alike latent", Grid(ALL, tp=2, ep=2), {"recompute": "selective"}),
    "alike latent pp2 cp2 ep2 by heads": ("alike latent", Grid(ALL, pp=2, cp=2, ep=2), BY_HEADS),
    "alike further pp2 cp2 ep2": ("alike further", Grid(ALL, pp=2, cp=2, ep=2), {}),
    "groups tp4": ("qwen3_moe", Grid(ALL, tp=4), {}),
    "rounded ep2 etp2": ("rounded", Grid(ALL, ep=2, etp=2), {"recompute": "full"}),
    "groups cp2 ep4 deepep": ("qwen3_moe", Grid(ALL, cp=2, ep=4), DEEPEP),
    "groups pp2 cp2 ep2 by heads": ("qwen3_moe", Grid(ALL, pp=2, cp=2, ep=2), {**BY_HEADS, "recompute": "full"}),
}
"""Model, grid, and settings of each case."""
REFUSED: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "odd heads": (tiny_architecture("deepseek_v3", head_dim=20, mla=replace(HEADS, plain_head_dim=12), **SIZES), {}),
    "one key head by heads": (tiny_architecture("qwen3", num_kv_heads=1, head_dim=8, **SIZES), BY_HEADS),
}
"""Sequences divided among ranks in ways without a kernel."""


def trained(
    architecture: Architecture,
    path: Path,
    grid: Grid,
    groups: ProcessGroups,
    *,
    transformer_engine: bool,
    share_prefixes: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Returns the reports of some optimizer steps, and the log-probs after them."""
    moe = BALANCED.model_copy(update={"dispatcher": settings.pop("dispatcher", "alltoall")})
    model_module.uses_transformer_engine = lambda *_: transformer_engine
    model_config.activation_settings = lambda of, fused: activation_settings(of, fused=transformer_engine)
    model = model_module.build_model(
        architecture,
        grid,
        groups,
        model=schema.Model(path=str(path), dtype="float32", moe=moe, **settings),
        parallel=schema.Parallel(tp=grid.tp, pp=grid.pp, cp=grid.cp, ep=grid.ep, etp=grid.etp),
        device=torch.device("cpu"),
    )
    load_parameters(path, model.layout, dist.get_rank(), model_module.local_parameters(model))
    actor = schema.Actor(optimizer=schema.Optimizer(lr=1e-3, eps=ADAM_EPS), micro_batch_tokens=MAX_TOKENS)
    trainable = TrainableModel(model, actor, total_updates=NUM_STEPS)
    samples = alike("grpo") if share_prefixes else experience("grpo")
    model.share_prefixes = share_prefixes and transformer_engine
    share = samples.select(torch.nonzero(samples.group_ids % grid.dp == grid.coordinates(dist.get_rank()).dp).flatten())
    steps = [trainable.train_batch(share, likelihood_loss()) for _ in range(NUM_STEPS)]
    assert all(bool(step.pop("shared_tokens_ratio")) == model.share_prefixes for step in steps)
    origins = {type(module).__module__ for module in model.modules()}
    assert (TEDotProductAttention.__module__ in origins) == transformer_engine
    return {"steps": steps, "told": trainable.evaluate(samples, max_tokens=MAX_TOKENS).tolist()}


def results_on(rank: int, folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=len(ALL))
    groups = ProcessGroups(
        sorted({ranks for _, grid, _ in CASES.values() for ranks in group_lists({"actor": grid})}),
        backend="gloo",
        timeout_s=60,
    )
    results: dict[str, Any] = {}
    for name, architecture in MODELS.items():
        path = folder / f"{name}{rank}"
        write_weights(architecture, path)
        if rank == 0:
            results[name] = trained(
                architecture, path, Grid((0,)), groups, transformer_engine=False, **OF_MODEL.get(name, {})
            )
        for case, (of, grid, settings) in CASES.items():
            settings = {**settings, **OF_MODEL.get(of, {})}
            if of == name and rank in grid.ranks:
                results[case] = trained(architecture, path, grid, groups, transformer_engine=True, **settings)
    for name, (architecture, settings) in REFUSED.items():
        grid = Grid((0, 1), cp=2)
        if rank in grid.ranks:
            path = folder / f"{name}{rank}"
            write_weights(architecture, path)
            results[name] = refusals(architecture, path, grid, groups, **settings)
    dist.barrier()
    return results


def refusals(
    architecture: Architecture, path: Path, grid: Grid, groups: ProcessGroups, **settings: Any
) -> dict[str, str | None]:
    """Returns the refusals of rltrain, and of Transformer Engine if rltrain is not asked."""
    model = schema.Model(path=str(path), transformer_impl="transformer_engine", **settings)
    found: dict[str, str | None] = {"rltrain": None, "transformer_engine": None}
    try:
        uses_transformer_engine(model, torch.device("cuda"), architecture, grid)
    except ConfigError as error:
        found["rltrain"] = str(error)
    try:
        trained(architecture, path, grid, groups, transformer_engine=True, **settings)
    except (AssertionError, ValueError) as error:
        found["transformer_engine"] = str(error)
    return found


def main(folder: Path) -> None:
    adapt_to_platform()
    # Removes only the rounding to half precision, so the numbers can be compared.
    attention_rules.HALF_PRECISION += (torch.float32,)
    deep_ep.TYPES += (torch.float32,)
    TEDotProductAttention.cp_stream = object()
    multi_latent_attention.HAVE_TE = True
    model_module.check_dispatcher = lambda *_: None  # it needs a GPU
    model_module.initialize_rng_tracker(inference_rng_tracker=True)
    torch.set_num_threads(1)
    processes = {rank: os.fork() or _run(rank, folder) for rank in ALL}
    failed = [rank for rank, process in processes.items() if os.waitpid(process, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} failed")


def _run(rank: int, folder: Path) -> NoReturn:
    status = 1
    try:
        (folder / f"{rank}.json").write_text(json.dumps(results_on(rank, folder)))
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
