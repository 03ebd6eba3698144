"""Stands in for the Hugging Face hub on this machine: repositories of a few files, as its client asks for them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def commit_of(files: Files) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class StandIn:
    """`repositories` by kind and name, "datasets/owner/name": what is in them may change while it serves."""

    def __init__(self, repositories: dict[str, Files]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) for a path of an URL."""
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
        def do_GET(self) -> None:  # noqa: N802 - named by the base class
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
