"""SGLang's process: its arguments, its start, its end, and the modules laid over its package."""

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from rltrain.errors import ConfigError, EngineError
from rltrain.rollout.servers.sglang_engine import build_sglang
from rltrain.rollout.servers.sglang_process import (
    MIN_VERSION,
    SERVER_FOLDER,
    AdapterSpec,
    Server,
    ServerSpec,
    check_arguments,
    kept_modules_of,
    model_config_of,
    server_arguments,
    server_environment,
)
from tests.support.model_shards import tiny_architecture
from tests.support.schedule_configs import make_config
from tests.support.server_stand_in import write_interpreter

REPOSITORY = Path(__file__).resolve().parents[2]
START_S, GONE_S = 60.0, 20.0


def make_spec(folder: Path, **args: Any) -> ServerSpec:
    return ServerSpec(
        python=write_interpreter(folder),
        model_path="a-model",
        device="cpu",
        dtype="float32",
        tp=1,
        gpus=(),
        host="127.0.0.1",
        log_path=folder / "logs" / "engine.log",
        max_running_requests=4,
        max_context_tokens=16,
        needs_tokenizer=False,
        memory_saver=False,
        fp8=False,
        draws_during_syncs=False,
        args=args,
    )


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Yields make_server(**args of the stand-in). The servers end with the test."""
    servers: list[Server] = []

    def make(**args: Any) -> Server:
        servers.append(Server(make_spec(tmp_path, **args)))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


def start(server: Server, timeout_s: float = START_S) -> None:
    server.start()
    server.wait_until_ready(timeout_s, lambda: None)


def read_record(path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < deadline_s, "the server has not started"
        time.sleep(0.02)
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + GONE_S
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline_s, f"{left} of {pids} still live"
        time.sleep(0.02)


def test_the_environment_is_not_that_of_a_rank(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR"]
    dropped += ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"]
    dropped += ["TORCH_GLOO_LAZY_INIT"]
    dropped += ["PYTORCH_CUDA_ALLOC_CONF", "PYTHONHASHSEED"]
    for name in [*dropped, "PYTHONPATH"]:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    environment = read_record(tmp_path / "record")["environment"]
    assert not set(dropped) & environment.keys()
    assert environment["PYTHONPATH"] == str(REPOSITORY / "rltrain/rollout/servers/in_sglang")
    assert (environment["OMP_NUM_THREADS"], environment["NCCL_SOCKET_IFNAME"]) == ("3", "eth7")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_token_is_on_no_command_line_and_not_in_the_log(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    pids = read_record(tmp_path / "record")["pids"]
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert all(commands) and b"rltrain_supervise.py" in commands[0] and b"rltrain_serve.py" in commands[1]
    assert len(server.token) >= 32
    assert not any(server.token.encode() in command for command in commands)
    assert server.token not in server.spec.log_path.read_text()


def test_kill_leaves_nothing_and_may_be_repeated(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    record = read_record(tmp_path / "record")
    temporary = Path(record["environment"]["TMPDIR"])
    assert server.ending is None and all(map(lives, record["pids"])) and temporary.is_dir()
    for _ in range(2):
        server.kill()
        assert not any(map(lives, record["pids"]))
        assert not temporary.exists()
        assert server.ending == "was ended by its rank"


RANK = """
import sys, time
from pathlib import Path
from rltrain.rollout.servers.sglang_process import Server
from tests.unit.test_sglang_process import make_spec, start
start(Server(make_spec(Path(sys.argv[1]), record=sys.argv[2])))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_dies_with_its_rank(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path), str(tmp_path / "record")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        try:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
            record = read_record(tmp_path / "record")
            assert all(map(lives, record["pids"]))
        finally:
            os.killpg(rank.pid, number)  # like torchrun at the end of a rank
    wait_until_gone(record["pids"])
    assert not Path(record["environment"]["TMPDIR"]).exists()


def test_a_server_that_ends_takes_along_what_it_started(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    pids = read_record(tmp_path / "record")["pids"]
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids)
    assert server.ending == "was killed by SIGKILL"


