"""The ranks of test_lora: adapters of tiny models in many parallel layouts, in one world of four ranks."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rltrain.algorithms.losses import likelihood_loss
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.checkpoint.peft_files import save_adapters
from rltrain.config.models import Lora
from rltrain.data.experience import Experience
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.layout import Layout
from rltrain.roles.weight_sync import WeightSyncTask
from rltrain.rollout.layout import by_names, engine_parts
from rltrain.runtime.grid import Grid
from rltrain.runtime.heartbeat import TaskClock
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.adapters import begin_adapters
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import LanguageModel, add_adapters
from tests.distributed import cases_experts, cases_fsdp
from tests.distributed.cases_training import GRIDS, load_model, negative_log_likelihood, share_of
from tests.support.packed_experience import plain_experience
from tests.support.schedule_configs import make_config
from tests.support.tiny_checkpoints import VOCAB_SIZE
from tests.support.trained_models import groups_on, in_training, load_experience, summed_gradients, write_state

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
LORA = Lora(rank=4, alpha=8, targets=TARGETS)
FROM_PEFT = ("tp1", "tp4_sp", "tp2_pp2")
FAMILIES = {
    "deepseek_v3": (("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), ("tp1", "tp4_sp")),
    "gemma3": (TARGETS, ("tp2",)),
    "llama_biases": (TARGETS, ("tp4_sp",)),
    "gpt_oss": (TARGETS[:3], ("tp2",)),
    "qwen3_5": (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *TARGETS[:3]), ("tp1",)),
    "qwen3_moe": (("gate_proj", "up_proj", "down_proj"), ("tp2",)),
}
"""Targets and layouts of other families."""
QUICK_FAMILY, QUICK_TARGETS, QUICK_LAYOUT = "phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "tp2"
"""A family whose weights SGLang's own loader takes. Its checkpoints have fused matrices."""
QUICK_TRAINED, SLOW_TRAINED = ("tp1", "tp2_dp2_sp", "tp2_pp2"), ("tp1", "tp4", "pp2_dp2")
OF_EXPERTS = ("one_rank", "tp2_etp1", "etp2", "tp2_ep2", "pp2_ep2", "ep4_recomputed")
BACKENDS = (("megatron", 1, 1), ("fsdp", 1, 1), ("fsdp", 3, 1), ("fsdp", 4, 2))
BACKENDS_OF_EXPERTS = (("megatron", 1, 1), ("fsdp", 1, 1), ("fsdp", 3, 1))
"""(backend, ranks, copies)"""
SAVED, RESUMED = "tp2_dp2_sp", "pp2_dp2"
MAX_TOKENS = 180
NUM_STEPS = 3
LEARNING: dict[str, dict[str, Any] | None] = {
    "everything": None,
    "all matrices": {"rank": 4},
    "queries": {"rank": 4, "targets": ["q_proj"]},
    "projections": {"rank": 4, "targets": ["o_proj", "down_proj"]},
    "gates with dropout": {"rank": 4, "targets": ["gate_proj"], "dropout": 0.1},
}
KEPT_ROWS = 64
"""Tokens of the shorter of two samples; a multiple of the padding of micro-batches."""


def quick_cases(dense: str, folder: str) -> dict[str, Any]:
    """Returns this rank's checks of a dense model, by name."""
    groups = _groups()
    results = _of_family("qwen3", TARGETS, FROM_PEFT, groups, Path(folder))
    results |= _of_family(QUICK_FAMILY, QUICK_TARGETS, [QUICK_LAYOUT], groups, Path(folder))
    results |= {f"trained/{layout}": _train(Path(dense), layout, groups) for layout in QUICK_TRAINED if _joins(layout)}
    results["resumed"] = _resume(Path(dense), groups, Path(folder))
    results |= _by_backend("backend", Path(dense), LORA, BACKENDS, groups, Path(folder))
    if dist.get_rank() == 0:
        results["kept"] = _kept_by_autograd(Path(dense), groups)
    return results


