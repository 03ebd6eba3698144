"""Families whose weights SGLang's own loader puts in place, by the names of the checkpoint."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.errors import EngineLost
from rltrain.models import read_architecture
from rltrain.models.registry import BY_NAMES_IN_SGLANG, FAMILIES
from rltrain.models.vision import Tower
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.layout import Layout, split
from rltrain.rollout.layout import whole_tensors_layout
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_process import SERVER_FOLDER, Server, model_config_of
from rltrain.rollout.servers.sglang_weights import Delivery, NamedWeights
from rltrain.runtime.grid import Grid
from tests.forked.popen import REPOSITORY
from tests.sglang.servers import CPU, PART_BYTES, assert_serves, call, checksums, connected, running
from tests.support.family_checkpoints import CHECKPOINTS, YARN, make_family_checkpoint, tiny_config
from tests.support.jobs import QUICKSTART, column, train
from tests.support.vision_checkpoints import write_checkpoint as write_vision_checkpoint

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
TIMEOUT_S = 800
SPARSE = {"mlp_only_layers": []}
OWN_CODE = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""The configuration file that checkpoints of MiMo contain."""


class Tiny(NamedTuple):
    """A tiny checkpoint of a family: its name in CHECKPOINTS, other settings of it, and keys of its config.json."""

    name: str
    settings: dict[str, Any] = {}  # noqa: RUF012
    keys: dict[str, Any] = {}  # noqa: RUF012
    args: dict[str, Any] = {}  # noqa: RUF012


MIMO_KEYS = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
}
TINY = {
    "phi3": Tiny("phi3"),
    "phi3, long": Tiny("phi4_mini", {"sliding_window": None}),
    "glm4": Tiny("glm4"),
    "gemma2": Tiny("gemma2"),
    "gemma3_text": Tiny("gemma3"),
    "seed_oss": Tiny("seed_oss"),
    "mimo": Tiny("qwen2", keys=MIMO_KEYS, args={"trust_remote_code": True}),
    "qwen2_moe": Tiny("qwen2_moe", SPARSE),
    "deepseek_v3": Tiny("deepseek_v3"),
    "deepseek_v3, no q rank": Tiny("moonlight", {"rope_parameters": YARN}),
    "kimi_k2": Tiny("deepseek_v3", keys={"model_type": "kimi_k2"}),
    "glm4_moe": Tiny("glm4_moe"),
    "glm4_moe_lite": Tiny("glm4_moe_lite"),
    "minimax_m2": Tiny("minimax_m2"),
    "hy_v3": Tiny("hy_v3"),
    "gpt_oss": Tiny("gpt_oss", args={"attention_backend": "intel_amx"}),
    "qwen3_next": Tiny("qwen3_next", SPARSE),
    "qwen3_5_text": Tiny("qwen3_5"),
    "qwen3_5_moe_text": Tiny("qwen3_5_moe"),
}
QUICK = ("phi3",)
WITH_A_TOWER: tuple[Tower, ...] = ("qwen3_5", "qwen3_5_moe")


def tiny_checkpoint(folder: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Path:
    kind, settings = CHECKPOINTS[tiny.name]
    monkeypatch.setitem(CHECKPOINTS, tiny.name, (kind, {**settings, **tiny.settings}))
    make_family_checkpoint(tiny.name, folder)
    (folder / "expected.safetensors").unlink()  # SGLang would load its tensors too
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **tiny.keys}))
    (folder / "configuration_mimo.py").write_text(OWN_CODE)
    return folder


def parts_by_names(checkpoint: Path) -> list[Layout]:
    return split(whole_tensors_layout(read_architecture(checkpoint), Grid((0,))), PART_BYTES)


def delivery_by_names(client: Client, checkpoint: Path) -> Delivery:
    names = NamedWeights.of(read_architecture(checkpoint))
    parts = parts_by_names(checkpoint)
    return Delivery(parts, 0, device=CPU, keep=True, group=None, call=client.call, names=names)


def deliver(delivery: Delivery, checkpoint: Path, version: int, after_part: Callable[[int], None] = id) -> None:
    """Sends a checkpoint's tensors as a weight sync does, and has them verified in every second one."""
    delivery.begin()
    for number, part in enumerate(parts_by_names(checkpoint)):
        load_parameters(checkpoint, part, 0, delivery.tensors(number))
        delivery.arrived(number, verify=version % 2 == 0)
        after_part(number)
    delivery.finish(version)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in TINY if n not in QUICK)])