def test_a_server_dies_with_its_supervisor(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    record = read_record(tmp_path / "record")
    supervisor, *others = record["pids"]
    try:
        os.kill(supervisor, signal.SIGKILL)
        wait_until_gone([supervisor, others[0]])
        assert server.ending == "lost its supervisor to SIGKILL"
    finally:
        for pid in filter(lives, others[1:]):  # each process of SGLang watches its parent
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(record["environment"]["TMPDIR"])


def test_a_server_that_ends_while_it_starts_shows_its_log(make_server: Callable[..., Server]) -> None:
    server = make_server(lines=100, exit=3)
    server.start()
    with pytest.raises(EngineError) as error:
        server.wait_until_ready(START_S, lambda: None)
    message = str(error.value)
    assert "rollout.sglang: the server of a-model (start 1) ended with exit status 3 before" in message
    assert "rollout.sglang.args" in message and str(server.spec.log_path) in message
    assert "line 99" in message and "line 80" in message and "line 79" not in message
    assert server.ending == "ended with exit status 3"


def test_an_interpreter_that_is_not_there_is_in_the_log(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    Path(spec.python).unlink()
    server = Server(spec)
    server.start()
    with pytest.raises(EngineError, match=f"cannot run {spec.python}"):
        server.wait_until_ready(START_S, lambda: None)


def test_the_start_timeout_runs_only_while_the_log_does_not_grow(make_server: Callable[..., Server]) -> None:
    timeout_s, num_lines, line_s = 1.5, 12, 0.2
    server = make_server(lines=num_lines, line_s=line_s)
    advances: list[float] = []
    server.start()
    began_s = time.monotonic()
    server.wait_until_ready(timeout_s, lambda: advances.append(time.monotonic()))
    assert time.monotonic() - began_s > num_lines * line_s > timeout_s
    assert len(advances) > num_lines / 2


def test_a_silent_start_runs_out_of_time(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(lines=3, silent=True, record=str(tmp_path / "record"))
    server.start()
    pids = read_record(tmp_path / "record")["pids"]
    with pytest.raises(
        EngineError, match=r"added nothing to its log for 1\.5 s \(rollout\.sglang\.start_timeout_s"
    ) as e:
        server.wait_until_ready(1.5, lambda: None)
    assert "line 2" in str(e.value)
    assert not any(map(lives, pids))


def test_an_answer_that_is_not_http_is_none_yet(make_server: Callable[..., Server]) -> None:
    server = make_server(garbled=2)
    start(server)
    assert server.ending is None


def test_a_start_may_follow_an_end(make_server: Callable[..., Server]) -> None:
    server = make_server(lines=1)
    assert server.ending == "has not been started"
    start(server)
    first = server.url, server.token
    with pytest.raises(ValueError, match="running server"):
        server.start()
    server.kill()
    start(server)
    assert server.ending is None
    assert server.token != first[1] and server.url.startswith("http://127.0.0.1:")
    headers = [line for line in server.spec.log_path.read_text().splitlines() if line.startswith("=====")]
    assert [f"start {n}, " in header for n, header in enumerate(headers, 1)] == [True, True]


def test_only_the_main_thread_starts_servers(make_server: Callable[..., Server]) -> None:
    server, raised = make_server(), []

    def in_thread() -> None:
        try:
            server.start()
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert raised and "main" in raised[0] and server.ending == "has not been started"


def test_nobody_else_gets_the_ports_of_a_server_that_starts(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(silent=True, record=str(tmp_path / "record"))
    server.start()
    own = read_record(tmp_path / "record")["given"]["own"]
    ports = [own["port"], own["nccl_port"]]
    assert server.url.endswith(f":{ports[0]}") and ports[0] != ports[1]
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    server.kill()
    for port in ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_another_node_is_ready_while_its_process_lives(tmp_path: Path) -> None:
    fields = vars(make_spec(tmp_path, silent=True, record=str(tmp_path / "record")))
    server = Server(ServerSpec(**fields | {"node_rank": 1, "num_nodes": 2, "rendezvous": "10.0.0.1:4000", "tp": 16}))
    try:
        start(server)
        own = read_record(tmp_path / "record")["given"]["own"]
        assert (own["nnodes"], own["node_rank"], own["dist_init_addr"], own["tp_size"]) == (2, 1, "10.0.0.1:4000", 16)
    finally:
        server.kill()


NAMES = ["attention_backend", "tp_size", "tensor_parallel_size", "page_size"]


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., ServerSpec]:
    """Returns answer(args, **reply). It makes a spec with these args, and its interpreter answers with this reply."""

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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("attn_dp_size", r"places of tensor parallelism; .*yourself may have others \(rollout\.engine: http\); remove"),
        ("ep_size", r"places of tensor parallelism"),
        ("disaggregation_mode", "an engine is one server with all parts and phases; more engines come from more ranks"),
        ("hicache_storage_backend", "outlive a run, and their names do not name the weights"),
    ],
)
def test_what_weight_syncs_cannot_follow_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.args\.{name}: cannot be chosen in a run .*{said}"):
        check_arguments(make_spec(tmp_path, **{name: 2}))


@pytest.mark.parametrize("name", ["enable_deterministic_inference", "rl_on_policy_target"])
def test_determinism_needs_a_gpu(answer: Callable[..., ServerSpec], name: str) -> None:
    spec = answer({name: True}, fields={name: name})
    check_arguments(replace(spec, device="cuda"))
    with pytest.raises(ConfigError, match=rf"args\.{name}: got true, but this run has no GPU.*; remove the key, or"):
        check_arguments(spec)


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
    kept = kept_modules_of(tiny_architecture("qwen3_5_text"))
    own = server_arguments(replace(plain, fp8=True, kept_modules=kept), 1, 2)["own"]
    overrides = json.loads(own["json_model_override_args"])
    assert overrides["rope_theta"] == 1.0
    assert overrides["quantization_config"]["quant_method"] == "fp8"
    assert overrides["quantization_config"]["weight_block_size"] == [128, 128]
    projections = [f"linear_attn.in_proj_{name}" for name in ("a", "b", "qkv", "z")]
    assert overrides["quantization_config"]["modules_to_not_convert"] == ["linear_attn.conv1d", *projections]


def test_keys_that_transformers_leaves_out_of_config_json_are_told(tmp_path: Path) -> None:
    of = {name: model_config_of(tiny_architecture(name)) for name in ("qwen3", "hy_v3", "phi3", "qwen3_5_text")}
    towered = model_config_of(replace(tiny_architecture("qwen3_5_text"), family="qwen3_5"))
    assert of["qwen3"] == {}
    assert of["hy_v3"] == {"route_norm": True, "qk_norm": True, "first_k_dense_replace": 1}
    assert of["phi3"] == {"partial_rotary_factor": 1.0}
    assert of["qwen3_5_text"] == towered["text_config"] == {"full_attention_interval": 2}
    spec = make_spec(tmp_path, json_model_override_args='{"text_config": {"rope_theta": 1.0}}')
    own = server_arguments(replace(spec, model_config=towered), 1, 2)["own"]
    assert json.loads(own["json_model_override_args"])["text_config"] == {
        "rope_theta": 1.0,
        "full_attention_interval": 2,
    }


@pytest.mark.parametrize("role", ["rollout", "judge"])
@pytest.mark.parametrize(
    ("ranks", "dtype", "key"), [((0, 1), "auto", "parallel.tp"), ((0,), "fp8", "dtype"), ((0,), "auto", "engine")]
)
def test_without_a_gpu_some_things_are_refused(ranks: tuple[int, ...], dtype: str, key: str, role: str) -> None:
    config = make_config(**{role: {"engine": "sglang", "dtype": dtype}})
    world = SimpleNamespace(device=torch.device("cpu"))
    of_site = {"settings": getattr(config, role), "ranks": ranks, "architecture": tiny_architecture("deepseek_v3")}
    site = SimpleNamespace(role=role, world=world, **of_site)
    with pytest.raises(ConfigError, match=f"{role}.{key}: got .* without a GPU; expected .*embedded"):
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
    """Returns module(name). It imports a module of SGLang's Python."""
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
        "tp_size": 2,  # the later layer wins for all names of an argument
        "offset": -4,
        "enable_this": False,  # null means SGLang's choice
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
        ({"always_on": False}, "argument always_on: SGLang cannot switch it off"),
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
