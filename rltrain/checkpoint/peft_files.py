"""Low-rank adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rltrain.checkpoint.hf_reader import within, write_piece
from rltrain.config.models import Lora
from rltrain.errors import CheckpointError
from rltrain.models import Architecture
from rltrain.models.config_file import parse_object
from rltrain.models.lora import PEFT_PREFIX, WEIGHT, A, B, is_of_tower, module_of, target_of
from rltrain.models.table import NESTED_PREFIX, CanonicalTensors
from rltrain.reshard.execute import execute
from rltrain.reshard.layout import Layout, hf_layout
from rltrain.reshard.plan import plan
from rltrain.runtime.whole_files import make_empty, partial_of, put_in_place

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
CONFIG_KEY = "config key model.lora.path"
BUCKET_BYTES = 32 * 2**20
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "target_parameters": ([], None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": ([], None),
}
"""The supported settings of adapters, by PEFT's keys. Other values mean another computation. A missing key is None."""
TOWER_MODULES = r".*\.visual\..*"
"""PEFT's expression for the modules of a vision tower."""
SAVED_WHOLE = "modules_to_save"
"""PEFT's key for layers trained beside adapters, such as the head of a value model."""


@torch.no_grad()
def load_adapters(path: Path, layout: Layout, rank: int, parameters: Mapping[str, Tensor], settings: Lora) -> None:
    """Fills `parameters` of `rank` in the adapters' `layout` from PEFT's files in the folder `path`. Adapters of
    matrices not chosen by `settings` become zero. A head of scores keeps its values if the files have none.

    Raises CheckpointError if a file is missing or damaged, or if its settings or adapters differ from `settings`.
    """
    names, heads = trained_adapters(layout.tensors, settings), _heads(layout.tensors)
    _check_config(path, {target_of(name) for name in names}, heads, settings)
    mine = layout.on(rank)
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    try:
        with safe_open(path / WEIGHTS_FILE, framework="pt") as opened:
            names |= {head for head in heads if _stored_name(head) in opened.keys()}  # noqa: SIM118
            _check_tensors(path, opened, layout.tensors, names)
            for piece in mine.pieces:
                if layout.tensors.names[piece["tensor"]] not in heads:
                    flats[piece["parameter"]].zero_()
            for piece in mine.pieces:
                if (name := layout.tensors.names[piece["tensor"]]) in names:
                    write_piece(flats, piece, opened.get_slice(_stored_name(name))[within(piece)])
    except FileNotFoundError:
        raise CheckpointError(f"{path / WEIGHTS_FILE} does not exist ({CONFIG_KEY})") from None
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path / WEIGHTS_FILE} is damaged or cut short: {problem} ({CONFIG_KEY})") from None


def trained_adapters(tensors: CanonicalTensors, settings: Lora) -> set[str]:
    """Returns the names of the trained adapters."""
    adapters = {name for name in tensors.names if name.endswith((A, B))}
    return {name for name in adapters if settings.targets is None or target_of(name) in settings.targets}


def _heads(tensors: CanonicalTensors) -> set[str]:
    """Returns the names of tensors trained beside adapters. Only a value model has one, its head."""
    return {name for name in tensors.names if not name.endswith((A, B))}


def _stored_name(name: str) -> str:
    """Returns the name of a layout's tensor in PEFT's files."""
    return name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name


def _check_config(path: Path, targets: set[str], heads: set[str], settings: Lora) -> None:
    file = path / CONFIG_FILE
    try:
        found = parse_object(file.read_text(encoding="utf-8"), file, "model.lora.path")
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; expected a folder of PEFT's ({CONFIG_KEY})") from None
    except (ValueError, OSError) as problem:
        raise CheckpointError(f"{file} cannot be read: {problem} ({CONFIG_KEY})") from None
    if found.get(SAVED_WHOLE) == _saved_whole(heads):
        found |= {SAVED_WHOLE: None}
    problems = list(_differences(found, targets, settings))
    if problems:
        raise CheckpointError(f"{file}: {'; '.join(problems)} ({CONFIG_KEY})")


def _differences(found: Mapping[str, Any], targets: set[str], settings: Lora) -> Iterator[str]:
    for key, plain in PLAIN.items():
        if found.get(key) not in plain:
            yield f"{key} is {found.get(key)!r}; expected {plain[0]!r}, the only supported value"
    for key, name, own in (("r", "rank", settings.rank), ("lora_alpha", "alpha", settings.alpha)):
        if found.get(key) != own:
            yield f"{key} is {found.get(key)}, but model.lora.{name} is {own}; set it to the same"
    named = found.get("target_modules")
    if not isinstance(named, list) or {str(target).rpartition(".")[2] for target in named} != targets:
        yield f"target_modules is {named}, but model.lora.targets comes to {sorted(targets)}; set it to the same"


