"""Tests of files with the changes between two versions of the weights."""

import asyncio
import json
import os
import shutil
import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.endpoint import served_engine
from rltrain.endpoint.served_engine import NO_VERSION, Reloads
from rltrain.errors import CheckpointError
from rltrain.models import read_architecture
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.layout import Layout, hf_layout, split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.calls import ServerRefuses
from rltrain.rollout.servers.folder_weights import DeltaWeights, DiskWeights
from rltrain.rollout.servers.in_sglang.rltrain_delta_files import (
    Delta,
    DeltaRefused,
    is_delta,
    manifest_text,
    version_of,
)
from rltrain.runtime.grid import Grid
from tests.support.checkpoint_files import changed_somewhat, damage, files_of, tensors_of, write_delta, write_version
from tests.support.mutations import mutated_bytes, mutated_json
from tests.support.rollout_models import write_checkpoint

CHECKPOINT = Path(__file__).resolve().parents[1] / "warmed_up"
CPU = torch.device("cpu")
PART_BYTES = 50_000
NUM_RANKS = 2
LIMIT_S = 30.0
FEW = int(os.environ.get("RLTRAIN_FUZZ_COUNT", "60"))
"""The number of damaged copies. RLTRAIN_FUZZ_COUNT overrides it."""


@cache
def layouts() -> tuple[Layout, list[Layout]]:
    whole = hf_layout(read_architecture(CHECKPOINT), (*range(NUM_RANKS),), dtype="bfloat16")
    return whole, split(whole, PART_BYTES)


@cache
def weights() -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(CHECKPOINT).items()}


