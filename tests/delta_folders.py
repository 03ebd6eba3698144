"""Versions of a checkpoint as whole folders and as what changed between them, as rollouts write them for servers."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.reshard.changes import changes_on
from rltrain.rollout.servers.disk_weights import encoded, write_changes
from rltrain.rollout.servers.in_sglang import rltrain_delta_files


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}


def changed_somewhat(tensors: Mapping[str, Tensor], seed: int, share: float = 0.01) -> dict[str, Tensor]:
    """Some elements, at least one of every second tensor, have other values."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        made[name] = tensor.clone()
        flat = made[name].view(-1)
        if number % 2 == seed % 2:
            places = torch.randperm(flat.numel(), generator=generator)[: max(1, int(share * flat.numel()))]
            flat[places] += torch.randn(len(places), generator=generator).to(flat.dtype)
    return made


def write_version(folder: Path, tensors: Mapping[str, Tensor], like: Path, version: str) -> Path:
    """The whole checkpoint, with what stands beside it in `like`."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    (folder / rltrain_delta_files.VERSION_FILE).write_text(rltrain_delta_files.version_text(version))
    return folder


def write_delta(
    folder: Path, old: Mapping[str, Tensor], new: Mapping[str, Tensor], base: str, version: str, num_files: int = 2
) -> Path:
    """What of `new` differs from `old`, over some files."""
    folder.mkdir(parents=True)
    names = [*new]
    files = {}
    for number in range(num_files):
        some = {name: new[name] for name in names[number::num_files]}
        kept = {name: old[name].clone() for name in some}
        if changed := encoded(changes_on(torch.device("cpu")), some, kept):
            path = folder / f"changes-{number}.delta"
            files[path.name] = write_changes(path, changed)
        assert all(torch.equal(kept[name], some[name]) for name in some), "it remembers what it has written"
    (folder / rltrain_delta_files.MANIFEST).write_text(rltrain_delta_files.manifest_text(base, version, files))
    return folder


def damage(folder: Path) -> None:
    """One bit of a file."""
    path = sorted(folder.glob("*.delta"))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    told = json.loads((folder / rltrain_delta_files.MANIFEST).read_text())["delta"]["files"]
    return {name: (num_bytes, crc32) for name, (num_bytes, crc32) in told.items()}
