"""Weights from staging memory into a server's process. SGLang itself is in tests/sglang."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import EngineError, EngineLost
from rltrain.offload import host_memory
from rltrain.offload.host_memory import NodeCopy
from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.in_sglang import rltrain_weight_loader as loader
from rltrain.rollout.servers.sglang_weights import Delivery, Staging, checksum_of, fields_of, payload
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.support.loading_server import NOISE, LoadingServer, Model, model_of, unpickled
from tests.support.model_shards import tiny_architecture
from tests.support.shared_store import on_ranks, open_store

LAYOUT = engine_layout(tiny_architecture("qwen2"), Grid((0,)))
PARTS = split(LAYOUT, 3000)
CPU = torch.device("cpu")
LOADER_FILE = Path(loader.__file__)


def padded_rows(name: str) -> bool:
    return name in ("model.embed_tokens.weight", "lm_head.weight")


def weights(seed: int) -> dict[str, Tensor]:
    """Returns random weights of every parameter. Rows of padding are zero."""
    generator = torch.Generator().manual_seed(seed)
    made = {field.name: torch.randn(field.shape, generator=generator) for field in fields_of(LAYOUT, 0)}
    for name, tensor in made.items():
        if padded_rows(name):
            tensor[21:] = 0
    return made


def write(views: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Writes values like a reshard: padding is not touched."""
    for name, view in views.items():
        rows = slice(0, 21) if padded_rows(name) else slice(None)
        view[rows] = values[name][rows]


def deliver(delivery: Delivery, values: Mapping[str, Tensor], version: int, *, verify: bool = False) -> None:
    delivery.begin()
    for part in range(delivery.num_parts):
        write(delivery.tensors(part), values)
        delivery.arrived(part, verify)
    delivery.finish(version)


def delivery_to(server: LoadingServer, *, keep: bool = True) -> Delivery:
    return Delivery(PARTS, 0, device=CPU, keep=keep, group=None, call=lambda path, body: server.call(path, body))


def assert_holds(model: Model, values: Mapping[str, Tensor]) -> None:
    assert model.held.keys() == values.keys()
    assert [name for name in values if not torch.equal(model.held[name], values[name])] == []


@pytest.fixture
def server() -> LoadingServer:
    return LoadingServer(model_of(LAYOUT, 0))


@pytest.fixture
def delivery(server: LoadingServer) -> Iterator[Delivery]:
    made = delivery_to(server)
    yield made
    made.close()


@pytest.mark.parametrize("verify", [False, True])
def test_every_sync_brings_all_weights_and_its_version(server: LoadingServer, delivery: Delivery, verify: bool) -> None:
    assert len(PARTS) > 4, "slots must be reused"
    delivery.check_layout()
    assert delivery.version is None and server.models[0].num_post_loads == 0
    for version in (3, 7, 8):
        deliver(delivery, weights(version), version, verify=verify)
        assert_holds(server.models[0], weights(version))
        assert (delivery.version, server.version, server.is_open) == (version, str(version), False)
    assert server.models[0].num_post_loads == 3
    expected = sum(float(tensor.sum()) for tensor in weights(8).values())
    assert server.models[0].sum_at_post_load == pytest.approx(expected), "it ran before all weights were there"


def test_padding_is_zero_although_slots_are_used_for_several_parameters(delivery: Delivery) -> None:
    delivery.begin()
    for part in range(delivery.num_parts):
        for name, view in delivery.tensors(part).items():
            if padded_rows(name):
                assert not view[21:].any(), name
            view.fill_(NOISE)
        delivery.arrived(part)
    delivery.finish(1)


def test_a_slot_is_not_written_before_the_engine_has_read_it(server: LoadingServer, delivery: Delivery) -> None:
    may_load, values = threading.Event(), weights(1)
    server.before_load = lambda: None if may_load.wait(30) else None
    delivery.begin()
    for part in (0, 1):  # both slots are filled while the engine is busy with the first
        write(delivery.tensors(part), values)
        delivery.arrived(part)
    third = threading.Thread(target=lambda: write(delivery.tensors(2), values))
    third.start()
    third.join(0.5)
    assert third.is_alive(), "the first slot was reused before the engine read it"
    may_load.set()
    third.join(30)
    assert not third.is_alive()
    delivery.arrived(2)
    for part in range(3, delivery.num_parts):
        write(delivery.tensors(part), values)
        delivery.arrived(part)
    delivery.finish(1)
    assert_holds(server.models[0], values)


