"""The ranks of test_family_logits: every family in many parallel layouts, in one world of four ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import run_schedule
from rltrain.training.megatron.model import LanguageModel, local_parameters
from tests.support.family_checkpoints import LENGTHS
from tests.support.packed_experience import plain_experience
from tests.support.trained_models import groups_on, megatron_model

ALL = (0, 1, 2, 3)
GRIDS = {
    "tp2_sequence_parallel": Grid((1, 2), tp=2),
    "tp2_pp2": Grid(ALL, tp=2, pp=2),
    "tp4": Grid(ALL, tp=4),
    "tp2_ep2": Grid(ALL, tp=2, ep=2),
    "tp2_ep4_etp1": Grid(ALL, tp=2, ep=4, etp=1),
    "pp2_ep2": Grid(ALL, pp=2, ep=2),
}


def differences(checkpoints: dict[str, list[str]], folder: str) -> dict[str, dict[str, Any]]:
    """Returns by checkpoint and layout the difference from transformers, and whether parameters match the layout.

    `checkpoints` maps names of folders to layouts.
    """
    groups = groups_on(GRIDS.values())
    results: dict[str, dict[str, Any]] = {}
    for name, layouts in checkpoints.items():
        for layout in layouts:
            if dist.get_rank() in GRIDS[layout].ranks:
                results[f"{name}/{layout}"] = _compare(Path(folder, name), layout, groups)
    return results


def _compare(path: Path, layout: str, groups: ProcessGroups) -> dict[str, Any]:
    grid = GRIDS[layout]
    model = megatron_model(path, grid, groups, sequence_parallel=layout.endswith("sequence_parallel")).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in local_parameters(model).items()}
    expected = megatron_layout(model.architecture, grid).on(dist.get_rank()).parameters
    return {"names_and_shapes": shapes == dict(expected), "difference": _largest_difference(model, path, grid)}


@torch.no_grad()
def _largest_difference(model: LanguageModel, path: Path, grid: Grid) -> float | None:
    """Returns the largest difference from transformers' logits, over this replica's samples and this rank's columns.

    Returns None except on the last stage.
    """
    expected, at = load_file(path / "expected.safetensors"), grid.coordinates(dist.get_rank())
    samples = torch.arange(at.dp, len(LENGTHS), grid.dp)
    experience = plain_experience(LENGTHS, expected["tokens"]).select(samples)
    wanted = torch.cat([expected["logits"].split(LENGTHS)[sample] for sample in samples])
    batches = model.micro_batches(experience, max_tokens=10_000)
    kept = run_schedule(model, batches, lambda _, states: (states.sum(), model.logits_of(states)[:, :]), backward=False)
    if not kept:
        return None
    actual = torch.cat(kept)
    wanted = torch.cat([wanted[batch.token_index] for batch in batches])
    first = at.tp * actual.size(1)
    columns = wanted[:, first : first + actual.size(1)]
    return float((actual[:, : columns.size(1)] - columns).abs().max()) if columns.size(1) else 0.0
