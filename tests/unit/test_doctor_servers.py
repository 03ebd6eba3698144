"""The doctor's report on the servers of a config, with stand-ins for the servers."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.cli import doctor, doctor_servers
from rltrain.cli.doctor import FINE, WRONG, Finding
from rltrain.cli.doctor_servers import of_servers
from rltrain.cli.main import main
from tests.support.http_servers import TOKEN, StandInServer
from tests.support.schedule_configs import make_config

Serve = Callable[..., StandInServer]
ACCESS = {"token_env": "ENGINES_TOKEN"}
WITH_TOWER = {"path": "m", "vision": {}}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Returns a function that starts a server. The servers end with the test, and must have kept their weights."""
    monkeypatch.setenv("ENGINES_TOKEN", TOKEN)
    servers: list[StandInServer] = []

    def start(kind: str, **settings: Any) -> StandInServer:
        servers.append(StandInServer(kind, **settings))
        return servers[-1]

    yield start
    for server in servers:
        assert (server.folders, server.label, server.broken) == ([], "default", [])
        server.die()


def report(*urls: str, role: str = "rollout", sections: dict[str, Any] | None = None, **settings: Any) -> list[Finding]:
    """Returns the findings about servers at these URLs, for a job that needs a context of 400 tokens."""
    served = {"engine": "http", "urls": urls, "http": ACCESS, "max_context_tokens": 400}
    return [*of_servers(make_config(**{role: served | settings}, **(sections or {})))]


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("sglang", "SGLang 0.5.23"),
        ("vllm", "vLLM 0.5.23"),
        ("rltrain", "rltrain serve 0.5.23"),
        ("else", "OpenAI's API"),
    ],
)
def test_a_server_is_described_in_one_line(serve: Serve, kind: str, name: str) -> None:
    server = serve(kind, context=512, takes_weights=kind != "else")
    [finding] = report(server.url)
    assert finding.what == f"rollout: {server.url}" and "\n" not in finding.detail
    assert finding.detail.startswith(name) and "model tiny, context of 512 tokens" in finding.detail
    assert finding.state == (WRONG if kind == "else" else FINE)


APART = {"sections": {"model": {"path": "m", "lora": {"rank": 16}}, "weight_sync": {"adapters": "apart"}}}
HOT = {"sampling": {"temperature": 0.8}}
LACKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "context": ({"context": 100}, {}, "a context of 100 tokens; expected rollout.max_context_tokens = 400"),
    "a way": ({"takes_weights": False}, {}, "takes no weights by way of a folder (http.weights)"),
    "groups": ({"kind": "rltrain"}, {"http": ACCESS | {"weights": "group"}}, "by way of a group (http.weights)"),
    "GPUs": ({"kind": "vllm"}, {"http": ACCESS | {"weights": "group"}}, "over NCCL only, which needs GPUs"),
    "deltas": ({}, {"sections": {"weight_sync": {"delta": {}}}}, "start it with this rltrain's plugin for SGLang"),
    "a phase": ({"arguments": {"disaggregation_mode": "decode"}}, {}, "expected a server of both"),
    "a store": ({"arguments": {"hicache_storage_backend": "file"}}, {}, "without --hicache-storage-backend"),
    "adapters": ({"kind": "vllm"}, APART, "it takes no adapters; start it with --enable-lora --max-lora-rank 16"),
    "images": ({"kind": "vllm"}, {"sections": {"model": WITH_TOWER}}, "takes no images with token ids"),
    "age": ({"release": "0.5.22.post1"}, {}, "is too old; expected SGLang 0.5.23 or newer"),
    "log-probs of vLLM": (
        {"kind": "vllm", "is_tempered": False},
        HOT,
        "its log-probs are raw_logprobs; start it with --logprobs-mode processed_logprobs",
    ),
    "log-probs of SGLang": ({"is_tempered": False}, HOT, "Start it without SGLANG_RETURN_ORIGINAL_LOGPROB"),
}
"""By what is missing: the server, the settings of the role, and the words of the finding."""


