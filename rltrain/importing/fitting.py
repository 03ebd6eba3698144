"""Where an import would not fit a GPU, settings of memory are chosen that leave what is computed as it is."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, UserError
from rltrain.importing.translation import PLACEMENT, Setting, Translation
from rltrain.models.checkpoint_model import role_architectures
from rltrain.planning.hardware import Gpu, gpu_named
from rltrain.planning.memory import largest, rank_memories
from rltrain.planning.planned import plan_job
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.planning.validation_schedule import check_schedule
from rltrain.runtime.placement import placement_of
from rltrain.tasks.roles import model_roles, trained_roles

LEAST_TOKENS = 2048
"""Of a micro-batch, and of logits at a time: enough for products at full speed."""
BY_MICRO_BATCH = ("clip_cov", "kl_cov")
"""Policy losses that look at a micro-batch as a whole."""
MOST_CHANGES = 12
TENSOR_PARALLEL = (2, 4, 8)
"""Tried where Megatron takes the place of a backend whose optimizer stays on the device."""

USUAL = "h100"
"""The GPU where none is named: 80 GB are what most launch scripts that name none were written for."""
KEEP = "none"
"""The name that leaves memory as the source has it."""

Changed = Mapping[str, Any]
"""Values of config keys."""


def fit_memory(out: Translation, name: str | None) -> None:
    """Settings of memory for the GPU of this name; None: for the usual one, if the model's config.json is at hand.
    ConfigError where a GPU is named, and there is no config.json to take the model's shape from."""
    path = out.get("model.path")
    if name == KEEP:
        return
    if Path(str(path), "config.json").is_file():
        _fit(out, name or USUAL)
    elif name is None:
        out.notes.append(f"memory is as the source has it, since {path} has no config.json at hand (--gpu)")
    else:
        raise ConfigError(
            f"--gpu: {path} has no config.json at hand, which tells the model's shape; expected a checkpoint's folder, "
            "as by --set model.path=FOLDER"
        )


def _fit(out: Translation, name: str) -> None:
    """Change what costs least speed until the estimate fits, or nothing helps any more; the dry run then says what is
    missing."""
    gpu = gpu_named(name)
    held = peak_bytes(out, {}, gpu)
    for _ in range(MOST_CHANGES):
        if held is None or held <= gpu.usable_bytes:
            return
        tried = [(peak_bytes(out, changed, gpu), changed) for changed in _changes(out, gpu)]
        helping = [(peak, changed) for peak, changed in tried if peak is not None and peak < held]
        if not helping:
            return
        enough = [one for one in helping if one[0] <= gpu.usable_bytes]
        held, chosen = enough[0] if enough else min(helping, key=lambda one: one[0])
        for path, value in chosen.items():
            given = out.settings[path].origin if path in out.settings else None
            out.set(path, value, f"--gpu {name}: of memory alone" + (f", in the place of {given}" if given else ""))


def peak_bytes(out: Translation, changed: Changed, gpu: Gpu) -> int | None:
    """What the fullest rank would hold; None where the result would be refused for something else."""
    settings = {**out.settings, **{path: Setting(value, "") for path, value in changed.items()}}
    try:
        config = Config.model_validate(replace(out, settings=settings).data)
        check_config(config)
        placement = placement_of(config, out.world_size, min(out.ranks_per_node, out.world_size))
        architectures = role_architectures(config, placement.roles)
        job = plan_job(config, placement, architectures, min(out.ranks_per_node, out.world_size))
        check_schedule(config, placement, job.grids)
        check_against_architecture(config, job.grids, architectures)
        return largest(rank_memories(job, gpu)).peak.total
    except (UserError, ValidationError, ValueError):
        return None


def _changes(out: Translation, gpu: Gpu) -> Iterator[Changed]:
    """From those that cost least speed to those that cost most."""
    sharded, placed = out.get("actor.backend") == "fsdp", _placed(out)
    if not sharded and out.get("model.logits_chunk_tokens") is None:
        yield {"model.logits_chunk_tokens": LEAST_TOKENS}
    yield from _smaller_engines(out, gpu)
    if out.get("loss.policy") not in BY_MICRO_BATCH:
        for role in sorted(placed & {*model_roles()}):
            path = f"{role}.micro_batch_tokens"
            if out.get(path) >= 2 * LEAST_TOKENS:
                yield {path: out.get(path) // 2}
    if out.get("model.recompute") != "full":
        yield {"model.recompute": "full"}
    for role in sorted(placed & {*trained_roles()}):
        yield {f"{role}.optimizer.cpu_offload": True}
    yield {"model.activation_offload": True}
    tp = out.get("rollout.parallel.tp")
    yield {"rollout.parallel.tp": 2 * tp}
    if sharded and not any(path.startswith("actor.fsdp.") for path in out.settings):
        for size in dict.fromkeys((tp, *TENSOR_PARALLEL)):
            cut = {"actor.parallel.tp": size, "actor.parallel.sequence_parallel": size > 1}
            yield {"actor.backend": "megatron", **cut, "actor.optimizer.cpu_offload": True}
    if not sharded:
        yield {"actor.parallel.ep": 2 * out.get("actor.parallel.ep")}


def _placed(out: Translation) -> set[str]:
    """Roles with ranks."""
    paths = [path.removeprefix(PLACEMENT) for path in out.settings if path.startswith(PLACEMENT)]
    return {role for path in paths for role in path.split(", ")}


def _of(whole: Any, share: int) -> float:
    return round(float(whole) / share, 1)


def _smaller_engines(out: Translation, gpu: Gpu) -> Iterator[Changed]:
    """Less memory for keys and values."""
    if out.get("rollout.engine") == "embedded":
        given = out.get("rollout.kv_cache_gb")
        shares = (2, 4) if given == "auto" else (2,)
        yield from (
            {"rollout.kv_cache_gb": _of(gpu.memory_gb if given == "auto" else given, share)} for share in shares
        )
        return
    arguments = out.get("rollout.sglang.args") or {}
    share = float(arguments.get("mem_fraction_static", 0.85))
    if share > 0.4:
        yield {"rollout.sglang.args": {**arguments, "mem_fraction_static": round(share - 0.1, 2)}}
