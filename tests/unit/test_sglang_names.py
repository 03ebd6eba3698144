"""Weights that a server's own loader puts in place, by the names of the checkpoint. SGLang: tests/sglang."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from rltrain.errors import EngineLost
from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_by_names
from rltrain.rollout.servers.in_sglang import rltrain_weight_loader as loader
from rltrain.rollout.servers.sglang_weights import Delivery, NamedWeights, fields_of
from rltrain.runtime.grid import Grid
from tests.support.loading_server import LoadingServer, Model
from tests.support.model_shards import tiny_architecture

ARCHITECTURE = tiny_architecture("deepseek_v3")
PARTS = split(engine_by_names(ARCHITECTURE, Grid((0,)), dtype="float32", fp8=False).plain, 600)
SHAPES = dict(parameter for part in PARTS for parameter in part.on(0).parameters)
Q, KV, FUSED = "self_attn.q_a_proj.", "self_attn.kv_a_proj_with_mqa.", "self_attn.fused_qkv_a_proj_with_mqa."
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


class Loading(Model):
    """Loads by names as SGLang's DeepSeek-V3 does: it fuses two tensors within a call, and derives values of all layers
    after every load. It ignores the tensors `ignored` and leaves out the first element of `cut`."""

    def __init__(self, ignored: str = "", cut: str = "") -> None:
        tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items() if Q not in name and KV not in name}
        for name, shape in SHAPES.items():
            if Q in name:
                rows = shape[0] + SHAPES[name.replace(Q, KV)][0]
                tensors[name.replace(Q, FUSED)] = torch.zeros(rows, *shape[1:])
        super().__init__({**tensors, "visual.block.weight": torch.zeros(3)})
        self.ignored, self.cut = ignored, cut

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        held, first = self.held, dict[str, Tensor]()
        for name, tensor in named:
            if name == self.ignored:
                continue
            if Q in name or KV in name:
                first[name] = tensor
                one, other = (name, name.replace(Q, KV)) if Q in name else (name.replace(KV, Q), name)
                if one in first and other in first:
                    held[one.replace(Q, FUSED)].copy_(torch.cat([first.pop(one), first.pop(other)]))
            elif name == self.cut:
                held[name].view(-1)[1:].copy_(tensor.view(-1)[1:])
            else:
                held[name].copy_(tensor)
        self.post_load_weights()


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def assert_holds(model: Model, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if Q in name:
            value = torch.cat([value, values[name.replace(Q, KV)]])
        if KV not in name:
            assert torch.equal(model.held[name.replace(Q, FUSED)], value), name


def delivery_to(server: LoadingServer, names: NamedWeights) -> Delivery:
    call = lambda path, body: server.call(path, body)  # noqa: E731
    return Delivery(PARTS, 0, device=torch.device("cpu"), keep=True, group=None, call=call, names=names)


def deliver(delivery: Delivery, values: dict[str, Tensor], version: int, *, verify: bool = False) -> None:
    delivery.begin()
    for part in range(delivery.num_parts):
        for name, view in delivery.tensors(part).items():
            view.copy_(values[name])
        delivery.arrived(part, verify)
    delivery.finish(version)


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[LoadingServer, Delivery]]]:
    made: list[Delivery] = []

    def serve(model: Model, absent: tuple[str, ...] = ("visual.",)) -> tuple[LoadingServer, Delivery]:
        server = LoadingServer(model)
        made.append(delivery_to(server, NamedWeights(absent)))
        made[-1].check_layout()
        return server, made[-1]

    yield serve
    for delivery in made:
        delivery.close()


Serve = Callable[..., tuple[LoadingServer, Delivery]]


def test_every_sync_brings_all_weights_although_the_loader_fuses_tensors_of_two_parts(serve: Serve) -> None:
    part_of = {name: number for number, part in enumerate(PARTS) for name, _ in part.on(0).parameters}
    pairs = [(part_of[name], part_of[name.replace(Q, KV)]) for name in SHAPES if Q in name]
    assert any(one != other for one, other in pairs) and len(PARTS) > 4, "slots must be reused between the two"
    server, delivery = serve(model := Loading())
    for version in (1, 2, 3):
        deliver(delivery, weights(version), version, verify=version == 2)
        assert_holds(model, weights(version))
        assert (delivery.version, server.version) == (version, str(version))
    assert model.num_post_loads == 3, "values of all layers are derived once per sync, not once per part"


def test_changes_are_written_to_the_kept_weights(serve: Serve) -> None:
    server, delivery = serve(model := Loading())
    before = weights(1)
    deliver(delivery, before, 1)
    server.calls.clear()
    delivery.begin()
    for part in range(delivery.num_parts):
        for name, view in delivery.tensors(part, is_kept=True).items():
            assert torch.equal(view, before[name])
            view.view(-1)[0] = 5.0
        delivery.arrived(part)
    delivery.finish(2)
    for value in before.values():
        value.view(-1)[0] = 5.0
    assert_holds(model, before)


def test_a_new_server_gets_the_kept_weights(serve: Serve) -> None:
    server, delivery = serve(Loading())
    deliver(delivery, weights(1), 1)
    server.models, server.is_open = (model := Loading(),), False
    delivery.check_layout()
    delivery.redeliver()
    assert_holds(model, weights(1))


@pytest.mark.parametrize(
    ("model", "absent", "expected"),
    [
        (Loading(ignored=EMBEDDING), ("visual.",), r"has left out tensor model\.embed_tokens\.weight"),
        (Loading(cut=NORM), ("visual.",), r"has not written 1 of \d+ elements of parameter model\.norm\.weight"),
        (Loading(), (), r"has not written 3 of 3 elements of parameter visual\.block\.weight"),
    ],
    ids=["tensor", "elements", "parameter"],
)
def test_what_the_loader_leaves_out_is_found_in_the_first_sync(
    serve: Serve, model: Model, absent: tuple[str, ...], expected: str
) -> None:
    _, delivery = serve(model, absent)
    with pytest.raises(EngineLost, match=expected):
        deliver(delivery, weights(1), 1)


def test_verify_finds_what_the_loader_leaves_out_later_and_what_changed_on_the_way(serve: Serve) -> None:
    server, delivery = serve(model := Loading())
    deliver(delivery, weights(1), 1)
    model.ignored = EMBEDDING
    deliver(delivery, weights(2), 2)
    with pytest.raises(EngineLost, match="has left out tensor"):
        deliver(delivery, weights(3), 3, verify=True)
    model.ignored, server.is_open = "", False
    views = delivery.tensors(0)
    server.before_load = lambda: views[EMBEDDING].add_(1.0)
    with pytest.raises(EngineLost, match=r"embed_tokens\.weight differs from what was staged"):
        deliver(delivery, weights(4), 4, verify=True)


def test_scales_that_only_the_server_has_are_never_unwritten(serve: Serve) -> None:
    """At the end of every update SGLang refuses those of keys and values that are no numbers."""
    attention = torch.nn.Module()
    attention.quant_method = type("Fp8KVCacheMethod", (), {})()
    for name in ("k_scale", "v_scale"):
        attention.register_parameter(name, torch.nn.Parameter(torch.tensor(0.5), requires_grad=False))
    model = Loading()
    model.add_module("attention", attention)
    _, delivery = serve(model)
    assert (float(attention.k_scale), float(attention.v_scale)) == (-1.0, -1.0)
    deliver(delivery, weights(1), 1)
    assert (float(attention.k_scale), float(attention.v_scale)) == (-1.0, -1.0)


def test_elements_in_fp8_that_the_loader_leaves_out_are_found() -> None:
    part = engine_by_names(ARCHITECTURE, Grid((0,)), dtype="bfloat16", fp8=True)
    tensors = {field.name: torch.zeros(field.shape, dtype=field.dtype) for field in fields_of(part.layout, 0)}
    name = "model.layers.0.self_attn.o_proj.weight"
    assert tensors[name].dtype == torch.float8_e4m3fn and tensors[f"{name}_scale_inv"].dtype == torch.float32
    model = Model(tensors)
    loader._mark(model)
    for parameter in model.held.values():
        parameter.zero_()
    loader._refuse_marks(model, ())
    loader._mark(model)
    for other, parameter in model.held.items():
        parameter.view(-1)[int(other == name) :].zero_()
    with pytest.raises(ValueError, match=rf"has not written 1 of \d+ elements of parameter {name}"):
        loader._refuse_marks(model, ())


def test_each_tensor_is_on_one_rank_of_every_engine() -> None:
    layout = engine_by_names(ARCHITECTURE, Grid((4, 5, 6, 7), tp=2), dtype="float32", fp8=False).plain
    names = {rank: [name for name, _ in layout.on(rank).parameters] for rank in layout.ranks}
    assert names[4] == names[6] and names[5] == names[7]
    assert [*names[4], *names[5]] == [*SHAPES] and names[4] and names[5]
