"""The arguments of an SGLang server: who may set which, and what the installed version has to say. Needs no SGLang."""

import argparse
import importlib
import json
import logging
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from rltrain.errors import ConfigError
from rltrain.rollout.servers.sglang_engine import build_sglang
from rltrain.rollout.servers.sglang_process import (
    MIN_VERSION,
    SERVER_FOLDER,
    AdapterSpec,
    ServerSpec,
    check_arguments,
    server_arguments,
    server_environment,
)
from tests.unit.schedule_configs import make_config
from tests.unit.test_sglang_process import make_spec

NAMES = ["attention_backend", "tp_size", "tensor_parallel_size", "page_size"]


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., ServerSpec]:
    """answer(args, **reply): a spec with these args, whose interpreter answers with this reply."""

    def make(args: dict[str, Any], **reply: Any) -> ServerSpec:
        fields = {"tensor_parallel_size": "tp_size"}
        known = {name: fields.get(name, name) for name in args if name in NAMES}
        full = {"version": MIN_VERSION, "names": NAMES, "fields": known, "problem": None} | reply
        (tmp_path / "reply.json").write_text(json.dumps(full))
        return make_spec(tmp_path, **args)

    return make


def test_good_arguments_pass_and_are_asked_about_once(answer: Callable[..., ServerSpec], tmp_path: Path) -> None:
    spec = answer({"attention_backend": "fa3"})
    for _ in range(2):
        check_arguments(spec)
    assert (tmp_path / "asked").read_text() == "rltrain_arguments.py\n"


def test_an_unknown_argument_is_refused_with_the_nearest(answer: Callable[..., ServerSpec]) -> None:
    with pytest.raises(
        ConfigError, match=rf"rollout\.sglang\.args\.atention_backend: SGLang {MIN_VERSION} .* is attention_backend$"
    ):
        check_arguments(answer({"atention_backend": "fa3"}))


def test_the_head_is_as_wide_as_the_trainers(tmp_path: Path) -> None:
    plain, wide = (replace(make_spec(tmp_path), wide_head=wide) for wide in (False, True))
    assert "enable_fp32_lm_head" not in server_arguments(plain, 1, 2)["own"]
    assert server_arguments(wide, 1, 2)["own"]["enable_fp32_lm_head"] is True


@pytest.mark.parametrize("name", ["tp_size", "tensor_parallel_size"])
def test_what_rltrain_sets_is_refused_by_every_name(answer: Callable[..., ServerSpec], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"args\.{name}: cannot be chosen .* is rollout\.parallel\.tp; remove"):
        check_arguments(answer({name: 2}))


