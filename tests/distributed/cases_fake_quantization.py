"""The ranks of test_fake_quantization: a model with experts, rounded in every pass, in several layouts and both
backends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.algorithms.losses import likelihood_loss
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.config import schema
from rltrain.models import read_architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from tests.distributed import cases_fsdp
from tests.distributed.cases_experts import ALL, MAX_TOKENS, Layout, differences_from, make_trained, share_of
from tests.distributed.cases_lora import kept_bytes
from tests.distributed.cases_training import negative_log_likelihood
from tests.support.trained_models import by_sample, groups_on, write_state

GROUP_SIZE = 16
"""Half of the rows of an expert's last matrix. With two ranks each may have one group."""
ROUNDED = schema.FakeQuantization(group_size=GROUP_SIZE)
LAYOUTS = {
    "one_rank": Layout(Grid((0,)), distributed=False),
    "etp2": Layout(Grid((0, 1), etp=2), distributed=False),
    "tp2_etp1": Layout(Grid((0, 1), tp=2, etp=1)),
    "tp2_ep2_plain": Layout(Grid(ALL, tp=2, ep=2), distributed=False),
    "pp2_ep2_recomputed": Layout(Grid(ALL, pp=2, ep=2), recompute="full"),
    "ep2_dp4_overlap": Layout(Grid(ALL, ep=2), overlap=True),
}
WAYS = {
    f"{backend}{ranks}/{dtype}{with_adapters}": cases_fsdp.Way(
        backend,
        ranks=ranks,
        max_tokens=MAX_TOKENS,
        model={"dtype": dtype, "fake_quantization": {"group_size": GROUP_SIZE}, **more},
    )
    for dtype, with_adapters, more in (
        ("float32", "", {}),
        ("bfloat16", "", {}),
        ("float32", "/adapters", {"lora": {"rank": 4}}),
    )
    for backend, ranks in (("megatron", 1), ("fsdp", 3))
}
MEASURED = "megatron1/float32"
NUM_STEPS = 2


def rounded(path: str, gradients: str) -> dict[str, Any]:
    """Returns this rank's results by layout and by way.

    Writes the weights for engines to `path`/served/NAME and the trained ones to `path`/kept/NAME.
    """
    groups = groups_on(of.grid for of in (*LAYOUTS.values(), *WAYS.values()))
    results: dict[str, Any] = {}
    for name in LAYOUTS:
        if dist.get_rank() in LAYOUTS[name].grid.ranks:
            results[name] = _in_layout(Path(path), Path(gradients), name, groups)
    for name in WAYS:
        if dist.get_rank() in WAYS[name].grid.ranks:
            results[name] = _by_way(Path(path), name, groups)
    return results


def _in_layout(path: Path, gradients: Path, name: str, groups: ProcessGroups) -> dict[str, Any]:
    layout = replace(LAYOUTS[name], rounded=ROUNDED)
    experience, differences = share_of(path, layout.grid), {}
    model = make_trained(path, layout, groups, {})
    _write(path, name, model, groups[layout.grid.ranks], torch.float32)
    start = model.evaluate(experience, max_tokens=MAX_TOKENS)
    if not layout.distributed:
        differences = differences_from(gradients, make_trained(path, layout, groups, {}), experience)
    steps = [model.train_batch(experience, likelihood_loss()) for _ in range(NUM_STEPS)]
    return {"start": by_sample(start, experience), "differences": differences, "steps": steps}


def _by_way(path: Path, name: str, groups: ProcessGroups) -> dict[str, Any]:
    """Returns the reports of steps. The last step starts from the state saved by Megatron."""
    way = WAYS[name]
    model: Any = cases_fsdp.build(way, path, groups)
    _write(path, name, model, groups[way.grid.ranks], getattr(torch, way.model["dtype"]))
    kept = {}
    if name == MEASURED:
        plain = cases_fsdp.build(replace(way, model={"dtype": "float32"}), path, groups)
        kept = {"rounded": kept_bytes(model, 1), "plain": kept_bytes(plain, 1)}
        model = cases_fsdp.build(way, path, groups)
    experience = cases_fsdp.share_of(way, path)
    steps = [model.train_batch(experience, negative_log_likelihood) for _ in range(NUM_STEPS)]
    state = path / f"{name.partition('/')[2].replace('/', '_')}.safetensors"
    if way.backend == "megatron":
        write_state(model, state)
    else:
        model = cases_fsdp.build(way, path, groups, state=[state])
    steps.append(model.train_batch(experience, negative_log_likelihood))
    return {"steps": steps, "kept": kept}


def _write(path: Path, name: str, model: Any, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    places = {"group": group, "rank": dist.get_rank(), "like": path}
    for kind, weights in (("served", model.served), ("kept", model.parameters)):
        folder, architecture = path / kind / name, read_architecture(path)
        save_checkpoint(folder, weights, model.layout, architecture, **places, dtype=dtype, made_bytes=1)
