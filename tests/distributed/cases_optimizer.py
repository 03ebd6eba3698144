"""The ranks of test_optimizer: updates by optimizers with offloaded or smaller states, and by Muon."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rltrain.checkpoint.saved_state import MASTER, Destination, SavedState
from rltrain.config.models import Muon
from rltrain.errors import CheckpointError
from rltrain.offload import activations as activation_offload
from rltrain.offload.device_memory import DeviceMemory
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.optimizers import COEFFICIENTS
from tests.distributed.cases_training import (
    GRIDS,
    SEVERAL_MICRO_BATCHES,
    load_model,
    make_trainable,
    negative_log_likelihood,
    share_of,
)
from tests.distributed.cases_training_state import (
    AFTER,
    BEFORE,
    Case,
    Run,
    Way,
    groups_of,
    layout_of,
    saved_and_continued,
)
from tests.support.tolerances import ADAM_EPS
from tests.support.trained_models import digest, groups_on, load_experience

UPDATES = BEFORE + AFTER
OFFLOAD, HALF = (("cpu_offload", True),), (("cpu_offload", 0.5),)
SMALL = (("moments_dtype", "bfloat16"),)
NEWTON_SCHULZ_STEPS = 6
"""A value other than the default."""
MUON = (("name", "muon"), ("muon", Muon(newton_schulz_steps=NEWTON_SCHULZ_STEPS)))
EQUAL = {
    "fp32": Way(tp=2, dp=2),
    "bf16_plain": Way(dp=2, dtype="bfloat16", distributed=False),
    "bf16_overlap": Way(dp=4, dtype="bfloat16", overlap=True),
}
"""Ways in which the place of the states changes no bit."""
QUICK_EQUAL = "bf16_plain"
SAVED = {
    "half_offload": Case(Way(tp=2, dp=2, dtype="bfloat16", optimizer=HALF), away=True),
    "offload_fp32": Case(Way(dp=2, optimizer=OFFLOAD), away=True),
    "bf16_moments": Case(Way(tp=2, dp=2, optimizer=SMALL), away=True),
    "bf16_moments_offload": Case(Way(tp=2, dp=2, dtype="bfloat16", optimizer=(*SMALL, *OFFLOAD)), away=True),
    "offload_off": Case(Way(tp=2, dp=2, optimizer=OFFLOAD), Way(dp=4)),
    "offload_on": Case(Way(dp=4), Way(tp=2, dp=2, optimizer=HALF)),
    "bf16_moments_to_tp4": Case(Way(dp=4, optimizer=SMALL), Way(tp=4, optimizer=SMALL)),
}
LAYOUTS = {
    "alone": Way(optimizer=MUON),
    "tp2_dp2": Way(tp=2, dp=2, optimizer=MUON),
    "dp4_plain": Way(dp=4, distributed=False, optimizer=MUON),
    "pp2_dp2_overlap": Way(pp=2, dp=2, overlap=True, optimizer=MUON),
    "pp3_idle_stage": Way(pp=3, layers=(1, 0, 1), optimizer=MUON),
}
QUICK_LAYOUTS = {"alone": Way(optimizer=MUON), "dp2": Way(dp=2, optimizer=MUON)}
EXPERT_LAYOUTS = {
    "alone": Way(optimizer=MUON),
    "tp2_dp2_ep4": Way(tp=2, dp=2, ep=4, etp=1, optimizer=MUON),
    "dp4_ep2": Way(dp=4, ep=2, optimizer=MUON),
    "pp2_dp2_ep2_plain": Way(pp=2, dp=2, ep=2, distributed=False, optimizer=MUON),
    "pp4_idle_stages": Way(pp=4, layers=(0, 1, 1, 0), optimizer=MUON),
}
WAYS = {"quick": QUICK_LAYOUTS, "dense": LAYOUTS, "experts": EXPERT_LAYOUTS}
MOVES = {
    "quick": (QUICK_LAYOUTS["dp2"], Way(tp=2, optimizer=MUON)),
    "dense": (LAYOUTS["tp2_dp2"], Way(dp=4, optimizer=MUON)),
    "experts": (EXPERT_LAYOUTS["tp2_dp2_ep4"], Way(dp=4, optimizer=MUON)),
}
"""Layouts before and after a resume."""


def places(checkpoints: dict[str, str], folder: str) -> dict[str, Any]:
    """Returns weights and losses with the states on the device and on the host, and those of saved and resumed runs."""
    path = Path(checkpoints["qwen3"])
    groups = groups_of({**{name: Case(way) for name, way in EQUAL.items()}, **SAVED})
    seen = {name: in_three_places(Case(way), path, groups) for name, way in EQUAL.items()}
    for name, case in SAVED.items():
        seen[name] = saved_and_continued(case, path, groups, Path(folder, name))
    return seen


def quick_cases(checkpoints: dict[str, str], folder: str) -> dict[str, Any]:
    """Returns the results of `places` for one way, and of `matrices` under "muon"."""
    case, path = Case(EQUAL[QUICK_EQUAL]), Path(checkpoints["qwen3"])
    places_of_one = in_three_places(case, path, groups_of({QUICK_EQUAL: case}))
    return {QUICK_EQUAL: places_of_one, "muon": matrices(checkpoints, folder, "qwen3", "quick")}


def in_three_places(case: Case, path: Path, groups: ProcessGroups) -> Any:
    """Returns updates, digests and bytes with the states on the device, on the host, and half on each."""
    found = []
    for optimizer in ((), OFFLOAD, HALF) if dist.get_rank() in case.way.grid.ranks else ():
        run = Run(case, replace(case.way, optimizer=optimizer), path, groups, load_weights=True)
        found.append({"updates": run.train(BEFORE), "digests": run.digests(), "bytes": held(run)})
    return found


def held(run: Run) -> dict[str, list[int]]:
    """Returns the bytes of each part on the device and on the host."""
    return {name: [part.device_bytes, part.host_bytes] for name, part in run.trained.parts.items()}


def matrices(checkpoints: dict[str, str], folder: str, kind: str, layouts: str) -> dict[str, Any]:
    """Runs Muon in several layouts and returns the metrics, on rank 0 also the differences between the final
    weights."""
    path, seen = Path(checkpoints[kind]), dict[str, Any]()
    ways = WAYS[layouts]
    cases = {name: Case(way, checkpoint=kind) for name, way in ways.items()}
    moving = Case(*MOVES[layouts], checkpoint=kind)
    groups = groups_of({**cases, "moving": moving})
    for name, case in cases.items():
        if dist.get_rank() in case.way.grid.ranks:
            run = Run(case, case.way, path, groups, load_weights=True)
            seen[name] = run.train(UPDATES)
            run.save(Path(folder, name))
        dist.barrier()
    run = Run(moving, moving.way, path, groups, load_weights=True)
    run.train(BEFORE)
    run.save(Path(folder, "moving"))
    dist.barrier()
    seen["refusal"] = refusal(moving, path, groups, Path(folder, "moving"))
    run = Run(moving, moving.goes_on, path, groups, load_weights=False)
    run.load(Path(folder, "moving"))
    seen["moved"] = run.train(AFTER)
    if dist.get_rank() == 0:
        first = whole_weights(cases["alone"], path, Path(folder, "alone"))
        seen["apart"] = {
            name: max(float((first[key] - other[key]).abs().max()) for key in first)
            for name in ways
            for other in [whole_weights(cases[name], path, Path(folder, name))]
        }
        if layouts != "experts":
            expected = by_transformers(path)
            seen["from_reference"] = {key: float((first[key] - expected[key]).abs().max()) for key in first}
            seen["moved_by"] = {key: float((first[key] - before).abs().max()) for key, before in weights_of(path)}
    return seen


def refusal(case: Case, path: Path, groups: Any, folder: Path) -> str:
    run = Run(case, replace(case.way, optimizer=()), path, groups, load_weights=False)
    try:
        run.load(folder)
    except CheckpointError as error:
        return str(error)
    return "no error"


def whole_weights(case: Case, path: Path, folder: Path) -> dict[str, Tensor]:
    """Returns the weights by their names in the checkpoint."""
    layout = layout_of(case, Way(), path)
    on = layout.on(0)
    flats = [torch.zeros(shape).view(-1) for _, shape in on.parameters]
    SavedState(sorted(folder.glob("*.safetensors")), layout.tensors).read([Destination(MASTER, on.pieces, flats)])
    found = {
        name: torch.zeros(shape if len(shape) == 2 else (1, *shape))
        for name, shape in zip(layout.tensors.names, layout.tensors.shapes, strict=True)
    }
    for piece in on.pieces:
        row, col, rows, cols = (int(piece[field]) for field in ("row", "col", "rows", "cols"))
        part = flats[piece["parameter"]].as_strided((rows, cols), (int(piece["stride"]), 1), int(piece["offset"]))
        found[layout.tensors.names[piece["tensor"]]][row : row + rows, col : col + cols] = part
    return found


def weights_of(path: Path) -> list[tuple[str, Tensor]]:
    return [(name, values.view(-1, values.shape[-1])) for name, values in load_file(path / "model.safetensors").items()]


def by_transformers(path: Path) -> dict[str, Tensor]:
    """Does the same updates with transformers' model, torch's AdamW and numpy's singular values."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # the pad token is learned like any other token
    samples = load_file(path / "experience.safetensors")
    named = dict(model.named_parameters())
    moved = {n: p for n, p in named.items() if n.endswith("_proj.weight")}
    others = [p for n, p in named.items() if n not in moved]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=ADAM_EPS,
    )
    momenta = {name: np.zeros(parameter.shape) for name, parameter in moved.items()}
    for update in range(UPDATES):
        rate = 1e-3 * min((update + 1) / 2, (UPDATES - update) / (UPDATES - 2) if update >= 2 else 1.0)
        model.zero_grad()
        loss_of_samples(model, samples).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        for name, parameter in moved.items():
            gradient = parameter.grad.double().numpy()
            momenta[name] = 0.95 * momenta[name] + gradient
            change = of_singular_values(gradient + 0.95 * momenta[name]) * 0.2 * max(parameter.shape) ** 0.5
            parameter.data.mul_(1 - rate * 0.1).add_(torch.from_numpy(change).float(), alpha=-rate)
    return {name: parameter.detach().view(-1, parameter.shape[-1]) for name, parameter in named.items()}


