"""The programs for SGLang's Python, on stand-ins for the modules of SGLang that they import."""

import argparse
import gc
import importlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from rltrain.rollout.servers.in_sglang import rltrain_delta_files as delta_files
from rltrain.rollout.servers.in_sglang import rltrain_weight_loader as loader
from rltrain.rollout.servers.in_sglang.rltrain_overlay import CannotLoad, Count, Overlay, load_changes
from rltrain.rollout.servers.sglang_process import SERVER_FOLDER


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Returns sglang(name, **contents). It makes a module of SGLang with these contents importable."""
    monkeypatch.syspath_prepend(SERVER_FOLDER)

    def provide(name: str, **contents: Any) -> ModuleType:
        parts = f"sglang.{name}".split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        vars(sys.modules[f"sglang.{name}"]).update(contents)
        return sys.modules[f"sglang.{name}"]

    return provide


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undoes what the programs change for their whole process."""
    factory, pin_memory = logging.getLogRecordFactory(), torch.Tensor.pin_memory
    yield
    logging.setLogRecordFactory(factory)
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
    gc.enable()


class ServerArgs:
    """Some arguments of SGLang's server."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int)
        parser.add_argument("--attention-backend", choices=["fa3", "triton"])
        parser.add_argument("--device")


def with_arguments(sglang: Callable[..., ModuleType]) -> ModuleType:
    sglang("version", __version__="0.5.23")
    sglang(
        "srt.server_args",
        ServerArgs=ServerArgs,
        prepare_server_args=lambda argv: SimpleNamespace(argv=argv, api_key=None, admin_api_key=None),
    )
    return importlib.import_module("rltrain_arguments")


@pytest.mark.parametrize(
    ("given", "fields", "problem"),
    [
        ({"tp_size": 2, "nothing": 1}, {"tp_size": "tp_size"}, None),
        ({"tensor_parallel_size": "two"}, {"tensor_parallel_size": "tp_size"}, "invalid int value: 'two'"),
        ({"attention_backend": "fa9"}, {"attention_backend": "attention_backend"}, "invalid choice: 'fa9'"),
    ],
)
def test_arguments_are_checked_by_sglangs_own_parser(
    sglang: Callable[..., ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
    fields: dict[str, str],
    problem: str | None,
) -> None:
    arguments = with_arguments(sglang)
    monkeypatch.setattr(sys, "argv", ["rltrain_arguments.py", json.dumps(given)])
    arguments.main()
    reply = json.loads(capsys.readouterr().out)
    assert (reply["version"], reply["fields"]) == ("0.5.23", fields)
    assert {"model_path", "model", "tp_size", "tensor_parallel_size", "attention_backend"} <= set(reply["names"])
    assert reply["problem"] is None if problem is None else problem in reply["problem"]


def test_without_sglang_the_reason_is_told(sglang: Callable[..., ModuleType]) -> None:
    sglang("version", __version__="0.5.23")
    reply = importlib.import_module("rltrain_arguments").check({"tp_size": 2})
    assert reply == {"missing": "ModuleNotFoundError: No module named 'sglang.srt'; 'sglang' is not a package"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_server_starts_with_the_last_arguments_and_the_token(
    sglang: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    with_arguments(sglang)
    started: list[Any] = []
    sglang("srt.entrypoints.http_server", launch_server=lambda args, **more: started.append((args, more)))
    prepare = lambda *_: None  # noqa: E731
    engine = sglang("srt.entrypoints.engine", _set_envs_and_config=prepare)
    sglang("srt.plugins", load_plugins=lambda: started.append("plugins"))
    serve = importlib.import_module("rltrain_serve")
    monkeypatch.setenv(serve.TOKEN_VARIABLE, "secret")
    given = {
        "defaults": {"tp_size": 1, "attention_backend": "triton"},
        "args": {"attention_backend": "fa3"},
        "own": {"model_path": "/m", "tensor_parallel_size": 2, "device": device},
    }
    monkeypatch.setattr(sys, "argv", ["rltrain_serve.py", json.dumps(given)])
    serve.main()
    plugins, (args, more) = started
    assert plugins == "plugins", "before the arguments are read"
    assert sorted(args.argv) == [
        "--attention-backend=fa3",
        f"--device={device}",
        "--model-path=/m",
        "--tensor-parallel-size=2",
    ]
    assert args.api_key == args.admin_api_key == "secret" and serve.TOKEN_VARIABLE not in serve.os.environ
    assert more == {"run_scheduler_process_func": serve.run_scheduler}
    assert (engine._set_envs_and_config is prepare) == (device == "cuda"), "processes are forked on CPUs"
    assert gc.isenabled()


class LoRAManager:
    def __init__(self, model: Any) -> None:
        self.base_model = model
        self.has_places = False

    def init_memory_pool(self) -> None:
        self.has_places = True


@pytest.mark.parametrize(("device", "enable_lora"), [("cpu", True), ("cpu", False), ("cuda", True), ("cuda", False)])
def test_a_scheduler_without_a_gpu_pins_nothing_and_its_model_knows_the_adapters(
    sglang: Callable[..., ModuleType], device: str, enable_lora: bool
) -> None:
    ran: list[tuple[Any, ...]] = []
    sglang("srt.managers.scheduler", run_scheduler_process=lambda *args: ran.append(args))
    rotary = sglang("srt.layers.rotary_embedding.base", _is_cpu=False)
    pinned = lambda size, pin_memory: (size, pin_memory)  # noqa: E731
    common = sglang("srt.mem_cache.pool_host.common", ALLOC_MEMORY_FUNCS={}, alloc_with_pin_memory=pinned)
    layers = sglang("srt.lora.layers", torch=torch)
    backend = sglang("srt.lora.backend.torch_backend", torch=torch)
    manager_class = type("LoRAManager", (LoRAManager,), {})
    sglang("srt.lora.lora_manager", LoRAManager=manager_class)
    server_args = SimpleNamespace(device=device, enable_lora=enable_lora)
    importlib.import_module("rltrain_serve").run_scheduler(server_args, "port", 0)
    assert ran == [(server_args, "port", 0)]
    on_cpu = device == "cpu"
    assert rotary._is_cpu is on_cpu and set(common.ALLOC_MEMORY_FUNCS) == ({"cpu"} if on_cpu else set())
    if on_cpu:
        assert common.ALLOC_MEMORY_FUNCS["cpu"](3, pin_memory=True) == (3, False)
    for module in (layers, backend):
        assert (module.torch is torch) != (on_cpu and enable_lora)
        assert module.torch.ones is torch.ones
    if on_cpu and enable_lora:
        zeros = layers.torch.zeros(2, pin_memory=True)
        assert torch.equal(zeros, torch.zeros(2)) and zeros.pin_memory() is zeros
    manager = manager_class(SimpleNamespace())
    manager.init_memory_pool()
    assert manager.has_places and getattr(manager.base_model, "rltrain_adapters", None) is (
        manager if enable_lora else None
    )


class Wrapped(torch.nn.Module):
    """A layer with adapters, as SGLang wraps it. It has places for three adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(4, 6, bias=False)
        self.lora_a, self.lora_b = torch.randn(3, 2, 4), torch.randn(3, 6, 2)


