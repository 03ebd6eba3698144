"""A role's model on the role's device, wherever a library made its tensors.

megatron-core makes the weights of routers and of shared experts' gates on the CPU, transformers the frequencies of
rotary embeddings. Code that builds models moves them once, before anything refers to their memory.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of torch's modules whose entries have names of their own."""
OWN_PACKAGES = ("rltrain", "megatron")
"""Objects of their classes are searched for tensors. In other packages' modules only registered tensors and plain
attributes count."""


def move_to_device(module: torch.nn.Module, device: torch.device) -> None:
    """Moves parameters, buffers and tensors that are plain attributes of modules. Parameters stay the same objects.

    Parameters without memory, on torch's meta device, stay without. To be called before data parallelism or an
    optimizer takes the parameters over.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(moved)
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, moved(value))


def check_device(
    holder: object, device: torch.device, *, parameters: torch.device | None = None, on_host: Collection[str] = ()
) -> None:
    """Raises RuntimeError where a tensor that `holder` reaches is not on `device`, the device of its role.

    `parameters` is where the model's parameters belong, if that is another device. Attributes named in `on_host` may
    be anywhere.
    """
    misplaced = [
        (name, tensor)
        for name, tensor in named_tensors(holder)
        if not is_on(tensor, parameters if parameters and isinstance(tensor, torch.nn.Parameter) else device)
        and name.rpartition(".")[2] not in on_host
    ]
    if misplaced:
        name, tensor = misplaced[0]
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        others = f" So are {len(misplaced) - 1} more." if len(misplaced) > 1 else ""
        raise RuntimeError(
            f"{kind} {name} of a model is on {tensor.device}, and the device of its role is {device}.{others} "
            "This is a fault in rltrain: please report it with the model's config.json"
        )


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether `tensor` is on `device`; a device without a number means any of its kind."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def named_tensors(holder: object) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor that `holder` reaches once, with the attributes that lead to it.

    Searches modules, containers and objects of OWN_PACKAGES in breadth, so names are the shortest.
    """
    waiting, seen = deque([("", holder)]), {id(holder)}
    while waiting:
        name, value = waiting.popleft()
        if isinstance(value, Tensor):
            yield name, value
            continue
        for key, entry in _entries(value):
            if id(entry) not in seen:
                seen.add(id(entry))
                own = "" if key in REGISTERED else key
                waiting.append((f"{name}.{own}" if name and own else name or own, entry))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), entry) for key, entry in value.items())
    elif isinstance(value, list | tuple | set | deque):
        yield from ((str(number), entry) for number, entry in enumerate(value))
    elif type(value).__module__.partition(".")[0] in OWN_PACKAGES:
        yield from getattr(value, "__dict__", {}).items()
    elif isinstance(value, torch.nn.Module):
        yield from ((key, entry) for key, entry in vars(value).items() if key in REGISTERED or torch.is_tensor(entry))
