"""Simulates weight updates of an SGLang server: its sessions, its unpickler, and rltrain's weight loader on one torch
module per tensor-parallel rank."""

import base64
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rltrain.reshard.layout import Layout
from rltrain.rollout.servers.in_sglang import rltrain_weight_loader as loader
from rltrain.rollout.servers.sglang_weights import LOADER, fields_of
from tests.support.sglang_server import Refused, ServerRules

NOISE = -5.0
"""Value of all weights in a server that has read no checkpoint."""


class OnlyTensor(pickle.Unpickler):
    """An unpickler like SGLang's, but stricter: it allows no name except torch.Tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("torch", "Tensor"):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return torch.Tensor


def unpickled(text: str) -> list[tuple[str, Tensor]]:
    return OnlyTensor(io.BytesIO(base64.b64decode(text))).load()


class Model(torch.nn.Module):
    """A module with parameters by dotted names, filled with NOISE. Counts its post-load steps."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.num_post_loads = 0
        self.sum_at_post_load = 0.0
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))

    def post_load_weights(self) -> None:
        self.num_post_loads += 1
        self.sum_at_post_load = float(sum(parameter.float().sum() for parameter in self.parameters()))

    @property
    def held(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.named_parameters()}


def model_of(layout: Layout, rank: int) -> Model:
    return Model({field.name: torch.full(field.shape, NOISE).to(field.dtype) for field in fields_of(layout, rank)})


class LoadingServer:
    """A simulated server. `call` has the signature of a Delivery's.

    The server dies in the call with number `dies_at`, counted from 0. `before_load` is called with every load message,
    before the loader.
    """

    def __init__(self, *models: Model, dies_at: int | None = None) -> None:
        self.models = models
        self.dies_at = dies_at
        self.calls: list[str] = []
        self.rules = ServerRules()
        self.before_load: Callable[[], None] = lambda: None
        self.runs_loader = True

    @property
    def version(self) -> str:
        return self.rules.version

    @property
    def is_open(self) -> bool:
        return self.rules.is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self.rules.is_open = is_open

    def call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        number = len(self.calls)
        self.calls.append(path)
        if self.dies_at is not None and number >= self.dies_at:
            if number == self.dies_at and path == "/update_weights_from_tensor" and body is not None:
                self._load(body, self.models[:1])  # only its first rank loads the part
            raise ConnectionResetError("connection reset by peer")
        if path == "/model_info":
            assert body is None
            return {"weight_version": self.version}
        assert body is not None
        try:
            getattr(self, path.strip("/"))(body)
        except Refused as refused:
            return {"success": False, "message": str(refused)}
        return {"success": True, "message": "Success"}

    def begin_weight_update(self, body: dict[str, Any]) -> None:
        assert body == {"selector": "target"}
        self.rules.begin_update("target", is_idle=True)

    def update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        self.rules.update(body.get("weight_version"), is_idle=True)
        self.load(body)

    def end_weight_update(self, body: dict[str, Any]) -> None:
        assert body == {}
        self.rules.end_update(is_idle=True)

    def load(self, body: dict[str, Any]) -> None:
        """Handles a message of weights as SGLang's schedulers do."""
        assert body["load_format"] == LOADER and body["flush_cache"] is False and body["selector"] == "target"
        self._load(body, self.models)

    def _load(self, body: dict[str, Any], models: tuple[Model, ...]) -> None:
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == len(self.models), "one per tensor-parallel rank"
        self.before_load()
        for model, text in zip(models, payloads, strict=False):
            if self.runs_loader:
                loader.load(model, unpickled(text))