class Store:
    """A stand-in for the store shared by ranks."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def put(self, key: str, value: Any) -> None:
        with self.changed:
            self.values[key] = json.dumps(value)
            self.changed.notify_all()

    def get(self, key: str, waiting_for: str) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, LIMIT_S), waiting_for
            return json.loads(self.values[key])

    def forget(self, key: str) -> None:
        del self.values[key]


@dataclass
class Served:
    """A server as protocol and calls. It loads valid updates and refuses all others."""

    url: str = "http://server"
    label: str | None = "its own"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)

    async def version(self, calls: "Served") -> str | None:
        return calls.label

    async def load_from_disk(self, calls: "Served", folder: str, label: str, limit_s: float) -> None:
        calls.loads.append(Path(folder).name)
        if not is_delta(Path(folder)):
            assert version_of(Path(folder)) == label
            calls.tensors, calls.label = tensors_of(Path(folder)), label
            return
        try:
            delta = Delta(Path(folder))
            delta.check(calls.label)
        except DeltaRefused as refused:
            raise ServerRefuses(str(refused), 400) from None
        assert delta.version == label
        apply(delta, calls.tensors)
        calls.label = label


def apply(delta: Delta, tensors: dict[str, Tensor]) -> None:
    for changed in delta.tensors():
        tensor = tensors[changed.name]
        assert tuple(tensor.shape) == changed.shape and tensor.dtype == changed.dtype
        tensor.view(-1)[changed.elements] = changed.values
        assert checksum_of(tensor) == changed.checksum


def same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    bits, expected = ({name: one.view(torch.int16) for name, one in tensors.items()} for tensors in (some, others))
    return bits.keys() == expected.keys() and all(torch.equal(bits[name], expected[name]) for name in bits)


class Ranks:
    """The ranks of a role in threads, with their `DeltaWeights`."""

    def __init__(self, folder: Path, delta: WeightDelta) -> None:
        self.pool, self.folder, store = ThreadPoolExecutor(NUM_RANKS), folder, Store()
        whole, parts = layouts()

        def made(rank: int) -> DeltaWeights:
            options = {"device": CPU, "folder": folder, "like": CHECKPOINT, "job_store": store, "role": "rollout"}
            options |= {"config_key": "output_dir", "update_timeout_s": LIMIT_S}
            return DeltaWeights(DiskWeights(whole, parts, PART_BYTES, rank, **options), delta)

        self.weights = [*self.pool.map(made, range(NUM_RANKS))]

    def update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        def one(weights: DeltaWeights) -> None:
            weights.begin()
            for number in range(len(layouts()[1])):
                for name, tensor in weights.tensors(number).items():
                    tensor.copy_(tensors[name])
                weights.arrived(number)
            weights.complete(version)

        [*self.pool.map(one, self.weights, timeout=LIMIT_S)]

    def give(self, rank: int, server: Served) -> None:
        asyncio.run(self.weights[rank].give(server, server))  # type: ignore[arg-type]

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def close(self) -> None:
        for weights in self.weights:
            weights.close()
        self.pool.shutdown()


UPDATES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.001, 0.05, 1.0]),  # share of changed elements
        st.sets(st.integers(0, 2)),  # servers without this update
        st.sets(st.integers(0, 2)),  # servers restarted before it
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=8)
@given(updates=UPDATES, full_every=st.integers(1, 5), keep_on=st.sampled_from(["device", "host"]))
def test_whatever_servers_miss_they_end_with_the_whole_weights(
    updates: list[tuple[float, set[int], set[int]]], full_every: int, keep_on: Any
) -> None:
    with TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder) / "weights", WeightDelta(full_every=full_every, keep_on=keep_on))
        servers, present = [Served() for _ in range(3)], weights()
        for version, (share, missing, restarted) in enumerate(updates):
            present = changed_somewhat(present, version, share) if share else present
            ranks.update(version, present)
            for number in restarted:
                servers[number] = Served()
            for number, server in enumerate(servers):
                if number not in missing:
                    ranks.give(number % NUM_RANKS, server)
                    assert server.label == ranks.weights[0].label and same(server.tensors, present)
            chain = [path.name for _, path in ranks.weights[0]._chain]
            assert ranks.folders() == sorted(chain) and len(chain) <= full_every, "unneeded folders are removed"
            metrics = ranks.weights[0].metrics()
            assert metrics == ranks.weights[1].metrics()
            assert metrics["rollout/weight_files_are_full"] == float(f"version_{version}" in ranks.folders())
        ranks.close()
        assert not (Path(folder) / "weights").exists()


def test_most_of_what_is_written_is_what_changed(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, WeightDelta(full_every=10))
    server, present, wrote = Served(), weights(), []
    for version in range(4):
        present = changed_somewhat(present, version, 0.01)
        ranks.update(version, present)
        ranks.give(0, server)
        wrote.append(ranks.weights[0].metrics()["rollout/weight_files_bytes"])
    assert wrote[0] == sum(tensor.nbytes for tensor in present.values())
    assert 0 < max(wrote[1:]) < wrote[0] / 10
    assert server.loads == ["version_0", "delta_1", "delta_2", "delta_3"]
    late = Served()
    ranks.give(1, late)
    assert late.loads == server.loads and same(late.tensors, present)
    ranks.close()


def test_once_deltas_are_as_large_as_all_of_it_all_is_written(tmp_path: Path) -> None:
    ranks, present, full = Ranks(tmp_path, WeightDelta(full_every=50)), weights(), []
    for version in range(6):
        present = changed_somewhat(present, version, 0.4)
        ranks.update(version, present)
        full.append(ranks.weights[0].metrics()["rollout/weight_files_are_full"])
    assert full[:2] == [1, 0] and sum(full) > 1, full
    last = max(version for version, is_full in enumerate(full) if is_full)
    assert ranks.folders() == sorted([f"version_{last}", *(f"delta_{later}" for later in range(last + 1, 6))])
    ranks.close()


def test_one_that_refuses_what_changed_gets_everything(tmp_path: Path) -> None:
    """Raises the refusal if a delta is damaged. The server then keeps its weights."""
    ranks, server, present = Ranks(tmp_path, WeightDelta()), Served(), weights()
    for version in range(3):
        present = changed_somewhat(present, version)
        ranks.update(version, present)
        if version < 2:
            ranks.give(0, server)
    server.tensors, told, server.label = {}, server.label, "another's"

    async def version(calls: Served) -> str | None:
        return told

    server.version = version  # type: ignore[method-assign]
    ranks.give(0, server)
    assert same(server.tensors, present) and server.loads[-4:] == ["delta_2", "version_0", "delta_1", "delta_2"]
    damage(tmp_path / "delta_2")
    before = Served()
    with pytest.raises(ServerRefuses, match="is damaged"):
        ranks.give(0, before)
    assert before.label is not None and before.label.endswith(".1")
    ranks.close()


SHARES = st.lists(st.sampled_from([0.001, 0.01, 0.3, 1.0]), min_size=1, max_size=4)


@settings(max_examples=10)
@given(
    shares=SHARES,
    kinds=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=1, max_size=4),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 700)), min_size=4, max_size=4),
    num_files=st.integers(1, 3),
)
def test_a_chain_of_deltas_is_the_whole(
    shares: list[float], kinds: list[torch.dtype], sizes: list[tuple[int, int]], num_files: int
) -> None:
    generator = torch.Generator().manual_seed(len(shares))
    first = {
        f"layer.{number}": torch.randn(size, generator=generator).to(kind)
        for number, (kind, size) in enumerate(zip(kinds, sizes, strict=False))
    }
    versions = [first]
    for number, share in enumerate(shares):
        versions.append(changed_somewhat(versions[-1], number, share))
    with TemporaryDirectory() as folder:
        deltas = [
            Delta(write_delta(Path(folder) / str(n), versions[n], versions[n + 1], f"v{n}", f"v{n + 1}", num_files))
            for n in range(len(shares))
        ]
        held, label = {name: tensor.clone() for name, tensor in first.items()}, "v0"
        for number, delta in enumerate(deltas):
            for other in deltas[:number] + deltas[number + 1 :]:
                with pytest.raises(DeltaRefused, match=f"expected {label}, which is served"):
                    other.check(label)
            described = delta.check(label)
            assert all((held[n].dtype, tuple(held[n].shape)) == told[:2] for n, told in described.items())
            apply(delta, held)
            label = delta.version
        for name, tensor in versions[-1].items():
            assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.fixture(scope="module")
def damageable(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    old = {"a": torch.arange(600).to(torch.float32), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    new = changed_somewhat(changed_somewhat(old, 0), 1)
    folder = write_delta(tmp_path_factory.mktemp("deltas") / "delta", old, new, "v0", "v1")
    return SimpleNamespace(folder=folder, old=old, new=new)


def outcome(folder: Path, damageable: SimpleNamespace) -> bool:
    """Returns True if the delta was applied correctly, and False if it was refused before any change."""
    held = {name: tensor.clone() for name, tensor in damageable.old.items()}
    try:
        delta = Delta(folder)
        delta.check("v0")
    except DeltaRefused:
        return False
    apply(delta, held)
    assert all(torch.equal(held[name], tensor) for name, tensor in damageable.new.items())
    return True


def test_damaged_deltas_are_refused(damageable: SimpleNamespace, tmp_path: Path) -> None:
    """Damages any byte of a file and any part of the manifest, even with a matching checksum."""
    folder = tmp_path / "delta"
    shutil.copytree(damageable.folder, folder)
    assert outcome(folder, damageable)
    for name in files_of(folder):
        original = (folder / name).read_bytes()
        for damaged in mutated_bytes(original, FEW):
            (folder / name).write_bytes(damaged)
            assert not outcome(folder, damageable) or damaged == original
        (folder / name).write_bytes(original)
    manifest = folder / "rltrain_delta.json"
    for damaged in mutated_json(json.loads(manifest.read_text()), FEW):
        manifest.write_bytes(damaged)
        outcome(folder, damageable)


def test_files_that_nobody_wrote_so_are_refused(damageable: SimpleNamespace, tmp_path: Path) -> None:
    """The checksums match the damaged files. No error other than DeltaRefused may be raised."""
    folder = tmp_path / "delta"
    shutil.copytree(damageable.folder, folder)
    name = sorted(files_of(folder))[0]
    original = (folder / name).read_bytes()
    for damaged in mutated_bytes(original, FEW, first=400):
        (folder / name).write_bytes(damaged)
        files = {**files_of(folder), name: (len(damaged), zlib.crc32(damaged))}
        (folder / "rltrain_delta.json").write_text(manifest_text("v0", "v1", files))
        try:
            delta = Delta(folder)
            delta.check("v0")
            for changed in delta.tensors():
                assert len(changed.elements) == len(changed.values)
                assert not len(changed.elements) or int(changed.elements[-1]) < changed.numel
        except DeltaRefused:
            continue


TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Server:
    """The parameters of an engine, and the reloads into them."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        layout = engine_layout(read_architecture(checkpoint), Grid((0,)), dtype=dtype)
        self.parameters: dict[str, Tensor] = allocate_parameters(layout, 0, device=torch.device("cpu"))
        engine: Any = SimpleNamespace(policy_version=0, begin_update=lambda: None, end_update=lambda version: None)
        engine.incoming = lambda part: self.parameters
        self.reloads = Reloads(engine, checkpoint, dtype, lambda: None)

    def load(self, folder: Path, label: str | None) -> None:
        async def both() -> None:
            asked = asyncio.ensure_future(self.reloads.reload(folder, label))
            await asyncio.sleep(0)
            self.reloads.carry_out()
            await asked

        asyncio.run(both())

    @property
    def bits(self) -> dict[str, Tensor]:
        return {name: tensor.clone().view(torch.uint8) for name, tensor in self.parameters.items()}


