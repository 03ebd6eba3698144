"""States of a process's random number generators, for what a user's code may draw: the product's own needs none."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> tuple[dict[str, Tensor], str]:
    """(torch's states by name, Python's and numpy's as JSON)."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numpy_state["state"] = {"key": numpy_state["state"]["key"].tolist(), "pos": numpy_state["state"]["pos"]}
    return tensors, json.dumps({"python": random.getstate(), "numpy": numpy_state})


def set_random_states(tensors: Mapping[str, Tensor], text: str, device: torch.device) -> None:
    """The inverse of `random_states`; a device of another kind keeps its own."""
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    states = json.loads(text)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = states["numpy"]
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
