"""Families whose weights SGLang's own loader puts in place, by the names of the checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.errors import EngineLost
from rltrain.models import canonical_tensors, quantizable_tensors, read_architecture
from rltrain.models.registry import BY_NAMES_IN_SGLANG, FAMILIES
from rltrain.models.vision import Tower
from rltrain.reshard.copy_table import allocate_parameters, quantize_blocks
from rltrain.rollout.layout import engine_by_names
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_process import Server, kept_modules_of, model_config_of
from rltrain.runtime.grid import Grid
from tests.sglang.loading_ranks import Sender
from tests.sglang.servers import (
    CPU,
    NARROW,
    assert_serves,
    call,
    checksums,
    connected,
    loaded_by_sglang,
    running,
    started,
)
from tests.support.checkpoint_files import changed_somewhat, tensors_of
from tests.support.family_checkpoints import CHECKPOINTS, YARN, make_family_checkpoint, tiny_config
from tests.support.jobs import QUICKSTART, column, train
from tests.support.tiny_checkpoints import SHAPE
from tests.support.torchrun import run_distributed
from tests.support.vision_checkpoints import HIDDEN
from tests.support.vision_checkpoints import write_checkpoint as write_vision_checkpoint

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
TIMEOUT_S = 800
RANKS = "tests.sglang.loading_ranks"
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
DIRECT = {
    "llama": Tiny("llama"),
    "mistral": Tiny("mistral"),
    "qwen2": Tiny("qwen2"),
    "qwen3": Tiny("qwen3"),
    "qwen3_moe": Tiny("qwen3_moe", SPARSE),
    "mixtral": Tiny("mixtral"),
}
"""Families whose parameters in SGLang are written directly. Here they are only compared on two ranks."""
QUICK = ("phi3",)
WITH_A_TOWER: tuple[Tower, ...] = ("qwen3_5", "qwen3_5_moe")


BLOCKS: dict[str, Any] = {
    **{"hidden_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    **dict.fromkeys(NARROW, 256),
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    **{"linear_value_head_dim": 64, "num_hidden_layers": 2},
}
"""Sizes of which two ranks have whole blocks of FP8. SGLang expects this."""
LONG_HEADS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
WITHOUT_FP8 = ("phi3", "llama", "mistral", "gpt_oss")
"""SGLang's loader drops scales of the first three, so it is no reference. The last one's experts cannot be rounded."""


def tiny_checkpoint(
    folder: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, sizes: Mapping[str, Any] = MappingProxyType(NARROW)
) -> Path:
    kind, settings = CHECKPOINTS[tiny.name]
    settings = {**settings, **tiny.settings}
    given = {key: size for key, size in sizes.items() if key in {**SHAPE, **settings}}
    monkeypatch.setitem(CHECKPOINTS, tiny.name, (kind, settings | given))
    make_family_checkpoint(tiny.name, folder)
    (folder / "expected.safetensors").unlink()  # SGLang would load its tensors too
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **tiny.keys}))
    (folder / "configuration_mimo.py").write_text(OWN_CODE)
    return folder


def spec_of(checkpoint: Path, *, sees: bool = False) -> dict[str, Any]:
    architecture = read_architecture(checkpoint, sees=sees)
    return {"model_config": model_config_of(architecture), "kept_modules": kept_modules_of(architecture)}


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
        expected = loaded_by_sglang(server, checkpoint)
        sender = Sender(client.call, checkpoint)
        assert checksums(server) != expected, "unwritten elements would be found"
        for version in (1, 2):
            sender.send(checkpoint, version)
            assert checksums(server) == expected
            assert call(server, "/model_info")["weight_version"] == str(version)
        in_sglang = FAMILIES[architecture.family].sglang
        assert in_sglang is not None
        if not in_sglang.needs_gpu and name != "mimo":  # transformers lacks MiMo
            assert_serves(server, checkpoint)
        sender.delivery.close()
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "fp8"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("kind", WITH_A_TOWER)
def test_a_tower_is_loaded_if_it_is_part_of_the_model(
    kind: Tower,
    sees: bool,
    num_ranks: int,
    fp8: bool,
    start_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the server keeps its own one, which no text uses. It is never in FP8."""
    checkpoint = tmp_path / "model"
    text: dict[str, Any] = BLOCKS | {"rope_parameters": LONG_HEADS, "num_hidden_layers": 2} if fp8 else NARROW
    tower = {"num_position_embeddings": 64, "intermediate_size": text["intermediate_size"]}
    tower["out_hidden_size"] = text.get("hidden_size", HIDDEN)
    write_vision_checkpoint(checkpoint, kind, text=text, **tower)
    precision = {"dtype": "bfloat16" if fp8 else "float32", "fp8": fp8}
    spec = {**spec_of(checkpoint, sees=sees), "needs_tokenizer": True, **precision}
    server = started(start_server, monkeypatch, checkpoint, num_ranks, **spec)
    files = quantised(checkpoint, tmp_path / "quantised", sees=True) if fp8 else checkpoint
    expected = loaded_by_sglang(server, files)
    told = {"url": server.url, "token": server.token, "checkpoints": [str(checkpoint)], "sees": sees, **precision}
    found = run_distributed(f"{RANKS}:send_in_turn", num_ranks, told)[0][0]
    assert len(found) == len(expected) == num_ranks
    for of, wanted in zip(found, expected, strict=True):
        others = {name for name in of if of[name] != wanted[name]}
        assert all(name.startswith("visual.") for name in others) and bool(others) == (not sees)
        assert any("scale_inv" in name for name in of) == fp8
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
    sender = Sender(client.call, checkpoints[0])
    sender.send(checkpoints[0], 1)
    assert_serves(serving, checkpoints[0])
    with pytest.raises(EngineLost):
        sender.send(checkpoints[1], 2, after_part=lambda part: serving.kill() if part == 1 else None)
    running(serving)
    client.connect(serving.url, serving.token)
    sender.delivery.check_layout()
    sender.delivery.redeliver()
    assert sender.delivery.version == 2
    assert_serves(serving, checkpoints[1])
    sender.delivery.close()


