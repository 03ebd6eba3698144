"""What a node says of itself at the start of a job, for `refuse_unlike_nodes`."""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rltrain.cluster.nodes import Spoken
from rltrain.cluster.world import World
from rltrain.config.schema import Config
from rltrain.preflight.disks import problems_of_disks, problems_of_shared_memory
from rltrain.tasks.roles import served_roles

PACKAGE = Path(__file__).resolve().parents[1]
COMPARED_PACKAGES = ("torch", "megatron-core", "transformers", "numpy")
SLURM_NODE = "SLURM_NODEID"


def of_program(config: Config, world: World) -> Spoken:
    """Code, versions, config, and the number of ranks."""
    return Spoken(
        {
            "number of ranks (torchrun's --nproc-per-node)": str(world.ranks_per_node),
            f"code of {PACKAGE.name}": digest_of_code(PACKAGE),
            **versions(),
            **{f"config key {key}": value for key, value in flattened(config.model_dump(mode="json"))},
        }
    )


def of_machine(config: Config, world: World, model_paths: Mapping[str, str]) -> Spoken:
    """Folders and memory. `model_paths`: config key -> where a checkpoint is to be read, on this node."""
    there = {f"{key}: {path}": "there" if Path(path).exists() else "missing" for key, path in model_paths.items()}
    folders = {"output_dir": config.output_dir}
    if config.checkpoint.saves:
        folders["checkpoint.dir"] = config.checkpoint_dir
    if config.checkpoint.memory:
        folders["checkpoint.memory.folder"] = os.path.expandvars(config.checkpoint.memory.folder)
    problems = [*problems_of_disks(folders)]
    engines = {config.served(role).engine for role in served_roles() if role in config.placed_roles}
    if (world.device.type == "cuda" and world.ranks_per_node > 1) or "sglang" in engines:
        problems += problems_of_shared_memory()
    return Spoken(there, problems)


def slurm_node() -> int | None:
    """The number that Slurm gives this node in its list; None without Slurm."""
    number = os.environ.get(SLURM_NODE, "")
    return int(number) if number.isdecimal() else None


def versions() -> dict[str, str]:
    """Of what decides numbers and messages. Empty for what is not installed."""
    found = {"version of Python": platform.python_version()}
    for name in COMPARED_PACKAGES:
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["version of CUDA"] = str(torch.version.cuda)
        found["version of NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@cache
def digest_of_code(folder: Path) -> str:
    """Of every Python file in `folder`, its name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as JSON)."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, sort_keys=True)
