"""Adapters apart from the base for servers at URLs: their files, what a server is given, and which servers are
refused."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rltrain.checkpoint.peft_files import load_adapters
from rltrain.config.models import Lora
from rltrain.errors import EngineError
from rltrain.models import read_architecture
from rltrain.reshard.layout import Layout, hf_layout
from rltrain.rollout.layout import engine_parts, staging_bytes, whole_engine
from rltrain.rollout.servers.folder_weights import AdapterWeights, DiskWeights
from rltrain.rollout.servers.http_engine import HttpEngine
from rltrain.runtime.grid import Grid
from tests.support.checkpoint_files import tensors_of
from tests.support.schedule_configs import make_config
from tests.support.served import CHECKPOINT
from tests.unit.test_delta_files import CPU, LIMIT_S, Store
from tests.unit.test_http_engine import LONG, SHORT, Rig, await_, drawn_right, finish, rig, samples

__all__ = ["rig"]

KINDS = ("sglang", "vllm")
LORA = Lora(rank=4, alpha=8, targets=("q_proj", "down_proj"))


class Ranks:
    """The ranks of a role in threads, with their `AdapterWeights` in a folder."""

    def __init__(self, folder: Path, num_ranks: int = 1) -> None:
        http = {"engine": "http", "urls": ("http://a",) * num_ranks, "http": {"staging_mb": 0.005}}
        lora = LORA.model_dump()
        config = make_config(
            rollout=http,
            model={"path": str(CHECKPOINT), "dtype": "float32", "lora": lora},
            weight_sync={"adapters": "apart"},
        )
        architecture, grid, store = read_architecture(CHECKPOINT), Grid((*range(num_ranks),)), Store()
        parts = engine_parts(config, architecture, grid)
        self.base = [part.plain for part in parts if part.content == "base"]
        self.adapters = [part.plain for part in parts if part.content == "adapters"]
        assert len(self.base) > 1 and len(self.adapters) > 1
        self.pool, self.folder = ThreadPoolExecutor(num_ranks), folder

        def made(rank: int) -> AdapterWeights:
            options = {"device": CPU, "folder": folder, "like": CHECKPOINT, "job_store": store, "role": "rollout"}
            options |= {"config_key": "output_dir", "update_timeout_s": LIMIT_S}
            whole = whole_engine(config, architecture, grid).plain
            disk = DiskWeights(whole, self.base, staging_bytes(config.rollout), rank, **options)
            return AdapterWeights(disk, len(self.base), self.adapters, LORA, str(CHECKPOINT))

        self.weights = [*self.pool.map(made, range(num_ranks))]

    @property
    def layout(self) -> Layout:
        return self.adapters[0]

    def fill(self, weights: AdapterWeights, tensors: Mapping[str, Tensor], *, has_base: bool) -> None:
        """Lets all parts of an update arrive, in the order of a sync."""
        first = 0 if has_base else len(self.base)
        for number in range(first, len(self.base) + len(self.adapters)):
            for name, tensor in weights.tensors(number).items():
                tensor.copy_(tensors[name])
            weights.arrived(number)

    def update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        def one(weights: AdapterWeights) -> None:
            weights.begin()
            self.fill(weights, tensors, has_base=version == 0)
            weights.complete(version)

        [*self.pool.map(one, self.weights, timeout=LIMIT_S)]

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def values(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Returns the tensors of the base and random ones of its adapters."""
    generator = torch.Generator().manual_seed(seed)
    names = zip(layout.tensors.names, layout.tensors.shapes, strict=True)
    return {**tensors_of(CHECKPOINT), **{name: torch.randn(shape, generator=generator) for name, shape in names}}


def sync(engine: HttpEngine, ranks: Ranks, version: int) -> None:
    engine.begin_update()
    ranks.fill(ranks.weights[0], values(ranks.layout, version), has_base=version == 0)
    engine.end_update(version)


