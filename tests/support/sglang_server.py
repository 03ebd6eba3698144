"""A server in this process that follows SGLang's rules."""

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

from rltrain.errors import EngineLost
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Client

IMAGE_TOKEN, IMAGE_TOKEN_SIDE = 5, 14
"""The placeholder of images, and the height and width of a token in pixels."""
TAGS = ("kv_cache", "weights", "cuda_graph")


class SchedulerDied(Exception):  # noqa: N818 - it is what has happened
    """An assertion or error in SGLang's scheduler ended the server."""


class Refused(Exception):  # noqa: N818
    """Status 400: the server refused the request, changed nothing, and continues."""


class ServerRules:
    """The state of one server that matters to its callers. `is_idle` is given if a rule depends on running requests."""

    def __init__(self, *, saves_memory: bool = True) -> None:
        self.saves_memory = saves_memory
        """Whether the server was started with enable_memory_saver."""
        self.is_paused = self.is_open = False
        self.released: set[str] = set()
        self.version = "default"
        """Version of the weights."""

    def pause(self, mode: str) -> None:
        if mode not in ("in_place", "retract"):
            raise SchedulerDied(f"pause_generation in mode {mode}")
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False

    def check_drawing(self) -> None:
        """Checks the rules before a decode step."""
        if self.released:
            raise SchedulerDied(f"a step without the memory of {sorted(self.released)}: an illegal address")
        if self.is_open and not self.is_paused:
            raise SchedulerDied("a step by weights that are being replaced")

    def begin_update(self, selector: str, *, is_idle: bool) -> None:
        self._check_update(is_idle)
        if selector not in ("all", "target", "draft"):
            raise SchedulerDied(f"invalid selector {selector!r}")
        if self.is_open:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.is_open = True

    def update(self, version: str | None, *, is_idle: bool) -> None:
        self._check_update(is_idle)
        if not self.is_open:
            raise Refused("must run between begin_weight_update() and end_weight_update()")
        self.version = version or self.version

    def end_update(self, *, is_idle: bool) -> None:
        self._check_update(is_idle)
        if not self.is_open:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.is_open = False

    def release(self, tags: list[str], *, is_idle: bool) -> None:
        if not is_idle:
            raise SchedulerDied("release_memory_occupation should be called only when server is idle")
        self._check_tags(tags)
        if twice := self.released & {*tags}:
            raise SchedulerDied(f"the memory of {sorted(twice)} is paused already")
        self.released |= {*tags}

    def resume(self, tags: list[str]) -> None:
        self._check_tags(tags)
        if never := {*tags} - self.released:
            raise SchedulerDied(f"KeyError: {sorted(never)} were not released")
        self.released -= {*tags}

    def _check_update(self, is_idle: bool) -> None:
        if not (is_idle or self.is_paused):
            raise SchedulerDied("a weight update waits for all requests to end: pause first")
        if "weights" in self.released:
            raise SchedulerDied("a weight update without the weights' memory: an illegal address")

    def _check_tags(self, tags: list[str]) -> None:
        if not self.saves_memory:
            raise SchedulerDied("the server was started without enable_memory_saver: nothing is given back")
        if not tags:
            raise SchedulerDied("without tags all memory is meant: name them")
        if unknown := {*tags} - {*TAGS}:
            raise SchedulerDied(f"tags {sorted(unknown)} are not known")


VOCAB_SIZE = 50
UNSEEN_EOS = 49
"""The fake model's own end-of-text token. Requests do not name it."""


def next_token(context: list[int], version: int, seed: int = 0) -> int:
    """Returns the fake model's next token, below `UNSEEN_EOS`. It depends on context, version and seed."""
    return (sum(context[-3:]) * 7 + len(context) * 11 + version * 13 + seed * 17 + 5) % UNSEEN_EOS


def logprob_of(token: int, version: int) -> float:
    return -(token + 1) / 64 - version / 8


