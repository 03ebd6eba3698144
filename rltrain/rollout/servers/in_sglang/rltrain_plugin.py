"""A plugin for SGLang (group sglang.srt.plugins). With it /update_weights_from_disk accepts delta folders too.

SGLang finds it by the entry point beside this file if this folder is on the server's PYTHONPATH. Such a server reports
the delta format in /server_info. It refuses a delta to another version than its own. Needs only torch and SGLang.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import rltrain_delta_files as form
import rltrain_weight_loader
import torch
from rltrain_overlay import CannotLoad, load_changes

logger = logging.getLogger(__name__)

RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
OTHER_UPDATES = ("load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc")
AS_IN_CHECKPOINTS = (
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
    "PackWeightMethod",
    "Fp8KVCacheMethod",
)
"""Classes of layers that keep a checkpoint's elements unchanged, unless rltrain_weight_loader.py refuses them."""
OF_NO_VERSION = "its weights have no version now. Set weight_sync.delta: null to send whole checkpoints"

Outcome = tuple[bool, str]


class Served(NamedTuple):
    """The source of a model's weights: its version, and all tensors of its checkpoint."""

    version: str
    tensors: form.Listed


def register() -> None:
    """Registers the hooks. SGLang calls this entry point in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{RUNNER}.update_weights_from_disk", update_from_disk, HookType.AROUND)
    for name in OTHER_UPDATES:
        HookRegistry.register(f"{RUNNER}.{name}", forget_version, HookType.BEFORE)
    HookRegistry.register(f"{MANAGER}.release_memory_occupation", forget_released, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.get_internal_state", tell_format, HookType.AFTER)


def update_from_disk(
    original: Callable[..., Outcome], updater: Any, model_path: str, *args: Any, **named: Any
) -> Outcome:
    """Replaces SGLang's method for whole checkpoints, and applies deltas itself."""
    folder, model = Path(model_path), updater.get_model()
    if form.is_delta(folder):
        return apply_delta(updater, model, folder)
    model.rltrain_served, version = None, form.version_of(folder)
    done, said = original(updater, model_path, *args, **named)
    if done and version is not None:
        model.rltrain_served = Served(version, form.listed(folder))
    return done, said


def forget_version(updater: Any, *args: Any, **named: Any) -> None:
    """Forgets the version before weights arrive in another way."""
    updater.get_model().rltrain_served = None


def forget_released(manager: Any, *args: Any, **named: Any) -> None:
    """Forgets the version before memory is released that may hold weights."""
    forget_version(manager.tp_worker.model_runner.weight_updater)


def tell_format(result: Any, *args: Any, **named: Any) -> None:
    """Adds the delta format to the server's state if all hooks are installed."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    hooked = [getattr(WeightUpdater, name) for name in ("update_weights_from_disk", *OTHER_UPDATES)]
    hooked.append(SchedulerWeightUpdaterManager.release_memory_occupation)
    if all(hasattr(method, "__wrapped__") for method in hooked):
        result.internal_state[form.FORMAT_KEY] = form.FORMAT


def apply_delta(updater: Any, model: Any, folder: Path) -> Outcome:
    """Applies a delta that all ranks accept.

    Nothing changes if a rank refuses the delta before it is applied. If applying it fails, the weights have no version.
    Collective over: the server's tensor-parallel ranks.
    """
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    served: Served | None = getattr(model, "rltrain_served", None)
    problem, delta = None, None
    try:
        delta = _checked(updater, model, folder, served)
    except Exception as error:  # noqa: BLE001 - an exception here would end the server
        problem = _words(error)
    if _sums(group, [int(problem is not None)])[0]:
        return _refused(problem or f"another rank of the server refuses {folder}")
    assert delta is not None and served is not None, "it was checked"
    model.rltrain_served = None
    loaded: list[tuple[str, int, int]] = []
    try:
        loaded = _load(updater, model, delta, served)
    except Exception as error:  # noqa: BLE001 - as above
        problem = _words(error)
    if _sums(group, [int(problem is not None)])[0]:
        return _refused(f"{problem or f'another rank of the server failed to apply {folder}'}; {OF_NO_VERSION}")
    copied = _sums(group, [number for *_, number in loaded])
    if left := [name for (name, changed, _), number in zip(loaded, copied, strict=True) if number < changed]:
        return _refused(f"the model's loader has left out some of {left[0]}; {OF_NO_VERSION}")
    model.rltrain_served = Served(delta.version, served.tensors)
    return True, f"Applied what changed from {delta.base} to {delta.version}."


def _checked(updater: Any, model: torch.nn.Module, folder: Path, served: Served | None) -> form.Delta:
    updater._assert_weight_cache_inactive("update_weights_from_disk")
    methods = {type(method).__name__ for module in model.modules() if (method := getattr(module, "quant_method", None))}
    if other := sorted(methods.difference(AS_IN_CHECKPOINTS)):
        raise form.DeltaRefused(f"this server stores weights in other forms than a checkpoint ({', '.join(other)})")
    if refusals := rltrain_weight_loader.refusals(model):
        raise form.DeltaRefused(f"weights of this server cannot be changed in place: {refusals[0]}")
    delta = form.Delta(folder)
    described = delta.check(served and served.version)
    for name, (dtype, shape, _) in described.items():
        if served is None or served.tensors.get(name) != (dtype, shape):
            raise form.DeltaRefused(
                f"{folder} has tensor {name} of {list(shape)} as {dtype}; the served checkpoint has no such tensor"
            )
    return delta


def _load(updater: Any, model: Any, delta: form.Delta, served: Served) -> list[tuple[str, int, int]]:
    """Applies the delta. Returns (name, changed elements, elements copied on this rank) for each tensor."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    changed: dict[str, int] = {}

    def tensors() -> Iterator[form.Changed]:
        for one in delta.tensors():
            changed[one.name] = len(one.elements)
            yield one

    def others() -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        for name, (dtype, shape) in served.tensors.items():
            if name not in changed:
                yield name, dtype, shape

    device = torch.device(updater.device)
    with torch.no_grad():
        DefaultModelLoader.restore_weights_before_loading(model, device)
        counts = load_changes(model.load_weights, tensors(), others())
        DefaultModelLoader.postprocess_weights(model, device)
    return [(*one, count.copied) for one, count in zip(changed.items(), counts, strict=True)]


def _sums(group: Any, numbers: list[int]) -> list[int]:
    """Returns the sums over the server's tensor-parallel ranks."""
    told = torch.tensor(numbers, dtype=torch.int64)
    if group.world_size > 1:
        torch.distributed.all_reduce(told, group=group.cpu_group)
    found: list[int] = told.tolist()
    return found


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, form.DeltaRefused | CannotLoad) else f"{type(error).__name__}: {error}"


def _refused(why: str) -> Outcome:
    logger.error("A delta of rltrain was refused: %s", why)
    return False, why
