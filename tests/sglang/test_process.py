"""The process of a real SGLang server: it starts, requires its token, and never outlives its rank."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from rltrain.cli.doctor import FINE, WRONG
from rltrain.cli.doctor_servers import of_servers
from rltrain.errors import ConfigError, EngineError
from rltrain.rollout.servers.sglang_process import (
    MIN_VERSION,
    NOT_FOR_CONFIGS,
    NOT_ON_CPU,
    NOT_WITH_ROUTING,
    SERVER_FOLDER,
    Server,
    check_arguments,
    server_environment,
)
from tests.sglang.servers import START_TIMEOUT_S, call, greedy, server_spec
from tests.support.schedule_configs import make_config
from tests.unit.test_sglang_process import lives, wait_until_gone

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 4
"""Supervisor, HTTP server, scheduler, detokenizer; there may be more."""


def descendants(root: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for parent in found:
        found += [pid for pid, its_parent in parents.items() if its_parent == parent]
    return [pid for pid in found[1:] if lives(pid)]


def with_token(url: str, token: str | None) -> int:
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    body = b'{"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}}'
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{url}/generate", body, headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_generates_for_who_has_the_token(server: Server) -> None:
    tokens, logprobs = greedy(server, [3, 4, 5], 7)
    assert len(tokens) == len(logprobs) == 7
    assert [with_token(server.url, token) for token in (server.token, None, "guess")] == [200, 401, 401]


def test_the_doctor_knows_it_and_what_it_lacks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINES_TOKEN", server.token)
    served = {"engine": "http", "urls": [server.url], "http": {"token_env": "ENGINES_TOKEN"}}
    fits = served | {"max_context_tokens": server.spec.max_context_tokens, "sampling": {"temperature": 0.8}}
    [finding] = of_servers(make_config(rollout=fits, weight_sync={"delta": {}}))
    assert finding.state == FINE and finding.detail.startswith(f"SGLang {MIN_VERSION}, model {server.spec.model_path}")
    [finding] = of_servers(make_config(rollout=served | {"max_context_tokens": 10**6}))
    assert finding.state == WRONG and "expected rollout.max_context_tokens = 1000000" in finding.detail


def test_the_token_is_nowhere_to_be_read(server: Server) -> None:
    pids = descendants(os.getpid())
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if lives(pid)]
    assert len(commands) >= NUM_PROCESSES
    assert not any(server.token.encode() in command for command in commands)
    log = server.spec.log_path.read_text()
    assert "'api_key': '***'" in log and server.token not in log


def test_a_context_may_be_filled_to_its_end(server: Server) -> None:
    num_prompt, most = 5, server.spec.max_context_tokens
    tokens, _ = greedy(server, [3] * num_prompt, most - num_prompt)
    assert num_prompt + len(tokens) == most


RANK = """
import json, sys, time
from pathlib import Path
from rltrain.rollout.servers.sglang_process import Server
from tests.sglang.servers import START_TIMEOUT_S, server_spec
server = Server(server_spec(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
server.start()
server.wait_until_ready(START_TIMEOUT_S, lambda: None)
print(json.dumps([server.url, server.token]), flush=True)
time.sleep(600)
"""


def test_another_one_beside_it_dies_with_a_rank_that_is_killed(
    server: Server, real_sglang_python: str, tmp_path: Path
) -> None:
    """The server is started as users start it, without a fork."""
    command = [sys.executable, "-c", RANK, real_sglang_python, server.spec.model_path, str(tmp_path / "engine.log")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        try:
            assert rank.stdout is not None
            url, token = json.loads(rank.stdout.readline())
            assert url != server.url and token != server.token
            assert [with_token(url, given) for given in (token, server.token)] == [200, 401]
            pids = descendants(rank.pid)
            assert len(pids) >= NUM_PROCESSES
        finally:
            os.killpg(rank.pid, signal.SIGKILL)
    wait_until_gone(pids)
    assert call(server, "/model_info")["model_path"] == server.spec.model_path


def test_a_model_that_is_not_there_ends_the_start_with_its_log(sglang_python: str, tmp_path: Path) -> None:
    server = Server(server_spec(sglang_python, tmp_path / "nothing", tmp_path / "engine.log"))
    before = set(descendants(os.getpid()))
    server.start()
    with pytest.raises(EngineError, match=r"(?s)rollout\.sglang: .*before it took requests.*nothing") as error:
        server.wait_until_ready(START_TIMEOUT_S, lambda: None)
    assert "Error" in str(error.value)
    assert server.ending == "ended with exit status 1"
    assert set(descendants(os.getpid())) <= before


GOOD = {"chunked_prefill_size": 64, "cuda_graph_bs_decode": [1, 2], "enable_tf32_matmul": False, "page_size": 16}
REFUSED = {
    "attention_backand": (1, r"args\.attention_backand: SGLang .* the nearest that it has is attention_backend"),
    "tensor_parallel_size": (2, r"args\.tensor_parallel_size: cannot be chosen .*parallel\.tp"),
    "attention_backend": ("none", r"rollout\.sglang\.args: .* --attention-backend: invalid choice: 'none'"),
    "disable_radix_cache": (3, r"rollout\.sglang\.args: .*disable_radix_cache: got 3; expected true or false"),
}


def test_arguments_are_checked_against_the_installed_version(sglang_python: str, tmp_path: Path) -> None:
    spec = server_spec(sglang_python, "a-model", tmp_path / "engine.log", args=GOOD)
    check_arguments(spec)
    for name, (value, message) in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            check_arguments(replace(spec, args={name: value}))


TAKEN = {"enable_deterministic_inference": True, "enable_hierarchical_cache": True, "speculative_algorithm": "NGRAM"}
OTHER_PLACES = r"cannot be chosen .*places of tensor parallelism; .*\(rollout\.engine: http\); remove the key"
ASKED_IN_VAIN = {
    "enable_memory_saver": (True, r"cannot be chosen .*follows from the placement"),
    "attention_data_parallel_size": (2, OTHER_PLACES),
    "enable_dp_attention": (True, OTHER_PLACES),
    "expert_parallel_size": (2, OTHER_PLACES),
    "data_parallel_size": (2, r"cannot be chosen .*more engines come from more ranks in placement"),
    "disaggregation_mode": ("prefill", r"cannot be chosen .*an engine is one server with all parts and phases"),
    "hicache_storage_backend": ("file", r"cannot be chosen .*outlive a run"),
}
"""Arguments that users of SGLang ask for. Some have other names than the field of ServerArgs."""


def test_what_users_ask_for_is_taken_or_refused_with_a_reason(sglang_python: str, tmp_path: Path) -> None:
    spec = server_spec(sglang_python, "a-model", tmp_path / "engine.log", args=TAKEN, device="cuda")
    check_arguments(spec)
    for name, (value, message) in ASKED_IN_VAIN.items():
        with pytest.raises(ConfigError, match=rf"rollout\.sglang\.args\.{name}: {message}"):
            check_arguments(replace(spec, args={name: value}))
    with pytest.raises(ConfigError, match=r"enable_deterministic_inference: got true, but this run has no GPU"):
        check_arguments(replace(spec, device="cpu"))


def test_every_argument_that_is_refused_exists(sglang_python: str, tmp_path: Path) -> None:
    command = [sglang_python, str(SERVER_FOLDER / "rltrain_arguments.py"), "{}"]
    environment = server_environment(server_spec(sglang_python, "a-model", tmp_path / "engine.log"))
    told = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout.splitlines()[-1])
    assert {*NOT_FOR_CONFIGS, *NOT_ON_CPU, *NOT_WITH_ROUTING} - {*told["names"]} == {"config"}, "an option, not a field"


def test_an_environment_without_sglang_is_refused(tmp_path: Path) -> None:
    spec = server_spec(sys.executable, "a-model", tmp_path / "engine.log")
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python: .* has no SGLang that can be imported"):
        check_arguments(spec)