BEGIN, FIRST_LOAD, FINISH, END, INFO = 0, 1, len(PARTS) + 1, len(PARTS) + 2, len(PARTS) + 3


@pytest.mark.parametrize("dies_at", [BEGIN, FIRST_LOAD, FIRST_LOAD + 2, FINISH - 1, FINISH, END, INFO])
def test_a_sync_goes_on_when_the_server_dies_and_the_next_server_gets_all_of_it(dies_at: int) -> None:
    server = LoadingServer(model_of(LAYOUT, 0))
    delivery = Delivery(PARTS, 0, device=CPU, keep=True, group=None, call=lambda path, body: server.call(path, body))
    deliver(delivery, weights(1), 1)
    server.calls, server.dies_at = [], dies_at
    with pytest.raises(EngineLost, match="connection reset"):
        deliver(delivery, weights(2), 2)
    assert delivery.version is None
    assert len(server.calls) == dies_at + 1, "a dead server got another request"
    server = LoadingServer(model_of(LAYOUT, 0))
    delivery.check_layout()
    delivery.redeliver()
    assert_holds(server.models[0], weights(2))
    assert (delivery.version, server.version, server.models[0].num_post_loads) == (2, "2", 1)
    deliver(delivery, weights(3), 3)
    assert_holds(server.models[0], weights(3))
    delivery.close()


def test_redelivery_may_fail_and_be_repeated(server: LoadingServer, delivery: Delivery) -> None:
    delivery.redeliver()
    assert server.calls == [], "nothing had arrived"
    deliver(delivery, weights(1), 1)
    server.calls, server.dies_at = [], 3
    with pytest.raises(EngineLost):
        delivery.redeliver()
    assert delivery.version is None
    server.models, server.calls, server.dies_at, server.is_open = (model_of(LAYOUT, 0),), [], None, False
    delivery.redeliver()
    assert_holds(server.models[0], weights(1))


def test_without_a_copy_a_new_server_cannot_have_the_weights(server: LoadingServer) -> None:
    delivery = delivery_to(server, keep=False)
    delivery.redeliver()
    deliver(delivery, weights(1), 1)
    with pytest.raises(EngineError, match=r"rollout\.sglang\.keep_weights=true"):
        delivery.redeliver()
    delivery.close()


def changed(**changes: Tensor | None) -> Model:
    tensors = model_of(LAYOUT, 0).held
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    return Model({name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None})


NORM, QKV = "model.norm.weight", "model.layers.1.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (changed(**{NORM: None}), r"no parameter model\.norm\.weight; expected \[12\] of float32"),
        (changed(**{NORM: torch.zeros(13)}), r"model\.norm\.weight is \[13\] of float32.*expected \[12\] of float32"),
        (changed(**{NORM: torch.zeros(12).half()}), r"model\.norm\.weight is \[12\] of float16"),
        (changed(**{QKV: torch.zeros(12, 32).t()}), r"qkv_proj\.weight is \[32, 12\].*strides \[1, 32\].*\[12, 1\]"),
        (changed(**{"model.extra": torch.zeros(2)}), r"it has a parameter model\.extra, of \[2\], that training does"),
        (changed(**{NORM: torch.zeros(12, device="meta")}), r"model\.norm\.weight is \[12\] .*on meta; expected"),
    ],
    ids=["name", "shape", "dtype", "stride", "extra", "device"],
)
def test_a_server_with_other_parameters_is_refused_by_name(model: Model, expected: str) -> None:
    delivery = delivery_to(LoadingServer(model))
    with pytest.raises(EngineError, match=expected):
        delivery.check_layout()
    delivery.close()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (changed(**{NORM: None}), r"the engine has no parameter model\.norm\.weight"),
        (changed(**{NORM: torch.zeros(6)}), r"model\.norm\.weight is \[6\] of float32.*expected \[12\]"),
        (changed(**{NORM: torch.zeros(12).bfloat16()}), r"model\.norm\.weight is \[12\] of bfloat16.*of float32"),
        (changed(**{QKV: torch.zeros(12, 32).t()}), r"qkv_proj\.weight is \[32, 12\].*strides \[1, 32\]"),
    ],
    ids=["name", "shape", "dtype", "stride"],
)
def test_a_load_that_does_not_fit_is_reported_at_the_end(model: Model, expected: str) -> None:
    """The server raises nothing, and the version is not set."""
    server = LoadingServer(model)
    delivery = delivery_to(server)
    with pytest.raises(EngineLost, match=expected):
        deliver(delivery, weights(1), 1)
    assert (server.version, model.num_post_loads, delivery.version) == ("default", 0, None)
    delivery.close()