def test_an_adapters_parameters_follow_those_of_the_model() -> None:
    model = torch.nn.Module()
    model.proj, model.norm = Wrapped(), torch.nn.LayerNorm(4, bias=False)
    assert list(loader.parameters_of(model)) == ["proj.weight", "norm.weight"]
    fetched: list[set[str]] = []
    model.rltrain_adapters = SimpleNamespace(
        loras={"actor": None},
        fetch_new_loras=fetched.append,
        memory_pool=SimpleNamespace(get_buffer_id={"actor": 2}.__getitem__),
    )
    found = loader.parameters_of(model)
    assert list(found) == ["proj.weight", "norm.weight", "proj.weight.lora.a", "proj.weight.lora.b"]
    assert found["proj.weight"] is model.proj.base_layer.weight and fetched == [{"actor"}]
    for half, stacked in (("a", model.proj.lora_a), ("b", model.proj.lora_b)):
        assert found[f"proj.weight.lora.{half}"].data_ptr() == stacked[2].data_ptr()


def test_a_whole_checkpoint_lists_its_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "2.safetensors", metadata={"format": "pt"})
    assert delta_files.listed(tmp_path) == {
        "a": (torch.float32, (2, 3)),
        "b": (torch.bfloat16, (4,)),
        "c": (torch.float32, ()),
    }


# Changed elements of a tensor, loaded by a model's own loader.

Loader = Callable[[Tensor, Tensor], object]