def test_parts_by_names_make_the_weights_of_a_load_from_files(
    name: str, start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parameters equal those of SGLang's own load. Where it computes without a GPU, log-probs are transformers'."""
    tiny = TINY[name]
    checkpoint = tiny_checkpoint(tmp_path / "model", tiny, monkeypatch)
    architecture = read_architecture(checkpoint)
    assert architecture.family == name.split(",")[0]
    server = start_server(checkpoint, model_config=model_config_of(architecture), args=tiny.args)
    with connected(server) as client:
        from_files = {"model_path": str(checkpoint), "load_format": "auto", "flush_cache": False}
        call(server, "/update_weights_from_disk", from_files)
        expected = checksums(server)
        delivery = delivery_by_names(client, checkpoint)
        delivery.check_layout()
        assert checksums(server) != expected, "unwritten elements would be found"
        for version in (1, 2):
            deliver(delivery, checkpoint, version)
            assert checksums(server) == expected
            assert call(server, "/model_info")["weight_version"] == str(version)
        in_sglang = FAMILIES[architecture.family].sglang
        assert in_sglang is not None
        if not in_sglang.needs_gpu and name != "mimo":  # transformers lacks MiMo
            assert_serves(server, checkpoint)
        delivery.close()
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("kind", WITH_A_TOWER)
def test_a_tower_is_loaded_if_it_is_part_of_the_model(
    kind: Tower, sees: bool, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """Otherwise the server keeps its own one, which no text uses."""
    checkpoint = tmp_path / "model"
    write_vision_checkpoint(checkpoint, kind, num_position_embeddings=64, intermediate_size=64)
    architecture = read_architecture(checkpoint, sees=sees)
    server = start_server(checkpoint, model_config=model_config_of(architecture), needs_tokenizer=True)
    with connected(server) as client:
        from_files = {"model_path": str(checkpoint), "load_format": "auto", "flush_cache": False}
        call(server, "/update_weights_from_disk", from_files)
        (expected,) = checksums(server)
        parts = split(whole_tensors_layout(architecture, Grid((0,))), PART_BYTES)
        names = NamedWeights.of(architecture)
        delivery = Delivery(parts, 0, device=CPU, keep=False, group=None, call=client.call, names=names)
        delivery.check_layout()
        delivery.begin()
        for number, part in enumerate(parts):
            load_parameters(checkpoint, part, 0, delivery.tensors(number))
            delivery.arrived(number)
        delivery.finish(1)
        (found,) = checksums(server)
        others = {name for name in found if found[name] != expected[name]}
        assert all(name.startswith("visual.") for name in others) and bool(others) == (not sees)
        delivery.close()
    server.kill()


def test_every_family_by_names_is_loaded_here() -> None:
    assert {*WITH_A_TOWER, *(name.split(",")[0] for name in TINY)} == {*BY_NAMES_IN_SGLANG}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two checkpoints of one model. Queries have another scale in the second."""
    first = make_family_checkpoint("phi3", tmp_path_factory.mktemp("first"))
    second = tmp_path_factory.mktemp("second")
    model = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(second)
    return [first, second]


@pytest.fixture(scope="module")
def serving(start_server: Callable[..., Server], checkpoints: list[Path]) -> Server:
    return start_server(checkpoints[0])


@pytest.fixture
def client(serving: Server) -> Iterator[Client]:
    running(serving)
    with connected(serving) as client:
        yield client


def test_a_killed_server_gets_the_weights_again(serving: Server, client: Client, checkpoints: list[Path]) -> None:
    delivery = delivery_by_names(client, checkpoints[0])
    delivery.check_layout()
    deliver(delivery, checkpoints[0], 1)
    assert_serves(serving, checkpoints[0])
    with pytest.raises(EngineLost):
        deliver(delivery, checkpoints[1], 2, after_part=lambda part: serving.kill() if part == 1 else None)
    running(serving)
    client.connect(serving.url, serving.token)
    delivery.check_layout()
    delivery.redeliver()
    assert delivery.version == 2
    assert_serves(serving, checkpoints[1])
    delivery.close()


def test_changes_are_written_to_the_kept_weights(serving: Server, client: Client, checkpoints: list[Path]) -> None:
    """The server's own weights cannot be read back by name."""
    delivery = delivery_by_names(client, checkpoints[0])
    delivery.check_layout()
    deliver(delivery, checkpoints[0], 1)
    delivery.begin()
    for number in range(delivery.num_parts):
        for view in delivery.tensors(number, is_kept=True).values():
            view.mul_(1.1)
        delivery.arrived(number, verify=True)
    delivery.finish(2)
    call(serving, "/flush_cache", {})
    assert_serves(serving, checkpoints[1])
    delivery.close()


def test_a_tensor_that_the_server_ignores_is_reported(
    start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", Tiny("phi3"), monkeypatch)
    other = tiny_checkpoint(tmp_path / "other", Tiny("llama_attention_bias"), monkeypatch)
    server = start_server(checkpoint)
    with connected(server) as client:
        delivery = delivery_by_names(client, other)
        delivery.check_layout()
        with pytest.raises(EngineLost, match=r"the model's loader has left out tensor model\.layers\.0\.self_attn"):
            deliver(delivery, other, 1)
        delivery.close()
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_ranks_of_a_server_exchange_their_tensors(real_sglang_python: str, tmp_path: Path, is_damaged: bool) -> None:
    """Both ranks load both tensors, or none of them if a rank finds a damaged one."""
    values = [torch.arange(4.0) + rank for rank in (0, 1)]
    shares = [[[f"t{rank}", "float32", [4], 0, checksum_of(values[rank])]] for rank in (0, 1)]
    address, processes = f"file://{tmp_path}/meeting", []
    for rank in (0, 1):
        (tmp_path / f"memory{rank}").write_bytes(values[rank - (is_damaged and rank == 1)].numpy().tobytes())
        memory = {"kind": "file", "id": "m", "path": f"{tmp_path}/memory{rank}", "bytes": 16}
        reply = tmp_path / f"reply{rank}"
        reply.touch()
        message = {"op": "load_names", "id": "i", "reply": str(reply), "memory": memory, "shares": shares, "rank": rank}
        text = json.dumps({**message, "begins": True, "marks": False})
        command = [real_sglang_python, "-W", "ignore", "-m", "tests.sglang.loading_ranks", str(rank), address, text]
        path = f"{REPOSITORY}:{SERVER_FOLDER}"
        processes.append(
            subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
        )
    told = [process.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1] for process in processes]
    errors = [json.loads((tmp_path / f"reply{rank}").read_text())["error"] for rank in (0, 1)]
    if is_damaged:
        assert "another rank of the server" in errors[0] and "tensor t1 differs from what was staged" in errors[1]
        assert [json.loads(line) for line in told] == [{"t0": [0.0] * 4, "t1": [0.0] * 4}] * 2
        return
    assert errors == [None, None]
    assert [json.loads(line) for line in told] == [{"t0": values[0].tolist(), "t1": values[1].tolist()}] * 2


def test_a_job_draws_from_the_weights_that_it_trains(
    sglang_python: str, quickstart_files: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    """Log-probs of its tokens equal the actor's after every update, of all weights and of changes alone."""
    start, model = quickstart_files / "model", tmp_path / "model"
    vocab_size = transformers.AutoConfig.from_pretrained(start).vocab_size
    sizes = {**SIZES, "vocab_size": vocab_size, "max_position_embeddings": 256, "initializer_range": 0.1}
    transformers.AutoModelForCausalLM.from_config(tiny_config("gemma3", sizes)).save_pretrained(model)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(start / file, model)
    records = train(
        QUICKSTART,
        *(f"model.path={model}", *data_overrides, f"output_dir={tmp_path}/job", "steps=3"),
        *("rollout.engine=sglang", f"rollout.sglang.python={sglang_python}", "rollout.sglang.staging_mb=0.1"),
        *("actor.parallel.tp=1", "data.eval=null", "placement={'actor, reference, rollout, reward': 0}"),
        "batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 2}",
        *("weight_sync={verify: true, delta: {in_shared_memory: true}}", "loss.entropy_coef=1.0"),
        num_ranks=1,
        timeout_s=TIMEOUT_S,
    )
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == 3 and max(differences) <= 1e-4