def test_verify_finds_what_changed_on_the_way(server: LoadingServer, delivery: Delivery) -> None:
    views = delivery.tensors(0)

    def swap() -> None:
        """Swaps two elements in the slot of the first part after it was delivered."""
        flat = views["model.embed_tokens.weight"].view(-1)
        flat[[0, 1]] = flat[[1, 0]]

    server.before_load = swap
    with pytest.raises(EngineLost, match=r"model\.embed_tokens\.weight differs from what was staged"):
        deliver(delivery, weights(1), 1, verify=True)


def test_a_server_that_refuses_is_no_reason_to_start_another(server: LoadingServer, delivery: Delivery) -> None:
    server.is_open = True
    with pytest.raises(EngineError, match="a weight-update session is already open"):
        delivery.check_layout()


def test_an_answer_without_the_loader_is_noticed(server: LoadingServer, delivery: Delivery) -> None:
    server.runs_loader = False
    with pytest.raises(EngineLost, match="without running rltrain's weight loader"):
        deliver(delivery, weights(1), 1)


def test_a_version_that_was_not_taken_is_noticed(server: LoadingServer, delivery: Delivery) -> None:
    call = server.call
    server.call = lambda path, body: {"weight_version": "1"} if path == "/model_info" else call(path, body)  # type: ignore[method-assign]
    deliver(delivery, weights(1), 1)
    with pytest.raises(EngineLost, match="it reports weights of version 1; expected 2"):
        deliver(delivery, weights(2), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_both_sides_compute_the_same_checksum_and_places_count(dtype: torch.dtype) -> None:
    values = torch.randn(700, 801, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum_of(values) == loader.checksum_of(values)
    moved = values.clone()
    moved[0, 0], moved[699, 800] = values[699, 800], values[0, 0]
    assert not torch.equal(moved.float(), values.float())
    assert checksum_of(moved) != checksum_of(values)


def test_the_payload_is_what_sglang_unpickles() -> None:
    for text in ("", '{"op": "describe"}', "é" * 70_000):
        ((found, tensor),) = unpickled(payload(text))
        assert found == text and tensor.numel() == 0


def test_another_process_loads_weights_and_no_file_is_left() -> None:
    """The other Python has only torch and the loader."""
    program = f"""
import sys, json, torch
sys.path.insert(0, {str(LOADER_FILE.parent)!r})
import rltrain_weight_loader
model = torch.nn.Linear(3, 2)
rltrain_weight_loader.load(model, [(sys.stdin.read(), torch.Tensor())])
print(json.dumps([model.weight.tolist(), "rltrain" in sys.modules]))
"""
    staging = Staging([split(LAYOUT, 10**9)[0]], 0, CPU)
    staging.bytes(0)[:24].view(torch.float32).copy_(torch.arange(6.0))
    file = os.memfd_create("reply")
    fields = [["weight", "float32", [2, 3], 0, checksum_of(torch.arange(6.0).view(2, 3))]]
    message = {"op": "load", "id": "a", "reply": f"/proc/{os.getpid()}/fd/{file}"}
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        input=json.dumps({**message, "memory": staging.handle(0), "fields": fields}),
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert json.loads(done.stdout) == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], False]
    assert json.loads(os.pread(file, 1000, 0)) == {"id": "a", "error": None}
    assert set(os.listdir("/dev/shm")) == before
    status = os.stat(staging.handle(0)["path"])
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    staging.close()
    os.close(file)


class Method:
    """A quantisation method of SGLang. The name of its class identifies it."""


