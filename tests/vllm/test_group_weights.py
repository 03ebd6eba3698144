"""Weights for real vLLM servers by broadcasts, over a stand-in for NCCL on gloo. Everything else of vLLM is real."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rltrain.checkpoint.safetensors_file import TensorEntry
from rltrain.models import read_architecture
from rltrain.rollout.layout import engine_parts
from rltrain.rollout.servers import update_groups
from rltrain.rollout.servers.calls import Access, Calls, ServerGone
from rltrain.rollout.servers.http_weights import GroupWeights
from rltrain.rollout.servers.protocols import (
    FINISH,
    INIT,
    PAUSE,
    RESUME,
    START,
    VLLM_CONFIG,
    WHOLE_PART_BYTES,
    Receiver,
    VLLMBroadcasts,
    VLLMProtocol,
)
from rltrain.runtime.grid import Grid
from tests.forked.popen import PYTHON_PATH, Popen
from tests.support import http_servers
from tests.support.jobs import column, read_records, start_on_servers, wait_until
from tests.support.nccl_on_gloo import TorchBackend
from tests.support.schedule_configs import make_config
from tests.vllm.servers import CONTEXT, TOKEN, VLLMServer, call

LIMIT_S = 300.0
STEPS = 6
CPU = torch.device("cpu")
WITH_NCCL = (
    *("--weight-transfer-config", '{"backend": "nccl"}'),
    *("--worker-extension-cls", "tests.support.vllm_on_gloo.Extension"),
)


@pytest.fixture(scope="module")
def servers(
    vllm_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], list[VLLMServer]]]:
    """Returns a function that returns so many ready servers with the weights of the first checkpoint at their start."""
    folder, made = tmp_path_factory.mktemp("servers"), list[VLLMServer]()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as started:
        patch.setenv("PYTHONPATH", PYTHON_PATH)

        def ready(count: int) -> list[VLLMServer]:
            for number in range(len(made), count):
                made.append(VLLMServer(vllm_python, checkpoints[0], folder / f"{number}.log", *WITH_NCCL))
                started.callback(made[-1].kill)
            for server in made[:count]:
                server.ensure()
            return made[:count]

        yield ready


@pytest.fixture(autouse=True)
def on_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_groups, "nccl", TorchBackend)


class Sender:
    """The weights of a rank that has the whole tensors of checkpoints."""

    def __init__(self, checkpoint: Path, server: VLLMServer) -> None:
        http = {"weights": "group", "staging_mb": 0.02}
        config = make_config(
            rollout={"engine": "http", "urls": [server.url], "http": http},
            model={"path": str(checkpoint), "dtype": "float32"},
        )
        parts = engine_parts(config, read_architecture(checkpoint), Grid((0,)))
        self.num_parts = len(parts)
        self.weights = GroupWeights([part.plain for part in parts], 0, device=CPU, run="run", update_timeout_s=LIMIT_S)

    async def send(self, server: Receiver, tensors: Mapping[str, Tensor], version: int) -> None:
        self.weights.begin()
        await self.weights.open([server])
        for part in range(self.num_parts):
            for name, tensor in self.weights.tensors(part).items():
                tensor.copy_(tensors[name])
            self.weights.arrived(part)
            await self.weights.pass_on()
        self.weights.complete(version)
        await self.weights.give(server.protocol, server.calls)


def checksums(server: VLLMServer) -> Mapping[str, str]:
    """Returns vLLM's own checksums of all its weights."""
    status, answer = call(server, "/weight_checker", {"action": "checksum"})
    assert status == 200, answer
    found: Mapping[str, str] = json.loads(answer)["checksums"]
    return found


def of_folders(server: VLLMServer, folders: list[Path]) -> list[Mapping[str, str]]:
    """Returns the checksums of weights that vLLM loads from each of these folders itself."""
    found = []
    for folder in folders:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert call(server, "/collective_rpc", body)[0] == 200
        found.append(checksums(server))
    assert len({json.dumps(one, sort_keys=True) for one in found}) == len(folders)
    return found


def test_broadcast_weights_equal_those_that_it_loads_itself(
    servers: Callable[[int], list[VLLMServer]], checkpoints: list[Path]
) -> None:
    [server] = servers(1)
    expected = of_folders(server, checkpoints)
    sender = Sender(checkpoints[0], server)
    assert sender.num_parts > 4

    async def run() -> None:
        protocol, calls = VLLMProtocol(), Calls(server.url, Access(TOKEN))
        assert await protocol.prepare_for_weights(calls, "group") is None
        described = await protocol.describe(calls)
        assert (described.num_ranks, described.max_context_tokens) == (1, CONTEXT)
        for version, number in enumerate((0, 1, 0)):
            await sender.send(Receiver(protocol, calls), load_file(checkpoints[number] / "model.safetensors"), version)
            assert await protocol.version(calls) == f"run.{version}"
            assert checksums(server) == expected[number]
        await sender.weights.forget(calls)
        await calls.close()

    asyncio.run(run())
    sender.weights.close()