def slow_cases(dense: str, experts: str, folder: str) -> dict[str, Any]:
    """Returns this rank's checks of more layouts, other families and experts."""
    groups = _groups()
    results: dict[str, Any] = {}
    for family, (targets, layouts) in FAMILIES.items():
        results |= _of_family(family, targets, layouts, groups, Path(folder))
    results |= {f"trained/{layout}": _train(Path(dense), layout, groups) for layout in SLOW_TRAINED if _joins(layout)}
    every = LORA.model_copy(update={"targets": None})
    results |= _by_backend("backend_of_experts", Path(experts), every, BACKENDS_OF_EXPERTS, groups, Path(folder))
    if _joins("tp2_sp"):
        results["dropout/none"] = [_drop(Path(dense), groups, "none") for _ in range(2)]
        results["dropout/full"] = [_drop(Path(dense), groups, "full")]
        results["dropout/selective"] = [_drop(Path(dense), groups, "selective")]
        results["trained/made_again"] = _drop(Path(dense), groups, "selective", dropout=0.0)
    for name in OF_EXPERTS:
        if dist.get_rank() in cases_experts.LAYOUTS[name].grid.ranks:
            results[f"experts/{name}"] = _train_experts(Path(experts), name, groups)
    return results


def _joins(layout: str) -> bool:
    return dist.get_rank() in GRIDS[layout].ranks


def _groups() -> ProcessGroups:
    grids = [*GRIDS.values(), *(layout.grid for layout in cases_experts.LAYOUTS.values())]
    grids += [cases_fsdp.Way(backend, ranks=ranks, copies=copies).grid for backend, ranks, copies in BACKENDS]
    return groups_on(grids)


def _of_family(
    family: str, targets: tuple[str, ...] | None, layouts: Sequence[str], groups: ProcessGroups, folder: Path
) -> dict[str, Any]:
    lora, mine = LORA.model_copy(update={"targets": targets, "path": f"{folder}/{family}_peft"}), dist.get_rank()
    return {
        f"peft/{family}/{layout}": _from_peft(folder / family, layout, groups, lora, folder / family / layout)
        for layout in layouts
        if mine in GRIDS[layout].ranks
    }


def adapted(model: LanguageModel, lora: Lora = LORA, *, distributed: bool = True, begin: bool = True) -> TrainableModel:
    adapters = add_adapters(model, lora)
    if begin:
        begin_adapters(adapters.layout, dist.get_rank(), adapters.parameters, lora, seed=1)
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    return in_training(
        model, updates=NUM_STEPS, max_tokens=MAX_TOKENS, optimizer=optimizer, distributed_optimizer=distributed
    )


def _from_peft(path: Path, layout: str, groups: ProcessGroups, lora: Lora, folder: Path) -> dict[str, Any]:
    """Writes the adapters, their gradients and the merged model."""
    model = adapted(load_model(path, layout, groups), lora, distributed=False)
    experience = share_of(load_experience(path), layout)
    logprobs = model.evaluate(experience, max_tokens=MAX_TOKENS)
    summed = summed_gradients(model, experience, negative_log_likelihood)
    gradients = {name: gradient / float(experience.response_mask.sum()) for name, gradient in summed.items()}
    architecture, everyone = model.model.architecture, {"group": groups[GRIDS[layout].ranks], "rank": dist.get_rank()}
    of_adapters = model.adapted.layout, architecture.adapted(lora.rank, lora.targets), lora
    for name, tensors in (("adapters", model.adapted.parameters), ("gradients", gradients)):
        save_adapters(folder / name, tensors, *of_adapters, **everyone, base=str(path))
    save_checkpoint(folder / "merged", model.published, model.layout, architecture, **everyone, like=path, made_bytes=1)
    if by_names(architecture):
        _sync_by_names(model, path, lora, GRIDS[layout], groups, folder)
    return {"logprobs": logprobs.tolist()}


