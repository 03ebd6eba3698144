"""Tests of damaged input of every kind. It is read correctly or refused by an error of rltrain, without a crash or
hang."""

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rltrain.checkpoint.hf_reader import HfFolder
from rltrain.checkpoint.run_files import Contents, find_damage, read_contents, read_manifest, write_files
from rltrain.checkpoint.run_folder import CheckpointFolder, Resumed, name_of
from rltrain.config.loader import load_config
from rltrain.data.experience import Experience
from rltrain.errors import UserError
from rltrain.exchange.exchange import Shipment, body_bytes, decode, encode
from rltrain.rollout.servers.in_sglang import rltrain_weight_loader
from rltrain.runtime.messages import Connection, MessageServer, PeerLost
from tests.support.mutations import mutated_bytes, mutated_json
from tests.support.talking_engine import OWNER, Endpoint, endpoint

CONFIG = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
FEW = 200
MANY = int(os.environ.get("RLTRAIN_FUZZ_COUNT", "1000"))
"""The number of damaged inputs. RLTRAIN_FUZZ_COUNT overrides it."""
COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
FIELDS = ("group_ids", "lengths", "sample_ids", "tokens", "reward_parts")
MESSAGE = {"model": "model", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **MESSAGE,
        "stop": ["x"],
        "n": 1,
        "logprobs": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    "/v1/completions": {"model": "model", "prompt": "hi", "max_tokens": 2, "logprobs": 1, "seed": 3},
    "/v1/responses": {"model": "model", "input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2},
    "/v1/messages": {**MESSAGE, "system": "s", "stop_sequences": ["x"]},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2, "temperature": 1.0}, "return_logprob": True},
    "/sessions": {"metadata": {"row": 1}, "seed": 3},
}


def shipment() -> Shipment:
    lengths = torch.tensor([3, 1, 2])
    experience = Experience(
        group_ids=torch.tensor([0, 0, 4]),
        lengths=lengths,
        sample_ids=torch.tensor([1, 2, 3]),
        tokens=torch.arange(6),
        reward_parts=torch.ones(3, 2),
    )
    return Shipment(experience, torch.tensor([4, 0, 0, 0, 2]), torch.tensor([0, 0, 0, 0, 1]))


@pytest.mark.parametrize("count", COUNTS)
def test_what_an_exchange_brings(count: int) -> None:
    header, body = encode(shipment(), FIELDS)
    headers = mutated_bytes(header.numpy().tobytes(), count)
    bodies = mutated_bytes(body.numpy().tobytes(), count, seed=1)
    for number, (first, second) in enumerate(zip(headers, bodies, strict=True)):
        damaged = bytearray(first[: header.nbytes].ljust(header.nbytes, b"\0"))
        told = header if number % 2 else torch.frombuffer(damaged, dtype=torch.int64)
        try:
            arrived = torch.zeros(body_bytes(told, FIELDS), dtype=torch.uint8)
            came = torch.tensor(bytearray(second[: len(arrived)])) if second else torch.zeros(0, dtype=torch.uint8)
            arrived[: len(came)] = came.to(torch.uint8)
            found = decode(told, arrived, FIELDS).experience
        except UserError:
            continue
        assert int(found.lengths.sum()) == len(found.tokens)
        assert len(found.group_ids) == len(found.lengths)


@pytest.mark.parametrize("count", COUNTS)
def test_what_another_rank_says(count: int) -> None:
    for line in mutated_json({"token": "t", "answers": [{"episode": 3, "text": "x"}], "n": 1.5}, count):
        ours, theirs = socket.socketpair()
        theirs.sendall(line[:60000] + b"\n")
        connection = Connection.__new__(Connection)
        ours.setblocking(False)
        connection.socket, connection._received, connection._unsent = ours, bytearray(), bytearray()
        try:
            assert all(isinstance(message, dict) for message in connection.receive())
        except PeerLost:
            continue
        finally:
            ours.close()
            theirs.close()