def method(kind: str, **attributes: Any) -> object:
    made = type(kind, (Method,), {})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Backend:
    def __init__(self, value: str) -> None:
        self.value = value


class Config:
    def __init__(self, serialized: bool = True, block: tuple[int, int] = (128, 128)) -> None:
        self.is_checkpoint_fp8_serialized = serialized
        self.weight_block_size = list(block)


def moe(backend: str, **attributes: Any) -> object:
    return method("UnquantizedFusedMoEMethod", get_moe_runner_backend=lambda layer: Backend(backend), **attributes)


@pytest.mark.parametrize(
    ("quant_method", "layer", "expected"),
    [
        (method("UnquantizedLinearMethod"), {}, None),
        (method("UnquantizedEmbeddingMethod"), {}, None),
        (method("Fp8KVCacheMethod"), {}, None),
        (method("UnquantizedLinearMethod"), {"use_intel_amx_backend": True}, "packed for AMX"),
        (moe("triton"), {}, None),
        (moe("deep_gemm"), {}, None),
        (moe("flashinfer_cutlass", load_up_proj_weight_first=True), {}, "up above gate"),
        (moe("flashinfer_trtllm"), {"use_flashinfer_trtllm_moe": True}, "permutes rows"),
        (moe("triton_kernel"), {"use_triton_kernels": True}, "transposed"),
        (moe("aiter"), {}, "MoE backend aiter may reorder"),
        (method("Fp8LinearMethod", block_quant=True, quant_config=Config()), {}, None),
        (method("Fp8LinearMethod", block_quant=False, quant_config=Config()), {}, "one scale per tensor"),
        (method("Fp8LinearMethod", block_quant=True, quant_config=Config(False)), {}, "quantises by itself"),
        (method("Fp8LinearMethod", block_quant=True, quant_config=Config(block=(32, 32))), {}, r"\[32, 32\]"),
        (method("Fp8LinearMethod", block_quant=True, quant_config=Config(), use_marlin=True), {}, "use_marlin"),
        (method("AWQLinearMethod"), {}, "AWQLinearMethod stores weights that cannot"),
    ],
)
def test_layers_whose_weights_are_stored_otherwise_are_refused_by_name(
    quant_method: object, layer: dict[str, Any], expected: str | None
) -> None:
    model = model_of(LAYOUT, 0)
    module = model.get_submodule("model.layers.1.self_attn.qkv_proj")
    for name, value in {"quant_method": quant_method, **layer}.items():
        setattr(module, name, value)
    delivery = delivery_to(LoadingServer(model))
    if expected is None:
        delivery.check_layout()
    else:
        with pytest.raises(EngineError, match=rf"model\.layers\.1\.self_attn\.qkv_proj: .*{expected}"):
            delivery.check_layout()
    delivery.close()


def test_scales_that_were_made_powers_of_two_are_refused() -> None:
    model = model_of(LAYOUT, 0)
    module = model.get_submodule("model.layers.0.mlp.down_proj")
    module.quant_method = method("Fp8LinearMethod", block_quant=True, quant_config=Config())  # type: ignore[assignment]
    module.weight.format_ue8m0 = True  # type: ignore[union-attr]
    delivery = delivery_to(LoadingServer(model))
    with pytest.raises(EngineError, match="powers of two"):
        delivery.check_layout()
    delivery.close()


def test_scales_that_only_the_engine_has_are_absent_after_a_sync() -> None:
    """A server without a checkpoint has noise in them. It would use this noise as scales."""
    model = model_of(LAYOUT, 0)
    module = model.get_submodule("model.layers.0.self_attn")
    module.quant_method = method("Fp8KVCacheMethod")  # type: ignore[assignment]
    for name in ("k_scale", "v_scale"):
        module.register_parameter(name, torch.nn.Parameter(torch.tensor(1e-4), requires_grad=False))
    delivery = delivery_to(LoadingServer(model))
    delivery.check_layout()
    deliver(delivery, weights(1), 1)
    assert [float(module.get_parameter(name)) for name in ("k_scale", "v_scale")] == [-1.0, -1.0]
    delivery.close()


READS = len(PARTS)
CALLS = 1 + 2 * len(PARTS) + 3
"""Calls of a sync of changes: begin, a read and a load of each part, finish, end, and the request for the version."""