@pytest.mark.parametrize("served", TYPES)
@pytest.mark.parametrize("sent", TYPES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_deltas_make_what_the_whole_makes(family: str, sent: str, served: str, tmp_path: Path) -> None:
    """Covers fused matrices, experts and latent attention. A server may keep its weights in another dtype."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family)
    versions = [{name: tensor.to(TYPES[sent]) for name, tensor in tensors_of(checkpoint).items()}]
    versions += [changed_somewhat(versions[0], 0)]
    versions += [changed_somewhat(versions[1], 1, share=0.7)]
    server, other = Server(checkpoint, served), Server(checkpoint, served)
    server.load(write_version(tmp_path / "v0", versions[0], checkpoint, "v0"), "v0")
    for number in (1, 2):
        folder = tmp_path / f"d{number}"
        server.load(write_delta(folder, versions[number - 1], versions[number], f"v{number - 1}", f"v{number}"), None)
        assert server.reloads.label() == f"v{number}"
    other.load(write_version(tmp_path / "v2", versions[2], checkpoint, "v2"), "v2")
    expected = other.bits
    assert server.bits.keys() == expected.keys()
    assert all(torch.equal(bits, expected[name]) for name, bits in server.bits.items())


@pytest.fixture
def rig(tmp_path: Path) -> SimpleNamespace:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3")
    old = tensors_of(checkpoint)
    new = changed_somewhat(old, 0)
    delta = write_delta(tmp_path / "delta", old, new, "v0", "v1", num_files=3)
    server = Server(checkpoint, "float32")
    server.load(write_version(tmp_path / "v0", old, checkpoint, "v0"), "v0")
    return SimpleNamespace(server=server, delta=delta, old=old, new=new, folder=tmp_path)


def refuse(rig: SimpleNamespace, folder: Path, said: str, label: str | None = None) -> None:
    before, held = rig.server.bits, rig.server.reloads.label()
    with pytest.raises(CheckpointError, match=said):
        rig.server.load(folder, label)
    assert rig.server.reloads.label() == held
    assert all(torch.equal(bits, before[name]) for name, bits in rig.server.bits.items()), (
        "the server keeps its weights"
    )


def test_what_does_not_fit_is_refused_before_anything_changes(rig: SimpleNamespace) -> None:
    other = write_delta(rig.folder / "other", rig.old, rig.new, "v7", "v8")
    refuse(rig, other, "changes version v7; expected v0, which is served")
    refuse(rig, rig.delta, "weight_version: got v9 with .*, which makes version v1", label="v9")
    old, new = ({f"a.{name}": tensor for name, tensor in tensors.items()} for tensors in (rig.old, rig.new))
    renamed = write_delta(rig.folder / "renamed", old, new, "v0", "v1")
    refuse(rig, renamed, "has tensor a.* the served model has none of that name")
    damage(rig.delta)
    refuse(rig, rig.delta, "is damaged or cut short")


def test_weights_that_somebody_else_changed_are_of_no_version(rig: SimpleNamespace) -> None:
    """They take no further delta, but they take a whole checkpoint."""
    for parameter in rig.server.parameters.values():
        parameter.view(-1)[-1] += 1.0
    with pytest.raises(CheckpointError, match="differs from the sender's tensor"):
        rig.server.load(rig.delta, "v1")
    assert rig.server.reloads.label() == NO_VERSION
    refuse(rig, rig.delta, f"expected {NO_VERSION}, which is served")
    rig.server.load(rig.folder / "v0", "v0")
    rig.server.load(rig.delta, "v1")
    assert rig.server.reloads.label() == "v1"


def test_what_breaks_off_is_of_no_version(rig: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file disappears in the middle of the reload."""
    compare = served_engine._compare

    def lose(*args: Any) -> None:
        compare(*args)
        for path in rig.delta.glob("*.delta"):
            path.unlink()

    monkeypatch.setattr(served_engine, "_compare", lose)
    said = "cannot be read: No such file or directory, after some of it was applied"
    with pytest.raises(CheckpointError, match=said):
        rig.server.load(rig.delta, "v1")
    assert rig.server.reloads.label() == NO_VERSION