def test_who_does_not_know_the_token_harms_nobody() -> None:
    server = MessageServer("127.0.0.1", "secret")
    try:
        for line in [b'{"token": "\\ud800"}', *mutated_json({"token": "secret!"}, 50)]:
            with socket.create_connection(("127.0.0.1", server.port)) as peer:
                peer.sendall(line[:60000] + b"\n")
                for _ in range(3):
                    server.receive(0.001)
        for _ in range(10):
            assert server.receive(0.001) == []
    finally:
        server.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Resumed:
    folder = CheckpointFolder(tmp_path)
    partial = folder.begin(3)
    contents = Contents({"a": torch.arange(6), "b": torch.ones(2, 3)}, {"random": "{}"})
    folder.complete(3, write_files(partial, {"ranks/rank_00000.safetensors": contents}), {"step": 3}, keep=0)
    return Resumed(tmp_path / name_of(3), 3)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["manifest.json", "run.json"])
def test_what_a_checkpoint_says_of_itself(checkpoint: Resumed, name: str, count: int) -> None:
    path = checkpoint.folder / name
    for damaged in mutated_json(json.loads(path.read_text()), count // 2):
        path.write_bytes(damaged)
        try:
            manifest = read_manifest(checkpoint.folder)
            assert find_damage(checkpoint.folder, manifest, manifest, lambda: None) or name != "run.json"
            assert isinstance(checkpoint.run, dict)
        except UserError:
            continue


@pytest.mark.parametrize("count", COUNTS)
def test_tensors_in_files(tmp_path: Path, count: int) -> None:
    whole = save({"a": torch.arange(6), "b": torch.ones(2, 3)}, {"format": "pt"})
    path = tmp_path / "model.safetensors"
    for damaged in mutated_bytes(whole, count, first=200):
        path.unlink(missing_ok=True)  # mapped memory stays valid
        path.write_bytes(damaged)
        try:
            found = read_contents(path)
            assert all(tensor.numel() <= len(whole) for tensor in found.tensors.values())
            assert HfFolder(tmp_path, "model.path").file_of.keys() == found.tensors.keys()
        except UserError:
            continue


@pytest.mark.filterwarnings("ignore:Truncating the start/stop/step of slice")
@pytest.mark.parametrize("count", COUNTS)
def test_what_a_weight_sync_tells_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Its scheduler survives. If it reports no error and the checksums arrived, it has the weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rltrain_weight_loader, "_mapped", {})
    model, staged = torch.nn.Linear(4, 3), {"weight": torch.ones(3, 4), "bias": torch.full((3,), 2.0)}
    Path("memory").write_bytes(b"".join(tensor.numpy().tobytes() for tensor in staged.values()))
    checksums = [rltrain_weight_loader.checksum_of(tensor) for tensor in staged.values()]
    fields = [["weight", "float32", [3, 4], 0, checksums[0]], ["bias", "float32", [3], 48, checksums[1]]]
    memory = {"id": "m", "kind": "file", "path": "memory", "bytes": 60}
    message = {"op": "load", "id": 1, "reply": "reply", "memory": memory, "fields": fields}
    num_loaded = 0
    for damaged in mutated_json(message, count):
        Path("reply").write_bytes(b"")
        model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in staged.items()})
        rltrain_weight_loader.load(model, [(damaged.decode(errors="surrogateescape"), torch.zeros(0))])
        reply = json.loads(Path("reply").read_bytes() or b'{"error": "none came"}')
        if reply["error"] is None and all(f"{checksum}]" in damaged.decode(errors="replace") for checksum in checksums):
            num_loaded += 1
            assert all(torch.equal(value, staged[name]) for name, value in model.state_dict().items()), damaged
    assert num_loaded


@pytest.mark.parametrize("count", [FEW // 4, pytest.param(MANY // 10, marks=pytest.mark.slow)])
def test_configs(tmp_path: Path, count: int) -> None:
    path = tmp_path / "config.yaml"
    for damaged in mutated_bytes(CONFIG.read_bytes()[:700], count):
        path.write_bytes(damaged)
        try:
            load_config(path)
        except UserError:
            continue


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(lambda context: "ok") as running:
        yield running


@pytest.mark.parametrize("count", COUNTS)
def test_bodies_of_requests(served: Endpoint, count: int) -> None:
    address = served.url.removeprefix("http://")
    for path, body in BODIES.items():
        connection = http.client.HTTPConnection(address, timeout=10)
        for damaged in mutated_json(body, count // 3 // len(BODIES)):
            headers = {"Authorization": f"Bearer {OWNER}", "Content-Type": "application/json"}
            connection.request("POST", path, damaged, headers)
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status < 500, (path, damaged[:300], said)
            assert path != "/sessions" or answer.status != 200 or json.loads(said)
        connection.close()