def test_nothing_of_a_failed_update_is_left_in_the_next(
    servers: Callable[[int], list[VLLMServer]], checkpoints: list[Path]
) -> None:
    """vLLM keeps the parts of a layer until it has them all. Here an update fails between two parts of a layer."""
    [server] = servers(1)
    expected = of_folders(server, checkpoints)
    first = load_file(checkpoints[0] / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"

    async def run() -> None:
        protocol, calls, way = VLLMProtocol(), Calls(server.url, Access(TOKEN)), VLLMBroadcasts()
        group = way.group("127.0.0.1", 1, CPU, LIMIT_S)
        await asyncio.gather(way.join(calls, group, LIMIT_S), asyncio.to_thread(group.join))
        await way.begin(calls, LIMIT_S)
        for name in (query, "model.layers.0.no_such.weight"):
            entry = TensorEntry(name, torch.float32, tuple(first[query].shape))
            sent = first[query].flatten().view(torch.uint8)
            outcome, _ = await asyncio.gather(
                way.receive(calls, group.name, [entry], LIMIT_S),
                asyncio.to_thread(group.broadcast, sent),
                return_exceptions=True,
            )
            assert isinstance(outcome, ServerGone) == (name != query)
        group.close()
        await calls.close()  # the server closes a connection after an error
        calls = Calls(server.url, Access(TOKEN))
        assert await calls.get("/is_paused") == {"is_paused": True}
        sender = Sender(checkpoints[1], server)
        await sender.send(Receiver(protocol, calls), load_file(checkpoints[1] / "model.safetensors"), 5)
        assert checksums(server) == expected[1] and await protocol.version(calls) == "run.5"
        assert await calls.get("/is_paused") == {"is_paused": False}
        await sender.weights.forget(calls)
        await calls.close()
        sender.weights.close()

    asyncio.run(run())


def test_a_server_without_the_engine_is_refused(server: VLLMServer) -> None:
    """The server of the other tests has no engine for weight transfers."""

    async def run() -> str | None:
        calls = Calls(server.url, Access(TOKEN))
        found = await VLLMProtocol().prepare_for_weights(calls, "group")
        await calls.close()
        return found

    assert "its engine for weight transfers is missing; start it with" in str(asyncio.run(run()))


UPDATE = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}}
OF_THREE_BYTES = {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "AAAA"}
PACKED = {"packed": True, "packed_buffer_size_bytes": WHOLE_PART_BYTES, "packed_num_buffers": 1}
CONVERSATION: list[tuple[str, Any]] = [
    ("/is_paused", None),
    ("/get_world_size", None),
    (PAUSE, {}),
    ("/is_paused", None),
    (START, {}),
    (START, {}),
    ("/shutdown_weight_transfer_engine", {}),
    ("/update_weights", UPDATE),
    ("/update_weights", UPDATE),
    (FINISH, {}),
    (START, {}),
    (FINISH, {"weight_version": "run.9"}),
    ("/weight_info", None),
    ("/shutdown_weight_transfer_engine", {}),
    (INIT, {"init_info": OF_THREE_BYTES | PACKED}),
    (RESUME, {}),
]
"""Calls for weights in order, right ones and wrong ones: paths and bodies. None is a GET."""


def test_the_stand_in_answers_as_a_real_server(servers: Callable[[int], list[VLLMServer]]) -> None:
    stand_in = http_servers.StandInServer("vllm", transfers="nccl")
    [server] = servers(1)
    tokens = {server.url: TOKEN, stand_in.url: http_servers.TOKEN}

    def answer(url: str, path: str, body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {tokens[url]}"}
        told = httpx.request("GET" if body is None else "POST", url + path, json=body, headers=headers, timeout=LIMIT_S)
        return told.status_code, told.json()

    assert [answer(stand_in.url, *one) for one in CONVERSATION] == [answer(server.url, *one) for one in CONVERSATION]
    config, expected = (answer(url, VLLM_CONFIG, None)[1]["vllm_config"] for url in (stand_in.url, server.url))
    assert config["weight_transfer_config"] == expected["weight_transfer_config"]
    assert config["parallel_config"].items() <= expected["parallel_config"].items()
    stand_in.die()


def start_job(urls: Path, output: Path, model: Path, data: str) -> Popen:
    sizes = ("batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 1}", f"steps={STEPS}", "data.eval=null")
    reward = "reward={function: 'tests.support.peer_rewards:trl_by_ids', num_workers: 1}"  # lengths
    return start_on_servers(
        urls,
        TOKEN,
        *(f"model.path={model}", "placement={'actor, reference, rollout, reward': 0}", "actor.parallel.tp=1"),
        *("rollout.http.weights=group", "rollout.http.staging_mb=0.1", "rollout.http.reread_s=0.1"),
        *(*sizes, reward, data, f"output_dir={output}"),
        num_ranks=1,
        script="tests/support/nccl_on_gloo_train.py",
    )


@pytest.mark.slow
def test_a_job_broadcasts_its_weights_and_servers_may_come_and_die(
    servers: Callable[[int], list[VLLMServer]], checkpoints: list[Path], data_overrides: list[str], tmp_path: Path
) -> None:
    first, second = servers(2)
    urls, output = tmp_path / "urls", tmp_path / "job"
    urls.write_text(f"{first.url}\n")
    old = weight_version(second)
    with start_job(urls, output, checkpoints[0], data_overrides[0]) as job:
        wait_until(lambda: (output / "metrics.jsonl").exists(), job, LIMIT_S)
        urls.write_text(f"{first.url}\n{second.url}\n")
        wait_until(lambda: weight_version(second) != old, job, LIMIT_S)
        second.kill()
        stdout, stderr = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, f"{stdout[-3000:]}\n{stderr[-6000:]}"
    records: list[dict[str, Any]] = read_records(output)
    assert [record["step"] for record in records] == [*range(STEPS)]
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 1e-3
    assert max(column(records, "train/staleness_max")) == 0 and min(column(records, "train/grad_norm")) > 0
    assert weight_version(first).endswith(f".{STEPS - 1}")


def weight_version(server: VLLMServer) -> str:
    return str(json.loads(call(server, "/weight_info")[1])["weight_version"])