def experts_of(token: int, place: int, version: int, layer: int) -> list[int]:
    """Returns three of 200 experts, different for every place of the context, version and layer."""
    first = (token * 7 + place * 11 + version * 13 + layer * 17) % 200
    return [first, (first + 1) % 200, (first + 100) % 200]


def expected_tokens(request: Sample, sampling: SamplingParams, version: int = 0) -> list[int]:
    """Returns the expected response of a fake server with one version, computed by the same rule without the server."""
    tokens: list[int] = []
    while len(tokens) < sampling.max_response_tokens:
        tokens.append(next_token([*request.prompt, *tokens], version))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tokens


@dataclass(eq=False)
class Running:
    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    cache_key: str
    events: SimpleQueue[dict[str, Any] | None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_sent: int = 0
    routing_start: int | None = None
    """None: the request asks for no routing."""
    routed: list[list[list[int]]] = field(default_factory=list)
    """Routing of all fed tokens, shape [tokens, layers, top_k]."""


def num_tokens_of(url: str) -> int:
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])), formats=["PNG"]) as image:
        return image.width * image.height // IMAGE_TOKEN_SIDE**2


def with_image_tokens(
    ids: list[int], urls: Sequence[str], num_tokens: Callable[[str], int] = num_tokens_of
) -> list[int]:
    """Returns the ids with each placeholder repeated for the tokens of its image, as SGLang does."""
    remaining, expanded = iter(urls), list[int]()
    for token in ids:
        is_image = bool(urls) and token == IMAGE_TOKEN
        expanded += [token] * (num_tokens(next(remaining)) if is_image else 1)
    assert next(remaining, None) is None, "as many placeholders as images"
    return expanded