LOADERS: dict[str, Loader] = {
    "whole": lambda target, loaded: target.copy_(loaded),
    "rows of one rank": lambda target, loaded: target[:2].copy_(loaded.narrow(0, 4, 2)),
    "columns of one rank": lambda target, loaded: target[:, 3:].copy_(loaded.narrow(1, 0, 5)),
    "fused": lambda target, loaded: [target.narrow(0, 3 * n, 3).copy_(half) for n, half in enumerate(loaded.chunk(2))],
    "transposed": lambda target, loaded: target.t().copy_(loaded.transpose(0, 1).contiguous()),
    "of another shape": lambda target, loaded: target.view(2, 3, 8).copy_(loaded.view(2, 3, 8)[:, :, :]),
    "through another type": lambda target, loaded: target.copy_(loaded.to(torch.float64).clone()),
    "filled up": lambda target, loaded: target.copy_(torch.cat([loaded[:, :6], torch.zeros(6, 2)], dim=1)),
    "parameter data": lambda target, loaded: torch.nn.Parameter(target).data.copy_(loaded.data),
}


def changed(name: str, values: Tensor, elements: Tensor) -> SimpleNamespace:
    shape = tuple(values.shape)
    of = values.view(-1)[elements]
    return SimpleNamespace(
        name=name, dtype=values.dtype, shape=shape, numel=math.prod(shape), elements=elements, values=of
    )


@given(loader=st.sampled_from([*LOADERS]), share=st.sampled_from([0.0, 0.1, 0.6, 1.0]), seed=st.integers(0, 1000))
def test_what_changed_is_loaded_and_nothing_else(loader: str, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, new = torch.randn(6, 8, generator=generator), torch.randn(6, 8, generator=generator)
    elements = (torch.rand(48, generator=generator) < share).nonzero().view(-1)
    new = old.view(-1).index_copy(0, elements, new.view(-1)[elements]).view(6, 8)
    first = torch.randn(6, 8, generator=generator)
    found, expected = first.clone(), first.clone()
    LOADERS[loader](found, old)
    LOADERS[loader](expected, new)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            assert name == "weight" and tensor.shape == (6, 8) and isinstance(tensor, Tensor)
            LOADERS[loader](found, tensor)

    [count] = load_changes(load, [changed("weight", new, elements)])  # type: ignore[list-item]
    assert torch.equal(found, expected)
    assert count.copied == len(elements) or loader.endswith("one rank") or loader == "filled up"


def test_tensors_that_a_loader_joins_are_told_apart_and_waited_for() -> None:
    """SGLang joins two projections of latent attention after it has seen both. One of them may be unchanged."""
    first, second = torch.arange(6.0).view(2, 3), torch.arange(10.0, 19.0).view(3, 3)
    target = torch.cat([first, second])
    seen: dict[str, Tensor] = {}

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            seen[name] = tensor
            if len(seen) == 2:
                target.copy_(torch.cat([seen["first"], seen["second"]], dim=0))

    one = changed("second", second + 100, torch.tensor([0, 4]))
    [count] = load_changes(load, [one], [("first", first.dtype, (2, 3))])  # type: ignore[list-item]
    expected = torch.cat([first, second])
    expected[2, 0] += 100
    expected[3, 1] += 100
    assert torch.equal(target, expected) and count.copied == 2
    seen.clear()
    both = [changed("first", first - 50, torch.tensor([5])), changed("second", second, torch.tensor([], dtype=int))]
    counts = load_changes(load, both)  # type: ignore[arg-type]
    expected[1, 2] -= 50
    assert torch.equal(target, expected) and [one.copied for one in counts] == [1, 0]


def test_a_single_element_may_be_filled_in() -> None:
    target = torch.zeros(1)
    count = Count()
    target.fill_(Overlay.of(torch.tensor([3.0]), torch.tensor([1]), (count,)).item())
    assert target.item() == 3.0 and count.copied == 1


@pytest.mark.parametrize(
    "load",
    [
        lambda target, loaded: target.copy_(loaded + 1),
        lambda target, loaded: target.__setitem__(0, loaded[0]),
        lambda target, loaded: target.add_(loaded),
        lambda target, loaded: target[:1].copy_(loaded),
        lambda target, loaded: loaded.numpy(),
        lambda target, loaded: loaded.tolist(),
        lambda target, loaded: loaded.view(torch.int32),
        lambda target, loaded: loaded.view(torch.int8),
        lambda target, loaded: loaded.data_ptr(),
        lambda target, loaded: loaded.zero_(),
        lambda target, loaded: loaded.copy_(target),
        lambda target, loaded: loaded[0, 0].item(),
    ],
)
def test_what_would_lose_track_is_refused(load: Loader) -> None:
    target = torch.zeros(6, 8)
    with pytest.raises(CannotLoad):
        load(target, Overlay.of(torch.ones(6, 8), torch.zeros(6, 8, dtype=torch.int8), (Count(),)))
    assert not target.any()
