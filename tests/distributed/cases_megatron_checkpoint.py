"""The ranks of test_megatron_checkpoint: megatron-core loads checkpoints written by rltrain, and writes others."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import queue
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async

from rltrain.models import Architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.model import LanguageModel, local_parameters
from tests.support.checkpoint_files import ARCHITECTURES, ITERATION
from tests.support.trained_models import groups_on, megatron_model

ALL = (0, 1, 2, 3)
GRIDS = {
    "dp4": Grid(ALL),
    "tp2": Grid(ALL, tp=2),
    "pp2": Grid(ALL, pp=2),
    "tp2_pp2": Grid(ALL, tp=2, pp=2),
    "ep2": Grid(ALL, ep=2),
    "tp2_ep4_etp1": Grid(ALL, tp=2, ep=4, etp=1),
    "pp2_ep2": Grid(ALL, pp=2, ep=2),
}
FUSED_NORMS = {
    False: {"input_layernorm.": "self_attention.linear_qkv."},
    True: {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
    },
}
"""The norms fused into Transformer Engine's linear layers, by whether attention is latent."""


QUEUE = next(
    name for name in ("get_write_results_queue", "_get_write_results_queue") if hasattr(filesystem_async, name)
)
"""Megatron's function is public since 0.19."""


def load_and_save(folder: str, layouts: dict[str, list[str]], save_as: str) -> dict[str, Any]:
    """Compares checkpoints loaded by megatron-core with rltrain's.

    Returns by "checkpoint/layout" the parameters that differ between megatron-core's load and load_parameters. Returns
    by checkpoint the keys and global shapes of megatron-core's tensors, and the keys of other objects. Its own layers
    have empty extra states too. The model in the last layout of each checkpoint is written by megatron-core to its
    folder `save_as`.
    """
    groups = groups_on(GRIDS.values())
    results: dict[str, Any] = {}
    for name, names_of_layouts in layouts.items():
        path = Path(folder, name)
        for layout in names_of_layouts:
            model = _model(path, name, GRIDS[layout], groups)
            expected = {key: tensor.detach().clone() for key, tensor in local_parameters(model).items()}
            _load(model, path / "megatron" / f"iter_{ITERATION:07d}", GRIDS[layout], groups)
            results[f"{name}/{layout}"] = [
                key for key, tensor in local_parameters(model).items() if not torch.equal(tensor, expected[key])
            ]
        results[name] = _save(model, path / save_as, GRIDS[layout], groups)
    return results


def _model(path: Path, name: str, grid: Grid, groups: ProcessGroups) -> LanguageModel:
    return megatron_model(path / "hf", grid, groups, architecture=ARCHITECTURES[name])


def _load(model: LanguageModel, folder: Path, grid: Grid, groups: ProcessGroups) -> None:
    """Loads as Megatron-LM does, after overwriting every weight with NaN."""
    for tensor in local_parameters(model).values():
        tensor.detach().fill_(float("nan"))
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    sharded = _sharded_state_dict(model, metadata, grid, groups)
    loaded = dist_checkpointing.load({"model": sharded}, str(folder))
    model.chunks[0].load_state_dict(loaded["model"])


def _save(model: LanguageModel, folder: Path, grid: Grid, groups: ProcessGroups) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    metadata = {"non_homogeneous_layers": model.architecture.moe is not None}
    sharded = _sharded_state_dict(model, metadata, grid, groups)
    with (
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        # The default queue belongs to a server process. It outlives the ranks and holds the pipes of the test.
        mock.patch.object(filesystem_async, QUEUE, queue.Queue),
        mock.patch.object(filesystem_async, "_process_memory", lambda: 0),  # it needs psutil
    ):
        dist_checkpointing.save({"model": sharded, "args": None, "iteration": ITERATION}, str(folder))
    apply_factories(sharded)
    held = list(nested_values(sharded))
    return {
        "tensors": {tensor.key: list(tensor.global_shape) for tensor in held if isinstance(tensor, ShardedTensor)},
        "objects": [item.unique_key for item in held if isinstance(item, ShardedObject)],
    }


def _sharded_state_dict(
    model: LanguageModel, metadata: dict[str, Any], grid: Grid, groups: ProcessGroups
) -> ShardedStateDict:
    """Returns Transformer Engine's keys for megatron-core's local modules.

    Megatron's models leave out the empty extra state of the output layer.
    """
    replica = grid.coordinates(dist.get_rank()).dp
    with mock.patch.object(parallel_state, "get_data_parallel_rank", lambda **unused: replica):
        sharded = model.chunks[0].sharded_state_dict(metadata={**metadata, "dp_cp_group": model.pg_collection.dp_cp})
    sharded.pop("output_layer._extra_state", None)
    for tensor in sharded.values():
        tensor.key = _with_te_names(model.architecture, tensor.key)
    return sharded


def _with_te_names(architecture: Architecture, key: str) -> str:
    """Returns `key` of a local module with the names of Transformer Engine's fused layer norms."""
    numbered = re.match(r"decoder\.layers\.(\d+)\.", key)
    sparse = numbered is not None and architecture.sparse_layers[int(numbered[1])]
    for own, fused in (
        FUSED_NORMS[architecture.mla is not None] | ({} if sparse else {"pre_mlp_layernorm.": "mlp.linear_fc1."})
    ).items():
        key = re.sub(rf"(decoder\.layers\.(?:\d+\.)?){re.escape(own)}", rf"\1{fused}layer_norm_", key)
    return key