class Received:
    """An engine that only keeps what a sync gives it: whole tensors of the checkpoint."""

    policy_version: int | None = None
    num_restarts = 0

    def __init__(self, parts: Sequence[Layout]) -> None:
        self.parts, self.tensors = parts, dict[str, torch.Tensor]()

    def begin_update(self) -> None:
        """Does nothing."""

    def incoming(self, part: int, *, is_kept: bool) -> dict[str, torch.Tensor]:
        arriving = allocate_parameters(self.parts[part], dist.get_rank())
        self.tensors |= arriving
        return arriving

    def arrived(self, part: int) -> None:
        """Does nothing, because `tensors` has the part."""

    def end_update(self, version: int) -> None:
        self.policy_version = version


def _sync_by_names(
    model: TrainableModel, path: Path, lora: Lora, grid: Grid, groups: ProcessGroups, folder: Path
) -> None:
    """Runs a weight sync of the merged weights for SGLang's own loader, and writes this rank's tensors."""
    of_model = {"path": str(path), "dtype": "float32", "lora": lora.model_dump()}
    rollout = {"engine": "sglang", "sglang": {"staging_mb": 0.02}}
    config, architecture = make_config(model=of_model, rollout=rollout), model.model.architecture
    engine_grid = Grid(grid.ranks, tp=len(grid.ranks))
    engine = Received([part.layout for part in engine_parts(config, architecture, engine_grid)])
    job = SimpleNamespace(
        config=config,
        world=SimpleNamespace(rank=dist.get_rank(), ranks_per_node=dist.get_world_size(), device=torch.device("cpu")),
        heartbeat=SimpleNamespace(task_clock=TaskClock()),
        grids={"actor": grid, "rollout": engine_grid},
        groups=groups,
        architecture=architecture,
        training_layout=lambda role: model.layout,
    )
    parts = {"base": MemoryPart(tuple), "weights": MemoryPart(tuple)}
    follower: Any = SimpleNamespace(engine=engine, parts=parts)
    WeightSyncTask(job, SimpleNamespace(model=model), follower)(0, 0)  # type: ignore[arg-type]
    save_file(engine.tensors, folder / f"synced_{dist.get_rank()}.safetensors")


def _train(path: Path, layout: str, groups: ProcessGroups) -> dict[str, Any]:
    model = adapted(load_model(path, layout, groups))
    experience = share_of(load_experience(path), layout)
    weights = {name: tensor.detach().clone() for name, tensor in model.parameters.items()}
    base = model.adapted.base.evaluate(experience, max_tokens=MAX_TOKENS)
    start = model.evaluate(experience, max_tokens=MAX_TOKENS)
    return {
        "steps": _steps(model, experience, NUM_STEPS),
        "begins_as_base": torch.equal(base, start),
        "base_stays": torch.equal(base, model.adapted.base.evaluate(experience, max_tokens=MAX_TOKENS)),
        "weights_stay": all(torch.equal(tensor, weights[name]) for name, tensor in model.parameters.items()),
        "bytes": {name: part.size_bytes for name, part in model.parts.items()},
        "frozen": sum(tensor.nbytes for tensor in model.parameters.values()),
        "adapters": sum(tensor.nbytes for tensor in model.adapted.parameters.values()),
    }


def _steps(model: TrainableModel, experience: Experience, count: int) -> list[dict[str, float]]:
    return [model.train_batch(experience, negative_log_likelihood) for _ in range(count)]


def _resume(path: Path, groups: ProcessGroups, folder: Path) -> dict[str, Any]:
    """Returns the steps after the first two: continued, and resumed from saved states in the same and another
    layout."""
    model = adapted(load_model(path, SAVED, groups))
    experience = share_of(load_experience(path), SAVED)
    _steps(model, experience, 2)
    write_state(model, folder / f"state_{dist.get_rank()}.safetensors")
    dist.barrier()
    files = [folder / f"state_{rank}.safetensors" for rank in GRIDS[SAVED].ranks]
    found = {"went_on": _steps(model, experience, 1)}
    for layout in (SAVED, RESUMED):
        other = adapted(load_model(path, layout, groups), begin=False)
        other.load_state(files)
        found[layout] = _steps(other, share_of(load_experience(path), layout), 1)
    names = {name for name in load_file(files[0]) if "lora" not in name}
    return {**found, "others": sorted(names)}