class FakeServer:
    """A fake SGLang server. Implements `process.Server`.

    - `pace_s` is the time of a decode step; `max_running` bounds the number of running requests.
    - `answers[path]` replaces the answer of an endpoint: (status, text). `draw` replaces the model.
    - The start with number `dies_at_start` fails.
    - `overlap`: a batch begins before the tokens of the last one are taken, as in SGLang's overlap schedule.
    - `num_image_tokens` returns the number of tokens of an image of a request.
    - `load` gets the body of every update of weights, `lose` every tag of returned memory.
    - `routed_layers` is the number of layers in returned routing. Those in `dense` have no experts. `returns` encodes
      it.
    - `holds_batch_s` is the time for which the scheduler counts a batch after its last response. Because of another
      flush, `num_busy_flushes` flushes are refused.

    The server dies if SGLang's own assertions would end it, and notes the reason in `broken`. This list stays empty in
    tests without intended mistakes.
    """

    def __init__(
        self,
        *,
        pace_s: float = 0.001,
        max_running: int = 256,
        cumulative: bool = False,
        dies_at_start: int = 0,
        overlap: bool = False,
        saves_memory: bool = True,
        routed_layers: int = 0,
        dense: tuple[int, ...] = (),
        holds_batch_s: float = 0.0,
    ) -> None:
        self.holds_batch_s, self._holds_batch_until = holds_batch_s, 0.0
        self.num_busy_flushes = 0
        self.routed_layers, self.dense = routed_layers, dense
        self.returns: Callable[[np.ndarray], str | None] = lambda rows: base64.b64encode(rows.tobytes()).decode()
        self.url, self.token, self.num_starts = "", "", 0
        self.pace_s, self.max_running, self.cumulative = pace_s, max_running, cumulative
        self.overlap, self.saves_memory = overlap, saves_memory
        self.rules = ServerRules(saves_memory=saves_memory)
        self.broken: list[str] = []
        self.num_image_tokens: Callable[[str], int] = num_tokens_of
        self.load: Callable[[dict[str, Any]], None] = lambda body: None
        self.lose: Callable[[str], None] = lambda tag: None
        self.answers: dict[str, tuple[int, str]] = {}
        self.draw: Callable[[list[int], int], tuple[int, float | None]] = self._draw
        self.calls: list[tuple[str, Any]] = []
        self.most_running = 0
        self.hangs = False
        self.dies_at_start = dies_at_start
        self.on_start: Callable[[], None] = lambda: None
        self._http: ThreadingHTTPServer | None = None
        self._ending: str | None = "has not been started"

    def start(self) -> None:
        self.num_starts += 1
        self.token = f"token {self.num_starts}"
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        self._ahead: list[tuple[Running, int, float | None]] = []
        self.rules, self.hangs = ServerRules(saves_memory=self.saves_memory), False
        self._lock, self._dead = threading.RLock(), threading.Event()
        self._http = _Http(self, self._dead)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._ending = None
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        threading.Thread(target=self._decode, args=(self._dead,), daemon=True).start()
        self.on_start()
        if self.num_starts == self.dies_at_start:
            self.die()

    def wait_until_ready(self, timeout_s: float, advance: Callable[[], None]) -> None:
        advance()

    @property
    def ending(self) -> str | None:
        return self._ending

    def kill(self) -> None:
        self.die("was ended by its rank")

    def die(self, how: str = "was killed by SIGKILL", *, noticed: bool = True) -> None:
        """Closes all connections. If not `noticed`, the process seems to live."""
        if noticed:
            self._ending = self._ending or how
        if self._http is not None:
            self._dead.set()
            http, self._http = self._http, None
            http.shutdown()
            http.cut()

    @property
    def version(self) -> int | None:
        return None if self.rules.version == "default" else int(self.rules.version)

    @property
    def is_idle(self) -> bool:
        """Returns whether the server is idle in SGLang's sense: waiting requests count too unless it is paused."""
        with self._lock:
            is_held = time.monotonic() < self._holds_batch_until
            return not (is_held or self._running or self._ahead or (self._waiting and not self.rules.is_paused))

    @property
    def num_running(self) -> int:
        with self._lock:
            return len(self._running)

    @property
    def cache_keys(self) -> list[str]:
        return [body["extra_key"] for path, body in self.calls if path == "/generate"]

    def _draw(self, context: list[int], version: int) -> tuple[int, float | None]:
        token = next_token(context, version)
        return token, logprob_of(token, version)

    def _decode(self, dead: threading.Event) -> None:
        while not dead.wait(self.pace_s):
            if self.rules.is_paused or self.hangs:
                continue
            with self._lock:
                free = self.max_running - len(self._running)
                self._running += self._waiting[:free]
                del self._waiting[:free]
                self.most_running = max(self.most_running, len(self._running))
                if not self._obeys("a decode step", self.rules.check_drawing if self._running else lambda: None):
                    return
                self._step()

    def _step(self) -> None:
        drawn = []
        for one in self._running:
            context = [*one.prompt, *one.tokens, *self._not_taken(one)]
            self._feed(one, context)
            drawn.append((one, *self.draw(context, self.version or 0)))
        due, self._ahead = (self._ahead, drawn) if self.overlap else (drawn, [])
        for one, token, logprob in due:
            if one in self._running:  # an ended request drops this extra token
                self._take(one, token, logprob)

    def _feed(self, one: Running, context: list[int]) -> None:
        for place in range(len(one.routed), len(context)):
            of_layers = [
                [0, 0, 0] if layer in self.dense else experts_of(context[place], place, self.version or 0, layer)
                for layer in range(self.routed_layers)
            ]
            one.routed.append(of_layers)

    def _routing(self, one: Running) -> str | None:
        """Returns the encoded routing of a request as SGLang does. It excludes the last generated token."""
        if one.routing_start is None or not self.routed_layers or not one.tokens:
            return None
        end = len(one.prompt) + len(one.tokens) - 1
        rows = np.array(one.routed[min(one.routing_start, end) : end], dtype=np.int32)
        return self.returns(rows)

    def _not_taken(self, one: Running) -> list[int]:
        return [token for ahead, token, _ in self._ahead if ahead is one]

    def _take(self, one: Running, token: int, logprob: float | None) -> None:
        one.tokens.append(token)
        one.logprobs.append(logprob)
        one.versions.append(self.version or 0)
        is_eos = token in one.sampling["stop_token_ids"] or token == UNSEEN_EOS
        if is_eos and not one.sampling["ignore_eos"]:
            self._end(one, {"type": "stop", "matched": token})
        elif len(one.tokens) >= one.sampling["max_new_tokens"]:
            self._end(one, {"type": "length", "length": len(one.tokens)})
        elif len(one.tokens) == 1 or len(one.tokens) - one.num_sent >= one.sampling["stream_interval"]:
            self._tell(one, None)

    def _end(self, one: Running, reason: dict[str, Any]) -> None:
        if one in self._running:
            self._running.remove(one)
        self._holds_batch_until = time.monotonic() + self.holds_batch_s
        self._tell(one, reason)
        one.events.put(None)

    def _tell(self, one: Running, reason: dict[str, Any] | None) -> None:
        start = 0 if self.cumulative else one.num_sent
        values = [[value, token, None] for value, token in zip(one.logprobs[start:], one.tokens[start:], strict=True)]
        meta: dict[str, Any] = {
            "id": one.rid,
            "finish_reason": reason,
            "prompt_tokens": len(one.prompt),
            "completion_tokens": len(one.tokens),
            "weight_version": self.rules.version,
        }
        if one.tokens:
            meta["output_token_logprobs"] = values
        if reason is not None and one.tokens:
            meta["weight_versions"] = _spans(one.versions)
        if reason is not None and (routing := self._routing(one)) is not None:
            meta["routed_experts"] = routing
        one.events.put({"output_ids": one.tokens[start:], "meta_info": meta})
        one.num_sent = len(one.tokens)

    def admit(self, body: dict[str, Any]) -> SimpleQueue[dict[str, Any] | None]:
        """Returns the event queue of these requests. It ends with one None per request."""
        while self.rules.is_paused and not self._dead.is_set():
            time.sleep(0.001)
        events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        with self._lock:
            images = body.get("image_data") or [None] * len(body["rid"])
            requests = zip(body["rid"], body["input_ids"], images, body["sampling_params"], strict=True)
            for rid, ids, urls, sampling in requests:
                prompt = with_image_tokens(ids, urls or (), self.num_image_tokens)
                one = Running(rid, prompt, sampling, body["extra_key"], events)
                if body.get("return_routed_experts"):
                    one.routing_start = body["routed_experts_start_len"]
                if (one.routing_start or 0) > len(prompt):
                    self._end(one, {"type": "abort", "message": "a start behind the input tokens"})
                else:
                    self._waiting.append(one)
        return events

    def control(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns (status, answer)."""
        with self._lock:
            try:
                if not self._obeys(path, lambda: self._control(path, body)):
                    return 500, {}
            except Refused as refused:
                return 400, {"success": False, "message": str(refused)}
            return 200, {"success": True, "message": "Success", "weight_version": self.rules.version}

    def flush(self, timeout_s: float) -> tuple[int, str]:
        if self.num_busy_flushes:
            self.num_busy_flushes -= 1
            return 400, "Another flush_cache is already in progress."
        deadline = time.monotonic() + timeout_s
        while not self.is_idle:
            if time.monotonic() >= deadline or self._dead.is_set():
                return 400, "Timed out waiting for idle state."
            time.sleep(0.001)
        return 200, "Cache flushed."

    def _control(self, path: str, body: dict[str, Any]) -> None:
        rules, is_idle = self.rules, self.is_idle
        actions: dict[str, Callable[[], None]] = {
            "/pause_generation": lambda: rules.pause(body["mode"]),
            "/continue_generation": rules.go_on,
            "/begin_weight_update": lambda: rules.begin_update(body["selector"], is_idle=is_idle),
            "/update_weights_from_tensor": lambda: self._update(body, is_idle),
            "/end_weight_update": lambda: rules.end_update(is_idle=is_idle),
            "/release_memory_occupation": lambda: self._release(body["tags"], is_idle),
            "/resume_memory_occupation": lambda: rules.resume(body["tags"]),
            "/abort_request": self._abort,
            "/model_info": lambda: None,
        }
        actions[path]()

    def _update(self, body: dict[str, Any], is_idle: bool) -> None:
        self.rules.update(body.get("weight_version"), is_idle=is_idle)
        self.load(body)

    def _release(self, tags: list[str], is_idle: bool) -> None:
        self.rules.release(tags, is_idle=is_idle)
        for tag in tags:
            self.lose(tag)

    def _abort(self) -> None:
        """Aborts all requests. In a pause, running requests return only after it."""
        waiting, self._waiting = self._waiting, []
        for one in [*waiting, *([] if self.rules.is_paused else self._running)]:
            self._end(one, {"type": "abort", "message": "Abort in waiting queue"})

    def _obeys(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except SchedulerDied as died:
            self.broken.append(f"{what}: {died}")
            self.die(f"was ended by an assertion: {died}")
            return False
        return True


class FakeDelivery:
    """The calls of a `Delivery` to a server. The only state of its weights is a version."""

    def __init__(self, client: Client | None) -> None:
        self.version: int | None = None
        self.num_bytes = self.kept_bytes = 100
        self._client = client
        self._arrived: int | None = None
        self._lost: EngineLost | None = None

    def check_layout(self) -> None:
        self.begin()
        self._call("/end_weight_update")
        self._raise()

    def begin(self) -> None:
        self.version, self._lost = None, None
        self._call("/begin_weight_update", selector="target")

    def finish(self, version: int) -> None:
        self._arrived = version
        self._call("/update_weights_from_tensor", weight_version=str(version))
        self._call("/end_weight_update")
        self._raise()
        self.version = version

    def redeliver(self, verify: bool = False) -> None:
        if self._arrived is not None:
            self.begin()
            self.finish(self._arrived)

    def close(self) -> None:
        pass

    def _call(self, path: str, **body: Any) -> None:
        if self._client is not None and self._lost is None:
            try:
                self._client.call(path, body)
            except EngineLost as lost:
                self._lost = lost

    def _raise(self) -> None:
        if self._lost is not None:
            raise self._lost


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, fake: FakeServer, dead: threading.Event) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake, self.dead = fake, dead
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # connections are cut on purpose

    def cut(self) -> None:
        self.server_close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        fake, url = self.server.fake, urlsplit(self.path)
        path = url.path
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        fake.calls.append((path, body))
        while fake.hangs and not self.server.dead.is_set():
            time.sleep(0.001)
        if self.headers.get("authorization") != f"Bearer {fake.token}":
            self._answer(401, "wrong token")
        elif path in fake.answers:
            self._answer(*fake.answers[path])
        elif path == "/generate":
            self._stream(fake.admit(body), len(body["rid"]))
        elif path == "/flush_cache":
            self._answer(*fake.flush(float(parse_qs(url.query).get("timeout", ["0"])[0])))
        else:
            status, answer = fake.control(path, body)
            self._answer(status, json.dumps(answer), "application/json")

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _stream(self, events: SimpleQueue[dict[str, Any] | None], num_left: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while num_left and not self.server.dead.is_set():
            try:
                event = events.get(timeout=0.01)
            except Empty:
                continue
            if event is None:
                num_left -= 1
            else:
                self._chunk(json.dumps(event))
        if num_left == 0:
            self._chunk("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def _chunk(self, data: str) -> None:
        text = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))


def _spans(versions: list[int]) -> list[dict[str, Any]]:
    starts = [place for place, version in enumerate(versions) if place == 0 or versions[place - 1] != version]
    ends = [*starts[1:], len(versions)]
    return [
        {"version": str(versions[start]), "start": start, "end": end} for start, end in zip(starts, ends, strict=True)
    ]