def with_changes(values: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Returns a copy with changed elements in some parameters. Padding is unchanged."""
    made = {name: tensor.clone() for name, tensor in values.items()}
    for number, (name, tensor) in enumerate(made.items()):
        rows = tensor[:21] if padded_rows(name) else tensor
        if number % 3 != version % 3:
            rows.view(-1)[version :: 5 + number] += 1.0
    return made


def send_changes(
    delivery: Delivery,
    before: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    version: int,
    skip: int | None = None,
) -> None:
    """Writes changes like a reshard: only differing elements."""
    delivery.begin()
    for part in range(delivery.num_parts):
        if part == skip:
            continue
        for name, view in delivery.tensors(part, is_kept=True).items():
            differs = values[name] != before[name]
            view[differs] = values[name][differs]
        delivery.arrived(part, verify=version % 2 == 1)
    delivery.finish(version)


def test_changes_are_written_over_what_the_server_has(server: LoadingServer, delivery: Delivery) -> None:
    values = weights(1)
    deliver(delivery, values, 1)
    for version in range(2, 6):
        server.calls = []
        before, values = values, with_changes(values, version)
        send_changes(delivery, before, values, version)
        assert_holds(server.models[0], values)
        assert (delivery.version, server.version, len(server.calls)) == (version, str(version), CALLS)
    deliver(delivery, weights(9), 9)
    assert_holds(server.models[0], weights(9))


def test_the_servers_own_memory_is_what_is_remembered(server: LoadingServer, delivery: Delivery) -> None:
    """Reads come from the server, not from a copy. So a comparison of both sides would find a change by the server."""
    values = weights(1)
    deliver(delivery, values, 1)
    server.models[0].held["model.norm.weight"][3] = 77.0
    delivery.begin()
    found = {name: view.clone() for part in range(READS) for name, view in delivery.tensors(part, is_kept=True).items()}
    assert float(found.pop("model.norm.weight")[3]) == 77.0
    assert all(torch.equal(tensor, values[name]) for name, tensor in found.items())


def test_parts_without_changes_need_not_come(server: LoadingServer, delivery: Delivery) -> None:
    values = weights(1)
    deliver(delivery, values, 1)
    for version, skipped in ((2, 0), (3, 1), (4, READS - 1)):
        before, values = values, with_changes(values, version)
        for name in delivery._staging.views(skipped):
            values[name] = before[name]
        send_changes(delivery, before, values, version, skip=skipped)
        assert_holds(server.models[0], values)
        server.models[0].held["model.norm.weight"].fill_(NOISE)
        delivery.redeliver()
        assert_holds(server.models[0], values)


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3, 4, 2 * READS, CALLS - 3, CALLS - 1])
def test_a_server_that_dies_meanwhile_is_replaced_by_one_with_all_changes(dies_at: int) -> None:
    """The remaining changes are written over the copy of the old weights."""
    server = LoadingServer(model_of(LAYOUT, 0))
    delivery = Delivery(
        PARTS, 0, device=torch.device("cpu"), keep=True, group=None, call=lambda p, b: server.call(p, b)
    )
    before = weights(1)
    deliver(delivery, before, 1)
    server.calls, server.dies_at = [], dies_at
    values = with_changes(before, 2)
    with pytest.raises(EngineLost, match="connection reset"):
        send_changes(delivery, before, values, 2)
    assert delivery.version is None
    server = LoadingServer(model_of(LAYOUT, 0))
    delivery.check_layout()
    delivery.redeliver()
    assert_holds(server.models[0], values)
    before, values = values, with_changes(values, 4)
    send_changes(delivery, before, values, 4)
    assert_holds(server.models[0], values)
    delivery.close()


def test_a_sync_of_changes_may_begin_anew_and_send_everything(server: LoadingServer, delivery: Delivery) -> None:
    before = weights(1)
    deliver(delivery, before, 1)
    for abandoned in range(READS):
        delivery.begin()
        for part in range(abandoned):
            delivery.tensors(part, is_kept=True)
            delivery.arrived(part)
        delivery.tensors(abandoned, is_kept=True)
        values = weights(10 + abandoned)
        for part in range(READS):
            for name, view in delivery.tensors(part).items():
                rows = slice(0, 21) if padded_rows(name) else slice(None)
                view[rows] = values[name][rows]
            delivery.arrived(part, verify=True)
        delivery.finish(10 + abandoned)
        assert_holds(server.models[0], values)


def test_what_the_server_cannot_read_is_taken_from_the_copy(server: LoadingServer, delivery: Delivery) -> None:
    """Memory of other parts must not reach this server or other engines."""
    before = weights(1)
    deliver(delivery, before, 1)
    values, norm = with_changes(before, 2), server.models[0].get_submodule("model.norm")
    weight = norm.get_parameter("weight")
    del norm.weight
    with pytest.raises(EngineLost, match=r"no parameter model\.norm\.weight"):
        send_changes(delivery, before, values, 2)
    norm.register_parameter("weight", weight)
    server.is_open = False
    delivery.redeliver()
    assert_holds(server.models[0], values)


def test_without_a_copy_a_sync_of_changes_needs_none(server: LoadingServer) -> None:
    delivery = delivery_to(server, keep=False)
    before = weights(1)
    deliver(delivery, before, 1)
    values = with_changes(before, 2)
    send_changes(delivery, before, values, 2)
    assert_holds(server.models[0], values)
    delivery.close()


LAYOUT_OF_4 = engine_layout(tiny_architecture("qwen2"), Grid((0, 1, 2, 3)))
"""The layout of four engines with one rank each, two to a node."""
PARTS_OF_4 = split(LAYOUT_OF_4, 3000)
FIRST_CALLS = 3


class Engine:
    """One of the engines, from the view of its rank."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        job_store = JobStore(World(rank, 4, rank % 2, 2, CPU, store, timeout_s=10))
        self.rank, self.server = rank, LoadingServer(model_of(LAYOUT_OF_4, rank))
        shared = NodeCopy.among(job_store, "the engines' weights", LAYOUT_OF_4.ranks, LAYOUT_OF_4.parts)
        call = lambda path, body: self.server.call(path, body)  # noqa: E731 - the server is another one after a restart
        self.delivery = Delivery(PARTS_OF_4, rank, device=CPU, keep=True, group=None, call=call, shared=shared)

    def start_anew(self) -> None:
        self.server = LoadingServer(model_of(LAYOUT_OF_4, self.rank))
        self.delivery.check_layout()
        self.delivery.redeliver()


def updates(rank: int, store: dist.Store, others_are_done: threading.Event, meeting: threading.Barrier) -> Any:
    """Makes two updates. All servers are lost in the second one. Ranks without a copy are the first to return."""
    engine = Engine(rank, store)
    deliver(engine.delivery, weights(1), 1)
    meeting.wait(10)
    engine.server.calls, engine.server.dies_at = [], FIRST_CALLS
    writes = rank % 2 == 0
    if writes:
        others_are_done.wait(0.3)  # a reader before this write would find version 1
    with pytest.raises(EngineLost, match="connection reset"):
        deliver(engine.delivery, weights(2), 2)
    engine.start_anew()
    others_are_done.set()
    assert_holds(engine.server.models[0], weights(2))
    engine.start_anew()
    assert_holds(engine.server.models[0], weights(2))
    found = engine.delivery.kept_bytes
    meeting.wait(10)
    engine.delivery.close()
    return found


@pytest.mark.parametrize("reachable", [True, False])
def test_engines_of_a_node_keep_one_copy_which_serves_them_all(
    reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reachable:
        machines = iter(f"machine {number}" for number in range(99))
        monkeypatch.setattr(host_memory, "this_machine", lambda: next(machines))
    done, meeting = threading.Event(), threading.Barrier(4)
    with open_store() as store:
        kept = on_ranks(store, lambda rank, own: updates(rank, own, done, meeting), 4)
    assert kept[0] > 0 and kept == [kept[0], 0 if reachable else kept[0]] * 2


def test_what_is_forgotten_of_earlier_updates_leaves_one_key() -> None:
    def body(rank: int, store: dist.Store) -> int:
        engine = Engine(rank, store)
        before = store.num_keys()
        for version in range(3):
            deliver(engine.delivery, weights(version), version)
        engine.delivery.close()
        return store.num_keys() - before

    with open_store() as store:
        [grown] = on_ranks(store, body, 1)
    assert grown == 1
