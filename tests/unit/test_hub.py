"""Tests of datasets and models by their names on the hub."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import torch.distributed as dist

from rltrain.config import schema
from rltrain.data.hub import HubRepository, named_checkpoint, repositories_of, with_cached_copies, with_local_copies
from rltrain.data.rows import read_source
from rltrain.errors import CheckpointError, DataError, StallError
from rltrain.runtime.world import World

Files = dict[str, bytes]


def commit_of(files: Files) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class StandIn:
    """A stand-in for the hub. `repositories` by kind and name ("datasets/owner/name") may change while it serves."""

    def __init__(self, repositories: dict[str, Files]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns (status, headers, body) for the path of a URL."""
        self.asked.append(path)
        for name, files in self.repositories.items():
            commit, revisions = commit_of(files), ("main", commit_of(files))
            asked = path.removeprefix("/api").removeprefix("/models").removeprefix("/")
            if not asked.startswith(f"{name}/"):
                continue
            what, _, rest = asked.removeprefix(f"{name}/").partition("/")
            revision, _, file = rest.partition("/")
            if revision not in revisions:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"no such revision"
            if what == "revision":
                about = {"_id": "1", "id": name.removeprefix("datasets/"), "sha": commit, "siblings": []}
                return 200, {}, json.dumps(about).encode()
            if what == "tree":
                tree = [{"type": "file", "path": f, "size": len(b), "oid": _oid(b)} for f, b in files.items()]
                return 200, {}, json.dumps(tree).encode()
            if what == "resolve" and file in files:
                return 200, {"X-Repo-Commit": commit, "ETag": f'"{_oid(files[file])}"'}, files[file]
        return 404, {"X-Error-Code": "RepoNotFound"}, b"no such repository"


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub_stand_in(repositories: dict[str, Files]) -> Iterator[StandIn]:
    hub = StandIn(repositories)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(unquote(urlsplit(self.path).path))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - named by the base class

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