def _by_backend(
    name: str, path: Path, lora: Lora, backends: Sequence[tuple[str, int, int]], groups: ProcessGroups, folder: Path
) -> dict[str, Any]:
    results = {}
    for backend, ranks, copies in backends:
        model = {"lora": lora.model_dump()}
        way = cases_fsdp.Way(backend, ranks=ranks, copies=copies, max_tokens=MAX_TOKENS, model=model)
        if dist.get_rank() in way.grid.ranks:
            file = folder / f"{name}_of_megatron.safetensors"
            results[f"{name}/{backend}{ranks}x{copies}"] = _train_by(way, path, groups, file)
    return results


def _train_by(way: cases_fsdp.Way, path: Path, groups: ProcessGroups, file: Path) -> dict[str, Any]:
    """Trains with either backend from the state saved by Megatron after the first step, and merges afterwards."""
    experience = cases_fsdp.share_of(way, path)
    model: Any = cases_fsdp.build(way, path, groups)
    base = model.adapted.base.evaluate(experience, max_tokens=MAX_TOKENS)
    start = model.evaluate(experience, max_tokens=MAX_TOKENS)
    steps = [model.train_batch(experience, negative_log_likelihood)]
    if way.backend == "megatron":
        write_state(model, file)
    resumed: Any = cases_fsdp.build(way, path, groups, state=[file])
    steps += [resumed.train_batch(experience, negative_log_likelihood) for _ in range(NUM_STEPS - 1)]
    merged = {name: tensor.double().sum().item() for name, tensor in resumed.published.items()}
    return {
        "steps": steps,
        "begins_as_base": torch.equal(base, start),
        "base_stays": torch.equal(base, resumed.adapted.base.evaluate(experience, max_tokens=MAX_TOKENS)),
        "merged": merged,
        "trained": sum(tensor.numel() for tensor in resumed.adapted.parameters.values()),
    }


def _drop(path: Path, groups: ProcessGroups, recompute: str, dropout: float = 0.3) -> dict[str, Any]:
    """Returns steps with dropout, and whether torch's generator stayed unused."""
    before = torch.get_rng_state()
    lora = LORA.model_copy(update={"dropout": dropout})
    model = adapted(load_model(path, "tp2_sp", groups, recompute=recompute), lora)
    steps = _steps(model, share_of(load_experience(path), "tp2_sp"), NUM_STEPS)
    return {"steps": steps, "undisturbed": torch.equal(before, torch.get_rng_state())}


def _train_experts(path: Path, name: str, groups: ProcessGroups) -> list[dict[str, float]]:
    layout = cases_experts.LAYOUTS[name]
    whole = cases_experts.build(path, layout, groups, {})
    model = adapted(whole, Lora(rank=4, alpha=8), distributed=layout.distributed)
    experience = cases_experts.share_of(path, layout.grid)
    return [model.train_batch(experience, likelihood_loss()) for _ in range(NUM_STEPS)]


def _kept_by_autograd(path: Path, groups: ProcessGroups) -> dict[str, float]:
    """Returns the bytes per token that a forward pass keeps for backward, without weights, by backend and trained
    parts.

    This is the difference between a sample and one of twice its length.
    """
    found = {}
    for backend, (name, lora) in product(("megatron", "fsdp"), LEARNING.items()):
        model = cases_fsdp.build(cases_fsdp.Way(backend, model={"lora": lora}), path, groups)
        once, twice = (kept_bytes(model, times) for times in (1, 2))
        found[f"{backend}/{name}"] = (twice - once) / KEPT_ROWS
    return found


def kept_bytes(model: Any, times: int) -> int:
    """Returns the bytes that a forward pass of `times` * KEPT_ROWS tokens keeps for backward, without parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters.values()}
    held, places = dict[int, Any](), torch.arange(times * KEPT_ROWS)
    one_sample = plain_experience([len(places)], places % VOCAB_SIZE, places > 0)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held.setdefault(storage._cdata, (storage.nbytes(), storage))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.accumulate(one_sample, negative_log_likelihood)
    return sum(num_bytes for storage, (num_bytes, _) in held.items() if storage not in own)
