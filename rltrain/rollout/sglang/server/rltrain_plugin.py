"""A plugin of SGLang's (group sglang.srt.plugins): /update_weights_from_disk takes folders of what changed as well.

SGLang finds it by the entry point beside this file, where this folder is on the server's PYTHONPATH. A server that has it
says so in /server_info, and refuses a delta of another version than its weights are of. Needs torch and SGLang alone.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import rltrain_weight_loader
import torch
from rltrain_delta_files import FORMAT, FORMAT_KEY, Changed, Delta, DeltaRefused, is_delta, version_of
from rltrain_overlay import CannotLoad, load_changes

logger = logging.getLogger(__name__)

RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
OTHER_UPDATES = ("load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc")
UNQUANTISED = (
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
    "PackWeightMethod",
    "Fp8KVCacheMethod",
)
"""How layers keep what a checkpoint has, element by element; what they add is not in it."""

Outcome = tuple[bool, str]


def register() -> None:
    """The entry point: SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{RUNNER}.update_weights_from_disk", update_from_disk, HookType.AROUND)
    for name in OTHER_UPDATES:
        HookRegistry.register(f"{RUNNER}.{name}", forget_version, HookType.BEFORE)
    HookRegistry.register(f"{MANAGER}.release_memory_occupation", forget_released, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.get_internal_state", tell_format, HookType.AFTER)


def update_from_disk(original: Callable[..., Outcome], updater: Any, model_path: str, *args: Any, **named: Any) -> Outcome:
    """In the place of SGLang's, which loads whole checkpoints."""
    folder, model = Path(model_path), updater.get_model()
    if is_delta(folder):
        return _apply(updater, model, folder)
    model.rltrain_version = None
    done, said = original(updater, model_path, *args, **named)
    if done:
        model.rltrain_version = version_of(folder)
    return done, said


def forget_version(updater: Any, *args: Any, **named: Any) -> None:
    """Before weights come by another way: nobody here knows which."""
    updater.get_model().rltrain_version = None


def forget_released(manager: Any, *args: Any, **named: Any) -> None:
    """Before memory is given up that weights may lie in."""
    forget_version(manager.tp_worker.model_runner.weight_updater)


def tell_format(result: Any, *args: Any, **named: Any) -> None:
    """To whoever asks for the server's state, if all hooks are where they belong."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    hooked = [getattr(WeightUpdater, name) for name in ("update_weights_from_disk", *OTHER_UPDATES)]
    hooked.append(SchedulerWeightUpdaterManager.release_memory_occupation)
    if all(hasattr(method, "__wrapped__") for method in hooked):
        result.internal_state[FORMAT_KEY] = FORMAT


def _apply(updater: Any, model: torch.nn.Module, folder: Path) -> Outcome:
    """Nothing has changed where it is refused by any of the server's ranks before it is applied; where that fails, the
    weights are of no version."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    held, problem, delta = getattr(model, "rltrain_version", None), None, None
    try:
        delta = _checked(updater, model, folder, held)
    except Exception as error:  # noqa: BLE001 - an exception here would end the server
        problem = _words(error)
    if _sums(group, [problem is not None])[0]:
        return _refused(problem or f"another rank of the server refuses {folder}")
    assert delta is not None, "there is no problem"
    model.rltrain_version = None  # type: ignore[assignment]
    changed, copied = [0], [0]
    try:
        changed, copied = _load(updater, model, delta)
    except Exception as error:  # noqa: BLE001 - as above
        problem = _words(error)
    if _sums(group, [problem is not None])[0]:
        return _refused(f"{problem or f'another rank of the server failed to apply {folder}'}; its weights are of no version now")
    if any(had < wanted for had, wanted in zip(_sums(group, copied), changed, strict=True)):
        return _refused(f"the model's loader has left out some of {folder}; its weights are of no version now")
    model.rltrain_version = delta.version  # type: ignore[assignment]
    return True, f"Applied what changed from {delta.base} to {delta.version}."


def _checked(updater: Any, model: torch.nn.Module, folder: Path, held: str | None) -> Delta:
    updater._assert_weight_cache_inactive("update_weights_from_disk")
    methods = {type(method).__name__ for module in model.modules() if (method := getattr(module, "quant_method", None))}
    if other := sorted(methods.difference(UNQUANTISED)):
        raise DeltaRefused(f"this server keeps weights in other forms than a checkpoint has ({', '.join(other)})")
    if refusals := rltrain_weight_loader.refusals(model):
        raise DeltaRefused(f"weights of this server cannot be changed in place: {refusals[0]}")
    delta = Delta(folder)
    delta.check(held)
    return delta


def _load(updater: Any, model: torch.nn.Module, delta: Delta) -> tuple[list[int], list[int]]:
    """(elements that changed, elements that were copied on this rank) of each tensor."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    changed: list[int] = []

    def tensors() -> Iterable[Changed]:
        for one in delta.tensors():
            changed.append(len(one.elements))
            yield one

    device = torch.device(updater.device)
    with torch.no_grad():
        DefaultModelLoader.restore_weights_before_loading(model, device)
        load: Any = model.load_weights
        counts = load_changes(load, tensors())
        DefaultModelLoader.postprocess_weights(model, device)
    return changed, [count.copied for count in counts]


def _sums(group: Any, numbers: list[int] | list[bool]) -> list[int]:
    """Over the tensor-parallel ranks of the server."""
    told = torch.tensor([int(number) for number in numbers], dtype=torch.int64)
    if group.world_size > 1:
        torch.distributed.all_reduce(told, group=group.cpu_group)
    found: list[int] = told.tolist()
    return found


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, DeltaRefused | CannotLoad) else f"{type(error).__name__}: {error}"


def _refused(why: str) -> Outcome:
    logger.error("A delta of rltrain was refused: %s", why)
    return False, why
