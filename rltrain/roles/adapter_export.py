"""An actor's low-rank adapters beside every export of its merged weights, in the files of PEFT."""

from pathlib import Path

from rltrain.checkpoint.peft_files import replace_adapters, save_adapters
from rltrain.roles.role import Job
from rltrain.training.backend import AdaptedModel, Model


def adapters_folder(export: Path) -> Path:
    """Beside the folder of an export: transformers would put adapters within it onto what has them merged already."""
    return export.with_name(f"{export.name}_adapter")


def export_adapters(job: Job, model: Model, export: Path) -> None:
    """Of an actor with adapters. Collective over: the actor's ranks."""
    lora, grid = job.config.model.lora, job.grids["actor"]
    if lora is None or not isinstance(model, AdaptedModel):
        return
    save_adapters(
        adapters_folder(export),
        model.adapters,
        model.adapters_layout,
        job.architecture.adapted(lora.rank, lora.targets),
        lora,
        group=job.groups[grid.ranks],
        cpu_group=job.groups.cpu[grid.ranks],
        rank=job.world.rank,
        base=job.config.model.path,
    )


def keep_exported_adapters(export: Path, candidate: Path) -> None:
    """Have those of the export `candidate` be those of `export`. By one process."""
    if adapters_folder(candidate).exists():
        replace_adapters(adapters_folder(export), adapters_folder(candidate))
