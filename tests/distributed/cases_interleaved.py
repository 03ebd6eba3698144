"""The ranks of test_interleaved: models of two stages with alternating chunks, and the same models on one rank."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from tests.distributed import cases_training
from tests.support.trained_models import groups_on, load_experience

WORLD = (0, 1, 2, 3)
GRIDS = {
    "vpp2": Grid((0, 1), pp=2, vpp=2),
    "vpp2_uneven": Grid((2, 3), pp=2, vpp=2, layers_per_stage=(2, 0, 1, 1)),
    "vpp4_dp2": Grid(WORLD, pp=2, vpp=4, layers_per_stage=(0, 1, 1, 0, 1, 0, 1, 0)),
    "vpp2_tp2": Grid(WORLD, tp=2, pp=2, vpp=2),
    "vpp2_cp2": Grid(WORLD, pp=2, vpp=2, cp=2),
    "vpp2_cp2_ep2": Grid(WORLD, pp=2, vpp=2, cp=2, ep=2),
}
MICRO_BATCH_TOKENS = (60, 10_000)
"""12 samples make 6 or 2 micro-batches, in rounds of two."""
NUM_STEPS = 2


def trained(checkpoints: dict[str, str], layouts: dict[str, list[str]]) -> dict[str, Any]:
    """Returns by checkpoint/layout/micro-batch tokens the reports of steps and the log-probs after them."""
    groups = groups_on([*GRIDS.values(), Grid((0,))])
    results: dict[str, Any] = {}
    with mock.patch.dict(cases_training.GRIDS, GRIDS):
        for name, path in checkpoints.items():
            if dist.get_rank() == 0:
                results[f"{name}/alone"] = _train(Path(path), "rank0", groups, 10_000)
            for layout in layouts[name]:
                for tokens in MICRO_BATCH_TOKENS:
                    if dist.get_rank() in GRIDS[layout].ranks:
                        results[f"{name}/{layout}/{tokens}"] = _train(Path(path), layout, groups, tokens)
    return results


def recomputed(checkpoint: str, layout: str, layers: int) -> dict[str, Any]:
    """Trains one step with `layers` layers of a chunk recomputed.

    Returns the number of forward runs of this rank's layers, by layer in the whole model, and the number of
    micro-batches.
    """
    groups = groups_on([GRIDS[layout]])
    if dist.get_rank() not in GRIDS[layout].ranks:
        return {}
    recompute = {"granularity": "full", "layers": layers}
    with mock.patch.dict(cases_training.GRIDS, GRIDS):
        model = cases_training.load_model(Path(checkpoint), layout, groups, recompute=recompute)
        trainable = cases_training.make_trainable(model, max_tokens=MICRO_BATCH_TOKENS[0])
        share = cases_training.share_of(load_experience(Path(checkpoint)), layout)
        runs: Counter[int] = Counter()
        for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
            layer.register_forward_hook(lambda layer, *_: runs.update([layer.layer_number - 1]))
        trainable.train_batch(share, cases_training.negative_log_likelihood)
        num_micro_batches = len(model.micro_batches(share, MICRO_BATCH_TOKENS[0]))
    return {"runs": {str(layer): count for layer, count in runs.items()}, "micro_batches": num_micro_batches}


def _train(path: Path, layout: str, groups: ProcessGroups, max_tokens: int) -> dict[str, Any]:
    model = cases_training.load_model(path, layout, groups)
    trainable = cases_training.make_trainable(model, max_tokens=max_tokens)
    experience = load_experience(path)
    share = cases_training.share_of(experience, layout)
    steps = [trainable.train_batch(share, cases_training.negative_log_likelihood) for _ in range(NUM_STEPS)]
    return {"steps": steps, "after": trainable.evaluate(experience, max_tokens=max_tokens).tolist()}