def _check_tensors(path: Path, opened: Any, tensors: CanonicalTensors, names: set[str]) -> None:
    shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
    expected = {_stored_name(name): tensors.shapes[tensors.numbers[name]] for name in names}
    differing = sorted({name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)})
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"{path / WEIGHTS_FILE} has other tensors than the adapters of model.lora: {len(differing)} differ, such "
            f"as {first} with shape {shapes.get(first)}; expected {expected.get(first)} ({CONFIG_KEY})"
        )


def save_adapters(
    directory: Path,
    source_tensors: Mapping[str, Tensor],
    source_layout: Layout,
    architecture: Architecture,
    settings: Lora,
    *,
    group: dist.ProcessGroup | None,
    cpu_group: dist.ProcessGroup | None = None,
    rank: int,
    base: str,
) -> None:
    """Writes the adapters into the folder `directory` in PEFT's format, for the checkpoint `base`. Replaces earlier
    adapters. `architecture` is the adapters'. `source_tensors` are this rank's in `source_layout`.

    The first rank writes. Raises CheckpointError if this fails. Collective over: the ranks of `source_layout`.
    """
    first = source_layout.ranks[0]
    dtype = next((tensor.dtype for tensor in source_tensors.values()), torch.float32)
    target = hf_layout(architecture, (first,), dtype=str(dtype).removeprefix("torch."))
    device = next((tensor.device for tensor in source_tensors.values()), torch.device("cpu"))
    whole = None
    if rank == first:
        whole = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in target.on(rank).parameters}
    sync = plan(source_layout, target, rank, max(source_layout.ranks) + 1)
    execute(sync, source_tensors, whole, group=group, cpu_group=cpu_group, bucket_bytes=BUCKET_BYTES)
    if whole is not None:
        heads = _heads(target.tensors)
        names = sorted(trained_adapters(target.tensors, settings) | heads)
        _write(directory, {_stored_name(name): whole[name].cpu() for name in names}, heads, settings, base)
    if group is not None:
        dist.barrier(group)


def _saved_whole(heads: Collection[str]) -> list[str]:
    return sorted(name.removesuffix(WEIGHT) for name in heads)


def _write(directory: Path, tensors: Mapping[str, Tensor], heads: set[str], settings: Lora, base: str) -> None:
    partial = partial_of(directory)
    try:
        make_empty(partial)
        write_files(partial, tensors, settings, base, heads)
        replace_adapters(directory, partial)
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{directory} cannot be written: {problem} (config key output_dir)") from None


def write_files(
    folder: Path, tensors: Mapping[str, Tensor], settings: Lora, base: str, heads: Collection[str] = ()
) -> None:
    """Writes `tensors`, by their names in PEFT's files, into `folder` for the checkpoint `base`. `heads` are the
    layers' names of heads among them. Raises OSError or SafetensorError."""
    adapters = [name for name in tensors if name.endswith((A, B))]
    targets = sorted({module_of(name) for name in adapters})
    sees = any(name.startswith(PEFT_PREFIX + NESTED_PREFIX) for name in adapters)
    lacks_tower = sees and not any(map(is_of_tower, adapters))
    plain = {key: values[-1] if values[0] in ({}, []) else values[0] for key, values in PLAIN.items()}
    config = {
        **plain,
        "base_model_name_or_path": base,
        "task_type": "SEQ_CLS" if heads else "CAUSAL_LM",
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "rank_pattern": {},
        "alpha_pattern": {},
        **({"exclude_modules": TOWER_MODULES} if lacks_tower else {}),
        **({SAVED_WHOLE: _saved_whole(heads)} if heads else {}),
    }
    save_file(dict(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt", "written_by": "rltrain"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def replace_adapters(directory: Path, saved: Path) -> None:
    """Replaces `directory` by `saved`, a folder next to it. Only one process may call it. Raises CheckpointError if
    `directory` has more than adapters."""
    if directory.exists() and {path.name for path in directory.iterdir()} - {CONFIG_FILE, WEIGHTS_FILE}:
        raise CheckpointError(
            f"{directory} exists and is not just adapters that an earlier job wrote, so it is not replaced. Move "
            "it away or set another folder (config key output_dir)"
        )
    put_in_place(saved, directory, replaces=True)