def of_singular_values(matrix: np.ndarray) -> np.ndarray:
    """Applies some passes of the polynomial to each singular value and keeps the singular vectors."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(matrix)
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def loss_of_samples(model: torch.nn.Module, samples: dict[str, Tensor]) -> Tensor:
    """Returns the mean loss over the samples of a single replica."""
    lengths = samples["lengths"].tolist()[:8]
    starts = np.cumsum([0, *lengths])
    total, count = torch.zeros(()), 0.0
    for first, length in zip(starts, lengths, strict=False):
        tokens = samples["tokens"][first : first + length].long()
        mask = samples["response_mask"][first : first + length].float()[1:]
        logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
        total = total - (logprobs * mask).sum()
        count += float(mask.sum())
    return total / count


OFFLOADED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp2_sp", {}),
    ("tp2_pp2", {}),
    ("pp3_vpp2", {}),
    ("tp2_dp2", {"dtype": "bfloat16", "recompute": "full"}),
    ("tp2_dp2", {"recompute": {"granularity": "full", "layers": 1}}),
    ("tp2_pp2", {"recompute": {"granularity": "selective", "modules": ["core_attn", "mlp"]}}),
)


def activations(checkpoints: dict[str, str]) -> dict[str, list[Any]]:
    """Returns updates and weights with activations on the device and on the host, and the numbers of offloaded
    tensors."""
    path, seen = Path(checkpoints["qwen2_tied"]), dict[str, list[Any]]()
    groups = groups_on(GRIDS[layout] for layout, _ in OFFLOADED)
    for layout, settings in OFFLOADED:
        if dist.get_rank() not in GRIDS[layout].ranks:
            continue
        for offload in (False, True):
            with patch.object(activation_offload, "LEAST_BYTES", 0), noted_copies() as copies:
                model = load_model(path, layout, groups, activation_offload=offload, **settings)
                trainable = make_trainable(model, SEVERAL_MICRO_BATCHES)
                share = share_of(load_experience(path), layout)
                metrics = [trainable.train_batch(share, negative_log_likelihood) for _ in range(2)]
            seen.setdefault(f"{layout} {settings}", []).append([metrics, digest(model.parameters()), len(copies)])
    return seen


@contextmanager
def noted_copies() -> Iterator[list[int]]:
    """Yields the bytes of every tensor copied to the host."""
    copies: list[int] = []
    save = activation_offload.Kept.save

    def noting(kept: activation_offload.Kept, memory: DeviceMemory) -> None:
        save(kept, memory)
        assert kept._host is not None
        copies.append(kept._host.nbytes)

    with patch.object(activation_offload.Kept, "save", noting):
        yield copies