def test_the_base_is_written_once_and_adapters_by_every_update(tmp_path: Path) -> None:
    """Two ranks write the base together, and the first one the adapters, in the form that model.lora.path reads."""
    folder = tmp_path / "weights"
    ranks = Ranks(folder, 2)
    for version in range(3):
        sent = values(ranks.layout, version)
        ranks.update(version, sent)
        assert ranks.folders() == [f"adapters_{version}", "version_0"], "earlier adapters are removed"
        path = folder / f"adapters_{version}"
        whole = hf_layout(read_architecture(CHECKPOINT).adapted(4, LORA.targets), (0,))
        found = {name: torch.full(shape, torch.nan) for name, shape in whole.on(0).parameters}
        load_adapters(path, whole, 0, found, LORA)
        trained = {name for name in found if ".q_proj." in name or ".down_proj." in name}
        assert trained and all(torch.equal(found[name], sent[name]) for name in trained)
        stored = sum(4 * tensor.numel() for name, tensor in found.items() if name in trained)
        base = sum(tensor.nbytes for tensor in tensors_of(CHECKPOINT).values()) if version == 0 else 0
        assert [one.metrics() for one in ranks.weights] == [{"rollout/weight_files_bytes": base + stored}] * 2
    written, expected = tensors_of(folder / "version_0"), tensors_of(CHECKPOINT)
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    for weights in ranks.weights:
        weights.close()
    assert not folder.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_gets_the_base_once_and_again_after_a_restart(rig: Rig, tmp_path: Path, kind: str) -> None:
    """Requests name the adapters of their version. A server that joins gets both."""
    ranks, server = Ranks(tmp_path / "weights"), rig.server(kind, lora_rank=4)
    engine = rig.start(weights=ranks.weights[0])
    for version in range(3):
        sync(engine, ranks, version)
        assert drawn_right(engine.generate(samples(), SHORT))
    assert loaded(server.folders) == ["version_0", "adapters_0", "adapters_1", "adapters_2"]
    assert [*server.adapters] == [f"rltrain-{server.label}"], "earlier ones are unloaded"
    server.die()
    server.start()
    assert drawn_right(engine.generate(samples(), SHORT)) and {*server.versions_drawn} == {0, 1, 2}
    assert loaded(server.folders)[4:] == ["version_0", "adapters_2"]
    late = rig.server(kind, lora_rank=8)
    rig.names(server, late)
    await_(lambda: engine.metrics()["rollout/servers"] == 2)
    assert drawn_right(engine.generate(samples(), SHORT)) and late.versions_drawn
    assert loaded(late.folders) == ["version_0", "adapters_2"]


def loaded(folders: list[str]) -> list[str]:
    return [Path(folder).name for folder in folders]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_restarted_in_silence_is_given_both_again(rig: Rig, tmp_path: Path, kind: str) -> None:
    """It refuses the name of the adapters. That ends no job."""
    ranks, server = Ranks(tmp_path / "weights"), rig.server(kind, lora_rank=4)
    engine = rig.start(weights=ranks.weights[0])
    sync(engine, ranks, 0)
    server.adapters, server.label = {}, "default"
    assert drawn_right(engine.generate(samples(), SHORT))
    assert loaded(server.folders) == ["version_0", "adapters_0"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_under_way_goes_on_by_new_adapters(rig: Rig, tmp_path: Path, kind: str) -> None:
    ranks, server = Ranks(tmp_path / "weights"), rig.server(kind, lora_rank=4, pace_s=0.05)
    engine = rig.start(weights=ranks.weights[0])
    sync(engine, ranks, 0)
    engine.submit(samples(4), LONG)
    done = finish(engine, lambda: any(len(one.tokens) > 1 for one in engine.progress([100, 101])))
    sync(engine, ranks, 1)
    server.pace_s = 0.001
    done += finish(engine)
    assert sorted(one.id for one in done) == [100, 101, 102, 103] and drawn_right(done)
    assert any({*one.policy_versions} == {0, 1} for one in done)


START = "start it with --enable-lora --max-lora-rank 4 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
NO_SUCH_SERVER = {
    "without adapters": ({"kind": "vllm"}, f"it takes no adapters; {START}"),
    "small": ({"kind": "vllm", "lora_rank": 2}, f"up to rank 2, but model.lora.rank is 4; {START}"),
    "fixed": ({"kind": "vllm", "lora_rank": 4, "allows_loads": False}, f"it has no /v1/load_lora_adapter; {START}"),
    "SGLang without adapters": ({"kind": "sglang"}, "it takes no adapters; start it with --enable-lora"),
    "small SGLang": (
        {"kind": "sglang", "lora_rank": 2},
        "but model.lora.rank is 4; start it with --enable-lora --max-lora-rank 4 --lora-target-modules all",
    ),
    "replicas": ({"kind": "sglang", "lora_rank": 4, "arguments": {"dp_size": 2}}, "dp_size 2; adapters need 1"),
    "rltrain": ({"kind": "rltrain"}, "no such way for servers of openai; expected weight_sync.adapters: merged"),
}


@pytest.mark.parametrize("what", NO_SUCH_SERVER)
def test_servers_that_take_no_adapters_are_refused_at_the_start(rig: Rig, tmp_path: Path, what: str) -> None:
    server, said = NO_SUCH_SERVER[what]
    rig.server(**server)
    with pytest.raises(EngineError, match="takes no weights by way of adapters apart") as refused:
        rig.start(weights=Ranks(tmp_path / "weights").weights[0])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_files_name_their_base(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.update(0, values(ranks.layout, 0))
    config = json.loads((tmp_path / "adapters_0/adapter_config.json").read_text())
    told = {name: config[name] for name in ("base_model_name_or_path", "r", "lora_alpha", "target_modules")}
    assert told == {
        "base_model_name_or_path": str(CHECKPOINT),
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["down_proj", "q_proj"],
    }