MODEL = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
ROWS = {
    "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
    b"  - split: test\n    path: main/test-*\n---\n# Sums\n",
    "main/train-00000.jsonl": b'{"prompt": "1+1="}\n{"prompt": "1+2="}\n',
    "main/test-00000.jsonl": b'{"prompt": "2+2="}\n',
    "sums.py": b"raise SystemExit",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    from huggingface_hub import constants

    with hub_stand_in({"owner/tiny": dict(MODEL), "datasets/owner/sums": dict(ROWS)}) as stand_in:
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", stand_in.url + files)
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield stand_in


def config(model: str = "owner/tiny", **data: Any) -> schema.Config:
    return schema.Config(
        steps=1,
        placement={"actor": 0},
        model=schema.Model(path=model),
        data=schema.Data(**({"train": schema.PromptFile(path="owner/sums", split="train")} | data)),
    )


def world(rank: int = 0, *, store: dist.Store | None = None, limit_s: float = 30.0) -> World:
    """Returns a rank's world of two nodes with two ranks each."""
    timeouts = schema.Timeouts(no_progress_s=limit_s)
    return World(rank, 4, rank % 2, 2, torch.device("cpu"), store or dist.HashStore(), 1.0, timeouts)


def prompts(file: schema.PromptFile) -> list[str]:
    return [str(row["prompt"]) for _, row in read_source(file.parts()[0], None, "data.train.path")]  # type: ignore[index]


def test_names_become_folders_of_one_commit(hub: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    local = with_local_copies(config(), world())
    assert Path(local.model.path).name == commit_of(hub.repositories["owner/tiny"])
    assert sorted(path.name for path in Path(local.model.path).iterdir()) == ["config.json", "model.safetensors"]
    assert prompts(local.data.train) == ["1+1=", "1+2="], "the split described by the README"
    assert not list(Path(str(local.data.train.path)).rglob("*.py")), "no code is copied"
    commit = commit_of(hub.repositories["datasets/owner/sums"])
    assert f"data.train.path: dataset owner/sums@main is commit {commit}" in caplog.text
    other = schema.PromptFile(path=("owner/sums@[1:]",), split="train")
    assert prompts(with_local_copies(config(train=other), world()).data.train) == ["1+2="]


def test_a_command_takes_a_folder_or_a_name(hub: StandIn, tmp_path: Path) -> None:
    assert named_checkpoint(str(tmp_path), "--checkpoint") == tmp_path
    named = named_checkpoint("owner/tiny", "--checkpoint")
    assert isinstance(named, HubRepository) and (named.copy() / "model.safetensors").read_bytes() == b"weights"
    with pytest.raises(CheckpointError, match=r"--checkpoint: there is no path 'owner/none'.*hub gives no model owner"):
        named_checkpoint("owner/none", "--checkpoint").copy()
    with pytest.raises(CheckpointError, match=r"--checkpoint: there is no folder 'nowhere'; .* on the hub"):
        named_checkpoint("nowhere", "--checkpoint")


def test_a_source_keeps_its_name(hub: StandIn) -> None:
    sources = (schema.PromptSource(path="owner/sums", split="test", weight=1.0),)
    (source,) = with_local_copies(config(train=schema.PromptFile(sources=sources)), world()).data.train.parts()
    assert source.title == "sums" and Path(str(source.path)).is_dir()


def test_one_rank_of_a_node_copies_and_all_nodes_copy_what_the_first_found(hub: StandIn) -> None:
    store = dist.HashStore()
    first = with_local_copies(config(), world(0, store=store))
    num_asked = len(hub.asked)
    assert with_local_copies(config(), world(1, store=store)) == first
    assert len(hub.asked) == num_asked, "its neighbour has copied it"
    hub.repositories["owner/tiny"]["config.json"] = b"{}"
    hub.asked.clear()
    assert with_local_copies(config(), world(2, store=store)) == first, "another node gets the same commit"
    assert not any("/main" in path for path in hub.asked), "it looks for no other commit"


def test_a_path_that_another_node_lacks_is_no_name(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks wait for no copy. The reader of the folder reports the missing path."""
    of_files = config("runs/model", train=schema.PromptFile(path="rows.jsonl"))
    store = dist.HashStore()
    (tmp_path / "runs/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert with_local_copies(of_files, world(0, store=store)) == of_files
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert with_local_copies(of_files, world(2, store=store)) == of_files and not hub.asked


def test_nobody_waits_without_limit(hub: StandIn) -> None:
    with pytest.raises(StallError, match=r"Waited 0 s for the commits of model owner/tiny@main"):
        with_local_copies(config(), world(1, limit_s=0.1))


@pytest.mark.parametrize(
    ("of_config", "error", "match"),
    [
        (config("owner/none"), CheckpointError, r"model.path: there is no path 'owner/none' \(relative ones start at"),
        (config("owner/tiny@v2"), CheckpointError, r"the hub gives no model owner/tiny@v2 \(RevisionNotFoundError"),
        (
            config(train=schema.PromptFile(sources=(schema.PromptSource(path="hf:no/rows"),))),
            DataError,
            r"data.train.sources.0.path: there is no path 'no/rows'",
        ),
    ],
)
def test_what_the_hub_has_not(hub: StandIn, of_config: schema.Config, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        with_local_copies(of_config, world())


def test_a_hub_that_cannot_be_reached(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with_local_copies(config(), world())
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    again = with_local_copies(config(), world())
    assert Path(again.model.path).is_dir(), "the cached copy is used"
    assert with_cached_copies(config()).model.path == again.model.path
    with pytest.raises(CheckpointError, match="expected a path, or a name on the hub that this machine can reach"):
        with_local_copies(config("owner/other"), world())
    assert with_cached_copies(config("owner/other")).model.path == "owner/other"


@pytest.mark.parametrize(
    "path", ["/data/rows", "rows.jsonl", "data/rows.jsonl", "data/*.parquet", "a/b/c", "./tiny", "data/rows.json.gz"]
)
def test_paths_are_no_names(path: str) -> None:
    assert HubRepository.of(path, "data.train.path", "dataset") is None


def test_what_is_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/tiny").mkdir(parents=True)
    assert [one.title for one in repositories_of(config())] == ["dataset owner/sums@main"]
    assert [one.name for one in repositories_of(config("hf:owner/tiny"))] == ["owner/tiny", "owner/sums"]
    assert with_local_copies(config(train=schema.PromptFile(path="rows.jsonl")), world()).model.path == "owner/tiny"


def test_every_role_with_a_checkpoint_may_name_one() -> None:
    roles = {
        "critic": {"path": "o/critic"},
        "reference": {"path": "o/reference"},
        "teacher": {"path": {"a": "o/a", "b": "/b"}},
    }
    named = schema.Config.model_validate(config().model_dump() | roles)
    found = [(one.config_key, one.name) for one in repositories_of(named) if one.kind == "model"]
    assert sorted(found) == [
        ("critic.path", "o/critic"),
        ("model.path", "owner/tiny"),
        ("reference.path", "o/reference"),
        ("teacher.path.a", "o/a"),
    ]