def test_changes_are_written_to_the_kept_weights(serving: Server, client: Client, checkpoints: list[Path]) -> None:
    """The server's own weights cannot be read back by name."""
    sender = Sender(client.call, checkpoints[0])
    sender.send(checkpoints[0], 1)
    sender.send(checkpoints[1], 2, as_changes=True)
    call(serving, "/flush_cache", {})
    assert_serves(serving, checkpoints[1])
    sender.delivery.close()


def test_a_tensor_that_the_server_ignores_is_reported(
    start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", Tiny("phi3"), monkeypatch)
    other = tiny_checkpoint(tmp_path / "other", Tiny("llama_attention_bias"), monkeypatch)
    server = start_server(checkpoint)
    with connected(server) as client:
        sender = Sender(client.call, other)
        with pytest.raises(EngineLost, match=r"the model's loader has left out tensor model\.layers\.0\.self_attn"):
            sender.send(other, 1)
        sender.delivery.close()
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY | DIRECT)
def test_ranks_of_a_server_load_their_slices(
    name: str, start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both ranks all parameters equal those of SGLang's own load, after whole syncs and after changes."""
    tiny = (TINY | DIRECT)[name]
    checkpoint = tiny_checkpoint(tmp_path / "model", tiny, monkeypatch)
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    save_file(changed_somewhat(tensors_of(checkpoint), 0), changed / "model.safetensors", {"format": "pt"})
    server = started(start_server, monkeypatch, checkpoint, 2, args=tiny.args, **spec_of(checkpoint))
    expected = {folder: loaded_by_sglang(server, folder) for folder in (changed, checkpoint)}
    first, second = expected[checkpoint]
    assert first != second and expected[changed] != expected[checkpoint]
    turns = [checkpoint, changed, checkpoint]
    told = {"url": server.url, "token": server.token, "checkpoints": [*map(str, turns)], "direct": name in DIRECT}
    found, _ = run_distributed(f"{RANKS}:send_in_turn", 2, told)
    assert found == [expected[folder] for folder in turns]
    in_sglang = FAMILIES[read_architecture(checkpoint).family].sglang
    assert in_sglang is not None
    if not in_sglang.needs_gpu and name != "mimo":  # transformers lacks MiMo
        assert_serves(server, checkpoint)
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TINY | DIRECT if "," not in name and name not in WITHOUT_FP8])
def test_ranks_of_a_server_load_their_slices_in_fp8(
    name: str, start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both ranks parameters and scales equal those of SGLang's own load of a checkpoint in FP8."""
    tiny = (TINY | DIRECT)[name]
    checkpoint = tiny_checkpoint(tmp_path / "model", tiny, monkeypatch, BLOCKS)
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    save_file(changed_somewhat(tensors_of(checkpoint), 0), changed / "model.safetensors", {"format": "pt"})
    in_fp8 = {"dtype": "bfloat16", "fp8": True}
    server = started(start_server, monkeypatch, checkpoint, 2, args=tiny.args, **spec_of(checkpoint), **in_fp8)
    turns = [checkpoint, changed, checkpoint]
    expected = [
        loaded_by_sglang(server, quantised(path, tmp_path / f"quantised{number}")) for number, path in enumerate(turns)
    ]
    assert expected[0] == expected[2] != expected[1] and any("scale_inv" in parameter for parameter in expected[0][0])
    told = {"url": server.url, "token": server.token, "checkpoints": [*map(str, turns)], **in_fp8}
    found, _ = run_distributed(f"{RANKS}:send_in_turn", 2, told | {"direct": name in DIRECT})
    assert found == expected
    server.kill()


def quantised(checkpoint: Path, folder: Path, *, sees: bool = False) -> Path:
    """Writes the checkpoint in blocks of FP8, in the format of DeepSeek and Qwen, and returns its folder."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    architecture = read_architecture(checkpoint, sees=sees)
    layout = engine_by_names(architecture, Grid((0,)), dtype="bfloat16", fp8=False).plain
    tensors = allocate_parameters(layout, 0, device=CPU)
    load_parameters(checkpoint, layout, 0, tensors)
    for name in np.array(canonical_tensors(architecture).names)[quantizable_tensors(architecture)].tolist():
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_no_rank_of_a_server_loads_if_one_finds_damage(
    start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", Tiny("phi3"), monkeypatch)
    server = started(start_server, monkeypatch, checkpoint, 2)
    told = {"url": server.url, "token": server.token, "checkpoint": str(checkpoint)}
    (failure, has_loaded_nothing), _ = run_distributed(f"{RANKS}:send_damaged", 2, told)
    assert failure.endswith("another rank of the server cannot read its weights") and has_loaded_nothing
    server.kill()


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