@pytest.mark.parametrize("what", LACKS)
def test_what_a_server_lacks_for_the_config_is_said(serve: Serve, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    server, settings, said = LACKS[what]
    [finding] = report(serve(**{"kind": "sglang", **server}).url, **settings)
    assert finding.state == WRONG and said in finding.detail


def test_a_server_with_room_for_the_adapters_is_fine(serve: Serve) -> None:
    [finding] = report(serve("vllm", lora_rank=16).url, **APART)
    assert finding.state == FINE


def test_a_server_with_several_faults_has_one_line_with_all(serve: Serve) -> None:
    server = serve("sglang", context=100, release="0.4.0", takes_weights=False)
    [finding] = report(server.url)
    assert all(said in finding.detail for said in ("too old", "context of 100", "takes no weights"))


@pytest.mark.parametrize("kind", ["sglang", "vllm", "rltrain"])
def test_tempered_log_probs_are_fine(serve: Serve, kind: str) -> None:
    [finding] = report(serve(kind).url, sampling={"temperature": 0.8})
    assert finding.state == FINE


def test_a_judge_may_keep_its_weights(serve: Serve) -> None:
    server = serve("rltrain", takes_weights=False, is_tempered=False)
    placement = {"actor,reference": 0, "rollout,judge": 1, "reward": 2}
    [finding] = report(server.url, role="judge", sections={"placement": placement}, sampling={"temperature": 0.5})
    assert (finding.what, finding.state) == (f"judge: {server.url}", FINE)
    assert "keeps the weights that it was started with" in finding.detail


def test_a_file_of_urls_is_read(serve: Serve, tmp_path: Path) -> None:
    servers, file = [serve("sglang"), serve("vllm")], tmp_path / "urls"
    file.write_text("# two servers\n" + "".join(f"{server.url}/\n" for server in servers))
    assert [one.what for one in report(urls=str(file))] == [f"rollout: {server.url}" for server in servers]
    file.unlink()
    [finding] = report(urls=str(file))
    assert finding.state == WRONG and "expected a file with a URL a line" in finding.detail


def test_one_that_is_not_there_does_not_hide_the_others(serve: Serve) -> None:
    lost, found = report(unused_url(), serve("sglang").url)
    assert (lost.state, found.state) == (WRONG, FINE)
    assert "start it, or correct the URL" in lost.detail


def test_without_any_server_it_says_what_to_do() -> None:
    *_, last = report(unused_url(), unused_url(), http={})
    assert (last.what, last.state) == ("rollout.urls", WRONG)
    assert "none of 2 answers" in last.detail and "start a server for each URL" in last.detail


def test_a_wrong_token_is_named_by_its_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve("sglang")
    monkeypatch.setenv("ENGINES_TOKEN", "another")
    [finding] = report(server.url)
    assert finding.state == WRONG and "status 401" in finding.detail
    assert "rollout.http.token_env or token_file" in finding.detail
    monkeypatch.delenv("ENGINES_TOKEN")
    [finding] = report(server.url)
    assert finding.state == WRONG and "ENGINES_TOKEN is empty or missing" in finding.detail


def test_a_server_that_hangs_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_servers, "LIMIT_S", 0.2)
    server = serve("sglang")
    server.hangs = True
    finding, last = report(server.url)
    assert "no answer within 0.2 s" in finding.detail and last.what == "rollout.urls"
    server.hangs = False


def test_the_command_takes_a_config_with_keys(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LEAST_SHARED_GB", 0)
    server = serve("sglang")
    keys = ["rollout.engine=http", f"rollout.urls=[{server.url}]", "rollout.http.token_env=ENGINES_TOKEN"]
    command = ["doctor", "--config", "configs/quickstart.yaml", *keys]
    assert main(command) == 0
    told = capsys.readouterr().out.splitlines()[-1].split()
    assert told[:5] == ["ok", "rollout:", server.url, "SGLang", "0.5.23,"]
    assert main([*command, "rollout.max_context_tokens=10000"]) == 1
    assert main(["doctor", "steps=3"]) == 2
    assert "without --config" in capsys.readouterr().err


def test_a_config_without_urls_asks_nobody() -> None:
    assert [*of_servers(make_config())] == []