def test_what_rltrain_sets_is_refused_without_asking(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.args\.api_key: .* a random one"):
        check_arguments(replace(make_spec(tmp_path, api_key="x"), python="/nowhere/python"))


def test_what_sglang_says_about_a_value_is_passed_on(answer: Callable[..., ServerSpec]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.args: .* argument --page-size: invalid int value: 'x'"):
        check_arguments(answer({"page_size": "x"}, problem="argument --page-size: invalid int value: 'x'"))


@pytest.mark.parametrize(("name", "value"), [("enable_hierarchical_cache", True), ("speculative_algorithm", "NGRAM")])
def test_what_loses_routing_is_refused_where_that_is_replayed(
    answer: Callable[..., ServerSpec], name: str, value: object
) -> None:
    spec = answer({name: value}, fields={name: name})
    check_arguments(spec)
    with pytest.raises(ConfigError, match=rf"args\.{name}: got .* with model\.router_replay rollout, but .*; remove"):
        check_arguments(replace(spec, returns_routing=True))


def test_routing_is_asked_for_where_it_is_replayed_and_nowhere_else(
    answer: Callable[..., ServerSpec], tmp_path: Path
) -> None:
    plain, replayed = (replace(make_spec(tmp_path), returns_routing=returns) for returns in (False, True))
    assert "enable_return_routed_experts" not in server_arguments(plain, 1, 2)["own"]
    assert server_arguments(replayed, 1, 2)["own"]["enable_return_routed_experts"] is True
    with pytest.raises(ConfigError, match=r"args\.enable_return_routed_experts: .* follows from model\.router_replay"):
        check_arguments(answer({"enable_return_routed_experts": True}))


@pytest.mark.parametrize("version", ["0.5.9", "0.4.99", "0.5.22.post3"])
def test_an_old_version_is_refused(answer: Callable[..., ServerSpec], version: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.python: .* has SGLang {version}; expected {MIN_VERSION}"):
        check_arguments(answer({}, version=version))


@pytest.mark.parametrize("version", [f"{MIN_VERSION}.post1", "0.5.100", "0.6.0rc1", "1.0"])
def test_a_newer_version_is_taken(answer: Callable[..., ServerSpec], version: str) -> None:
    check_arguments(answer({}, version=version))


def test_an_interpreter_without_sglang_is_refused(answer: Callable[..., ServerSpec], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python: .* No module named 'sglang'.* name the interp"):
        check_arguments(answer({}, missing="ModuleNotFoundError: No module named 'sglang'"))
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python: cannot run /nowhere/python: No such file"):
        check_arguments(replace(make_spec(tmp_path), python="/nowhere/python"))


def test_an_interpreter_that_fails_is_shown(tmp_path: Path) -> None:  # there is no reply.json
    with pytest.raises(ConfigError, match=r"(?s)rollout\.sglang\.python: .*exit status 1.*FileNotFoundError"):
        check_arguments(make_spec(tmp_path))


def test_what_rltrain_sets_and_what_it_proposes(tmp_path: Path) -> None:
    given = server_arguments(make_spec(tmp_path, mem_fraction_static=0.5), port=1, rendezvous_port=2)
    own, defaults = given["own"], given["defaults"]
    assert given["args"] == {"mem_fraction_static": 0.5}
    assert (own["port"], own["nccl_port"], own["tp_size"], own["host"]) == (1, 2, 1, "127.0.0.1")
    assert own["skip_tokenizer_init"] and own["context_length"] > 16
    assert defaults["load_format"] == "dummy" and not own.keys() & defaults.keys()
    assert defaults["max_total_tokens"] >= 4 * 16  # every running request may grow to its longest
    big = replace(make_spec(tmp_path), max_running_requests=10**4, max_context_tokens=10**5)
    assert 10**5 < server_arguments(big, 1, 2)["defaults"]["max_total_tokens"] < 10**6
    on_gpu = server_arguments(replace(big, device="cuda", gpus=("3",)), 1, 2)["defaults"]
    assert on_gpu.keys() == {"load_format", "log_level_http", "disable_overlap_schedule"}


def test_adapters_have_room_beside_the_base(tmp_path: Path) -> None:
    plain = make_spec(tmp_path)
    assert "enable_lora" not in server_arguments(plain, 1, 2)["own"]
    adapted = replace(plain, adapter=AdapterSpec(rank=4, alpha=8.0, targets=("o_proj", "q_proj")))
    own = server_arguments(adapted, 1, 2)["own"]
    assert own["enable_lora"] and own["max_lora_rank"] == 4 and own["max_loras_per_batch"] == 2
    assert own["lora_target_modules"] == ["o_proj", "q_proj"]


def test_weights_in_fp8_are_announced_as_a_checkpoint_of_them_announces_itself(tmp_path: Path) -> None:
    plain = make_spec(tmp_path, json_model_override_args='{"rope_theta": 1.0}')
    assert "json_model_override_args" not in server_arguments(plain, 1, 2)["own"]
    own = server_arguments(replace(plain, fp8=True), 1, 2)["own"]
    overrides = json.loads(own["json_model_override_args"])
    assert overrides["rope_theta"] == 1.0
    assert overrides["quantization_config"]["quant_method"] == "fp8"
    assert overrides["quantization_config"]["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("role", ["rollout", "judge"])
@pytest.mark.parametrize("ranks, dtype, key", [((0, 1), "auto", "parallel.tp"), ((0,), "fp8", "dtype")])
def test_without_a_gpu_some_things_are_refused(ranks: tuple[int, ...], dtype: str, key: str, role: str) -> None:
    config = make_config(**{role: {"engine": "sglang", "dtype": dtype}})
    world = SimpleNamespace(device=torch.device("cpu"))
    site = SimpleNamespace(role=role, settings=getattr(config, role), ranks=ranks, world=world)
    with pytest.raises(ConfigError, match=f"{role}.{key}: got .* without a GPU; expected .*{role}.engine: embedded"):
        build_sglang(site, leave=lambda: None)  # type: ignore[arg-type]


def test_a_judge_s_server_is_described_by_its_own_section(answer: Callable[..., ServerSpec]) -> None:
    spec = replace(answer({"tp_size": 2}), role="judge")
    with pytest.raises(
        ConfigError, match=r"judge\.sglang\.args\.tp_size: cannot be .* it is judge\.parallel\.tp; remove"
    ):
        check_arguments(spec)
    with pytest.raises(ConfigError, match=r"judge\.sglang\.args\.model_path: .* it is judge\.path; remove"):
        check_arguments(replace(spec, args={"model_path": "x"}))
    with pytest.raises(ConfigError, match=r"judge\.sglang\.python: .* has SGLang 0\.4"):
        check_arguments(replace(answer({}, version="0.4"), role="judge"))


@pytest.mark.parametrize(
    ("device", "draws_during_syncs", "disabled"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, True), ("cpu", False, True)],
)
def test_steps_overlap_where_no_batch_is_half_done_when_weights_come(
    tmp_path: Path, device: Literal["cuda", "cpu"], draws_during_syncs: bool, disabled: bool
) -> None:
    spec = replace(make_spec(tmp_path), device=device, draws_during_syncs=draws_during_syncs)
    assert server_arguments(spec, 1, 2)["defaults"]["disable_overlap_schedule"] is disabled


def test_cuda_graphs_leave_with_the_memory_that_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    monkeypatch.delenv(variable, raising=False)
    stays, leaves = make_spec(tmp_path), replace(make_spec(tmp_path), memory_saver=True)
    assert variable not in server_environment(stays)
    assert server_environment(leaves)[variable] == "1"
    monkeypatch.setenv(variable, "0")
    assert server_environment(leaves)[variable] == "0", "a user's own setting wins"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """module(name): one of those that SGLang's Python runs."""
    monkeypatch.syspath_prepend(SERVER_FOLDER)
    return importlib.import_module


def make_parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = kind()
    parser.add_argument("--model-path", "--model", dest="model_path", required=True)
    parser.add_argument("--tensor-parallel-size", "--tp", dest="tp_size", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--enable-this", action="store_true")
    parser.add_argument("--always-on", action="store_true", default=True)
    parser.add_argument("--tf32", action=argparse.BooleanOptionalAction)
    parser.add_argument("--loader", nargs="*")
    parser.add_argument("--sizes", nargs="+", type=int)
    parser.add_argument("--overrides", type=json.loads)
    parser.add_argument("--config")
    return parser


def test_arguments_by_name_become_options(module: Callable[[str], ModuleType]) -> None:
    arguments = module("rltrain_arguments")
    parser = make_parser(arguments.Parser)
    base = {"model_path": "m", "tp_size": 1, "enable_this": True, "tf32": False, "loader": ["a.b"], "sizes": 3}
    later = {"tensor_parallel_size": 2, "offset": -4, "overrides": {"a": [1, "x"]}, "enable_this": None}
    parsed = vars(parser.parse_args(arguments.command_line(parser, base, later)))
    assert parsed == {
        "model_path": "m",
        "tp_size": 2,  # the later layer wins, whatever the name
        "offset": -4,
        "enable_this": False,  # null stands for SGLang's own choice
        "always_on": True,
        "tf32": False,
        "loader": ["a.b"],
        "sizes": [3],
        "overrides": {"a": [1, "x"]},
        "config": None,
    }
    both = {"model_path": "m", "sizes": [1, 2], "tf32": True, "enable_this": False}
    parsed = vars(parser.parse_args(arguments.command_line(parser, both)))
    assert (parsed["sizes"], parsed["tf32"], parsed["enable_this"]) == ([1, 2], True, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nothing": 1}, "unknown argument nothing"),
        ({"config": "x"}, "unknown argument config"),
        ({"enable_this": "yes"}, 'argument enable_this: got "yes"; expected true or false'),
        ({"always_on": False}, "argument always_on: SGLang has it on"),
        ({"offset": "a"}, "argument --offset: invalid int value: 'a'"),
    ],
)
def test_arguments_that_cannot_be_given(module: Callable[[str], ModuleType], given: dict[str, Any], said: str) -> None:
    arguments = module("rltrain_arguments")
    parser = make_parser(arguments.Parser)
    with pytest.raises(arguments.Refused, match=said):
        parser.parse_args(arguments.command_line(parser, {"model_path": "m"}, given))


def test_the_token_leaves_the_environment_and_the_log(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve = module("rltrain_serve")
    monkeypatch.setenv("RLTRAIN_SGLANG_TOKEN", "abc123")
    token = serve.take_token()
    assert token == "abc123" and "RLTRAIN_SGLANG_TOKEN" not in serve.os.environ
    factory = logging.getLogRecordFactory()
    try:
        serve.keep_out_of_the_log(token)
        logging.getLogger("sglang").warning("server_args=%s, %d", {"api_key": token}, 7)
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == ["server_args={'api_key': '***'}, 7"]


def test_on_a_cpu_processes_are_forked_once_sglang_has_chosen_to_spawn_them(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method, force: chosen.append(method))
    prepare = lambda *_: multiprocessing.set_start_method("spawn", force=True)  # noqa: E731
    engine = SimpleNamespace(_set_envs_and_config=prepare)
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.srt", ModuleType("sglang.srt"))
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints", SimpleNamespace(engine=engine))
    module("rltrain_serve").fork_on_cpu()
    engine._set_envs_and_config("arguments")
    assert chosen == ["spawn", "fork"]
