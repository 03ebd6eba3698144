"""Servers at URLs that speak SGLang's and vLLM's protocols and take weights from files and broadcasts."""

import asyncio
import copy
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from rltrain.rollout.servers.in_sglang.rltrain_delta_files import FORMAT, FORMAT_KEY
from rltrain.rollout.servers.protocols import ADAPTER, LOAD_ADAPTER, UNLOAD_ADAPTER, VLLM_REQUEST
from tests.support.sglang_server import logprob_of, next_token, with_image_tokens
from tests.support.vllm_transfers import StandInTransfers

LIMIT = timedelta(seconds=30)
VLLM_ANSWERS = Path(__file__).with_name("vllm_answers.json")
"""Answers of the real vLLM, recorded by tests/vllm/answers.py."""
VLLM: dict[str, Any] = json.loads(VLLM_ANSWERS.read_text()) if VLLM_ANSWERS.exists() else {}


class StandInBroadcasts:
    """The broadcast routes of a server. `received` has the tensors of the last or current update.

    In part `dies_in`, counted from 1, the server ends; in part `hangs_in` it does not take the broadcast.
    """

    def __init__(self, server: "StandInServer") -> None:
        self.server = server
        self.received: dict[str, Tensor] = {}
        self.num_parts = 0
        self.start()

    def start(self) -> None:
        """Resets the state to that of a new process."""
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.is_open = False
        self.dies_in = self.hangs_in = 0

    def routes(self) -> Mapping[str, Any]:
        return {
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._receive,
            "/end_weight_update": self._end,
            "/flush_cache": self._flush,
            "/update_weight_version": self._label,
        }

    async def _join(self, body: Any, query: Any) -> Response:
        if not body:
            return refused("master_address is missing", 422)
        await asyncio.to_thread(self._make, body)
        return JSONResponse({"success": True})

    def _make(self, body: Mapping[str, Any]) -> None:
        size, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, _, _ = next(iter(rendezvous(address, rank, size, timeout=LIMIT)))
        within = PrefixStore(name, store)
        how = {"group_name": name, "timeout": LIMIT}
        group, _ = _new_process_group_helper(size, rank, [], Backend(body["backend"]), within, **how)
        self.groups[name], _world.pg_group_ranks[group] = group, {number: number for number in range(size)}

    async def _leave(self, body: Any, query: Any) -> Response:
        if body["group_name"] not in self.groups:
            return refused("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return JSONResponse({"success": True})

    async def _begin(self, body: Any, query: Any) -> Response:
        if self.is_open:
            return refused("a weight-update session is already open; call end_weight_update() first")
        self.server.idle("the beginning of an update")
        self.is_open, self.received, self.num_parts = True, {}, 0
        return JSONResponse({"success": True})

    async def _receive(self, body: Any, query: Any) -> Response:
        if not self.is_open or body["group_name"] not in self.groups:
            return refused("it has no such group, or no session is open")
        self.num_parts += 1
        if self.num_parts == self.hangs_in:
            await asyncio.sleep(LIMIT.total_seconds())
        if self.num_parts == self.dies_in:
            dist.destroy_process_group(self.groups.pop(body["group_name"]))
            self.server.end()
            return JSONResponse({})
        kinds = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [kind.itemsize * torch.Size(shape).numel() for kind, shape in zip(kinds, body["shapes"], strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        await asyncio.to_thread(lambda: self.groups[body["group_name"]].broadcast([flat], options).wait())
        for name, piece, kind, shape in zip(body["names"], flat.split(sizes), kinds, body["shapes"], strict=True):
            self.received[name] = piece.view(kind).view(shape)
        return JSONResponse({"success": True})

    async def _end(self, body: Any, query: Any) -> Response:
        if not self.is_open:
            return refused("no weight-update session is open; call begin_weight_update() first")
        self.is_open = False
        return JSONResponse({"success": True})

    async def _flush(self, body: Any, query: Any) -> Response:
        self.server.idle("a flush of the cache")
        return await self.server.flush(float(query.get("timeout", 0)))

    async def _label(self, body: Any, query: Any) -> Response:
        if self.is_open:
            self.server.broken.append("a version in the middle of an update")
        self.server.label = body["new_version"]
        return JSONResponse({"success": True})


def vllm_answer(name: str, **values: object) -> Response:
    """Returns a recorded answer of vLLM with other values."""
    answer = VLLM[name]
    if answer["content"] is None or isinstance(answer["content"], str):
        return Response(answer["content"], answer["status"], media_type="text/plain")
    return JSONResponse(filled(answer["content"], **values), answer["status"])


def vllm_event(name: str, tokens: list[int], reason: str | None, spans: list[dict[str, Any]], label: str) -> str:
    """Returns an event of the stream of a request, which has the form of recorded ones."""
    event: dict[str, Any] = copy.deepcopy(VLLM["tokens"]["content"][0 if reason is None else -1])
    [choice] = event["choices"]
    [entry] = choice["logprobs"]["content"]
    version = version_of(label)
    entries = [filled(entry, token_id=token, logprob=logprob_of(token, version)) for token in tokens]
    own = {"finish_reason": reason, "token_ids": tokens, "logprobs": {"content": entries}}
    if reason is not None:
        [span] = choice["weight_versions"]
        own["weight_versions"] = [filled(span, **one) for one in spans]
    return json.dumps(filled(event, request_id=VLLM_REQUEST + name, choices=[filled(choice, **own)]))


def filled(recorded: dict[str, Any], **values: object) -> dict[str, Any]:
    """Returns a recorded answer with other values. It has the keys of the recorded one."""
    assert values.keys() <= recorded.keys()
    return {**recorded, **values}


def refused(message: str, status: int = 400) -> Response:
    return JSONResponse({"success": False, "message": message}, status)


TOKEN = "secret"
STARTED_WITH = "default"
LIMIT_S = 60.0
SIZES = ("tp_size", "pp_size", "dp_size")
ASKED = ("/v1/models", "/server_info", "/model_info", "/weight_info", "/version", "/get_world_size", "/is_paused")
"""Paths of GET requests."""


def version_of(label: str) -> int:
    """Returns the policy version at the end of a label, or 99 for a server that has received no weights."""
    return 99 if label == STARTED_WITH else int(label.rsplit(".", 1)[1])


class StandInServer:
    """A server in a thread of this process.

    - `pace_s` is the time of a decode step.
    - `most` bounds the number of running requests. Further ones are answered with status 429.
    - `takes_weights`: the server has routes for weights. `takes_deltas`: it announces support of deltas.
    - `transfers`: the engine for weight transfers of a vLLM server. Empty: it has none.
    - `broken` lists violations of the protocol.
    - `lora_rank`: the largest rank of adapters of an SGLang or vLLM server. 0: it was started without. With
      `allows_loads` vLLM has the routes for them.
    - `scale_out`: vLLM was started with its routes for tokens. `has_experts`: its model has experts.
    - `certificate`: files of a certificate and its key, for TLS.
    - `release` is the release of its program. Without `is_tempered` its log-probs are those of temperature 1.
    - `arguments` are further arguments that it was started with.
    """

    def __init__(
        self,
        kind: str,
        *,
        pace_s: float = 0.001,
        most: int = 1000,
        takes_weights: bool = True,
        context: int = 500,
        certificate: tuple[str, str] | None = None,
        takes_deltas: bool = False,
        scale_out: bool = True,
        has_experts: bool = False,
        load_s: float = 0.0,
        holds_batch_s: float = 0.0,
        release: str = "0.5.23",
        is_tempered: bool = True,
        arguments: Mapping[str, str] | None = None,
        transfers: str | None = None,
        lora_rank: int = 0,
        allows_loads: bool = True,
    ) -> None:
        self.lora_rank, self.allows_loads = lora_rank, allows_loads
        self.adapters: dict[str, str] = {}
        """Folders of the adapters now at the server, by their names."""
        self.release, self.is_tempered, self.arguments = release, is_tempered, arguments or {}
        self.load_s, self.holds_batch_s = load_s, holds_batch_s
        """Seconds that vLLM takes to load a folder, and that SGLang's scheduler holds the last batch."""
        self.holds_batch_until = 0.0
        self.num_busy_flushes = 0
        """Number of flushes to refuse because of another one."""
        self.scale_out, self.has_experts, self.engine_is_dead = scale_out, has_experts, False
        self.kind, self.pace_s, self.most, self.certificate = kind, pace_s, most, certificate
        self.takes_weights, self.context, self.takes_deltas = takes_weights, context, takes_deltas
        self.label = STARTED_WITH
        self.folders: list[str] = []
        """Folders of the received weights."""
        self.versions_drawn: list[int] = []
        """Policy version at the first token of each request."""
        self.num_running = self.num_starts = self.port = 0
        self.hangs = self.is_paused = False
        self.broken: list[str] = []
        self.transfers = StandInTransfers(self, transfers) if transfers is not None else None
        self.broadcasts = self.transfers or StandInBroadcasts(self)
        self.start()

    @property
    def url(self) -> str:
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server again at the same address, with its own weights."""
        self.num_starts += 1
        self.label, self.num_running, self.adapters = STARTED_WITH, 0, {}
        self.hangs = self.is_paused = self.engine_is_dead = False
        self._aborted: set[str] = set()
        self.broadcasts.start()
        config = uvicorn.Config(self._app(), port=self.port, log_level="critical", lifespan="off", access_log=False)
        if self.certificate is not None:
            config.ssl_certfile, config.ssl_keyfile = self.certificate
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + LIMIT_S
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def die(self) -> None:
        """Closes all connections and waits for the end of the server."""
        self.end()
        self._thread.join(LIMIT_S)

    def end(self) -> None:
        """Ends the server without waiting."""
        self._server.force_exit = self._server.should_exit = True

    def _app(self) -> Starlette:
        def route(path: str, answer: Any) -> Route:
            async def checked(request: Request) -> Response:
                if request.headers.get("authorization") != f"Bearer {TOKEN}":
                    return JSONResponse({"error": "wrong token"}, 401)
                while self.hangs:
                    await asyncio.sleep(0.01)
                body = json.loads(await request.body() or b"{}")
                found: Response = await answer(body, request.query_params)
                return found

            return Route(path, checked, methods=["GET" if path in ASKED else "POST"])

        own = {"/v1/models": self._models, **self._drawing()}
        return Starlette(
            routes=[route(*one) for one in {**own, **(self._control() if self.takes_weights else {})}.items()]
        )

    def _drawing(self) -> dict[str, Any]:
        if self.kind == "vllm":
            own = {"/inference/v1/generate": self._vllm_generate, "/inference/v1/abort_requests": self._vllm_abort}
            return {**own, "/version": self._version, "/server_info": self._vllm_info}
        if self.kind != "sglang":
            told = {"/model_info": self._info} if self.kind == "rltrain" else {}
            return {"/v1/completions": self._completions, **told}
        told = {"/server_info": self._info, "/model_info": self._info}
        return {"/generate": self._generate, "/abort_request": self._abort, **told}

    def _control(self) -> dict[str, Any]:
        if self.kind == "rltrain":
            return {"/update_weights_from_disk": self._from_disk}
        if self.kind == "sglang":
            adapters = {"/load_lora_adapter": self._load_adapter, "/unload_lora_adapter": self._unload_adapter}
            return {"/update_weights_from_disk": self._from_disk, **self.broadcasts.routes(), **adapters}
        return {
            "/weight_info": self._weight_info,
            "/pause": self._pause,
            "/resume": self._resume,
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._label_vllm,
            **({LOAD_ADAPTER: self._load_adapter, UNLOAD_ADAPTER: self._unload_adapter} if self.allows_loads else {}),
            **(self.transfers.routes() if self.transfers is not None else {}),
        }

    async def _models(self, body: Any, query: Any) -> Response:
        own = {"id": "tiny", "owned_by": self.kind, "max_model_len": self.context}
        if self.kind == "vllm":
            adapter = VLLM["models_with_adapters"]["content"]
            beside = [filled(adapter, id=name, root=folder) for name, folder in self.adapters.items()]
            return vllm_answer("models", data=[filled(VLLM["models"]["content"]["data"][0], **own), *beside])
        return JSONResponse({"data": [own, *({"id": name} for name in self.adapters)]})

    async def _info(self, body: Any, query: Any) -> Response:
        told = {"model_path": "tiny", "context_length": self.context, **dict.fromkeys(SIZES, 1)}
        deltas = {FORMAT_KEY: FORMAT} if self.takes_deltas else {}
        lora = {"enable_lora": bool(self.lora_rank), "max_lora_rank": self.lora_rank or None}
        known = {"version": self.release, "weight_version": self.label, **lora, **self.arguments}
        return JSONResponse({**told, **deltas, "internal_states": [deltas], **known})

    async def _vllm_info(self, body: Any, query: Any) -> Response:
        config: dict[str, Any] = VLLM["config"]["content"]["vllm_config"]
        engine, num_replicas = (self.transfers.engine, self.transfers.num_replicas) if self.transfers else ("", 1)
        mode = "processed_logprobs" if self.is_tempered else "raw_logprobs"
        found = filled(
            config,
            model_config=filled(config["model_config"], logprobs_mode=mode),
            parallel_config=filled(
                config["parallel_config"], data_parallel_size=num_replicas, is_moe_model=self.has_experts
            ),
            weight_transfer_config={"backend": engine} if engine else None,
            lora_config=filled(VLLM["lora_config"]["content"], max_lora_rank=self.lora_rank)
            if self.lora_rank
            else None,
        )
        return vllm_answer("config", vllm_config=found)

    async def _version(self, body: Any, query: Any) -> Response:
        return JSONResponse({"version": self.release})

    async def _from_disk(self, body: Any, query: Any) -> Response:
        if "model_path" not in body:
            return JSONResponse({"message": "model_path is missing"}, 422)
        self.idle("weights from disk")
        self._load(body["model_path"])
        if self.kind == "rltrain":
            self.label = body["weight_version"]
        elif body["flush_cache"] and time.monotonic() < self.holds_batch_until:
            return JSONResponse({"success": False, "message": "Cache flush failed after updating weights"}, 400)
        else:
            self.label = body.get("weight_version", STARTED_WITH)
        return JSONResponse({"success": True})

    async def flush(self, timeout_s: float) -> Response:
        """Waits up to `timeout_s` for an idle scheduler, as SGLang does."""
        if self.num_busy_flushes:
            self.num_busy_flushes -= 1
            return JSONResponse({"message": "Another flush_cache is already in progress."}, 400)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < self.holds_batch_until:
            if time.monotonic() > deadline:
                return JSONResponse({"message": "Flush cache failed."}, 400)
            await asyncio.sleep(0.005)
        return JSONResponse({"success": True})

    async def _weight_info(self, body: Any, query: Any) -> Response:
        return vllm_answer("weight_info", weight_version=self.label)

    async def _pause(self, body: Any, query: Any) -> Response:
        assert query["mode"] == "abort" and query["clear_cache"] == "true"
        self.is_paused = True
        return vllm_answer("pause")

    async def _resume(self, body: Any, query: Any) -> Response:
        self.is_paused = False
        return vllm_answer("resume")

    async def _collective_rpc(self, body: Any, query: Any) -> Response:
        if "method" not in body:
            return vllm_answer("without_method")
        assert body["method"] == "reload_weights"
        self.idle("a load of weights")
        if not self.is_paused:
            self.broken.append("a load of weights while it was not paused")
        self._load(body["kwargs"]["weights_path"])
        await asyncio.sleep(self.load_s)
        return vllm_answer("load")

    async def _load_adapter(self, body: Any, query: Any) -> Response:
        if not body:
            return vllm_answer("load_adapter_without_fields")
        self.idle("a load of adapters")
        if self.kind == "vllm" and not self.is_paused:
            self.broken.append("a load of adapters while it was not paused")
        name, folder = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return vllm_answer("load_adapter_again")
        if not {path.name for path in Path(folder).glob("*")} >= {"adapter_model.safetensors", "adapter_config.json"}:
            return vllm_answer("load_no_adapter")
        self.adapters[name] = folder
        self._load(folder)
        return vllm_answer("load_adapter")

    async def _unload_adapter(self, body: Any, query: Any) -> Response:
        return vllm_answer("unload_adapter" if self.adapters.pop(body["lora_name"], None) else "unload_adapter_again")

    async def _label_vllm(self, body: Any, query: Any) -> Response:
        self.label = body["new_version"]
        return vllm_answer("label", new_version=self.label)

    def idle(self, what: str) -> None:
        if self.num_running:
            self.broken.append(f"{what} while {self.num_running} requests ran")

    def _load(self, folder: str) -> None:
        self.folders.append(folder)

    async def _abort(self, body: Any, query: Any) -> Response:
        self._aborted.add(body["rid"])
        return JSONResponse({})

    async def _generate(self, body: Any, query: Any) -> Response:
        if (self.num_running + 1) > self.most:
            return JSONResponse({"error": "too many"}, 429)
        params = body["sampling_params"]
        if body.get("top_logprobs_num"):
            top = [[[self._top_logprob(params["temperature"]), 5, None]]]
            return JSONResponse({"meta_info": {"output_top_logprobs": top}})
        if body.get("lora_path") not in (None, *self.adapters):
            return refused("Got LoRA adapter that has never been loaded")
        self._check_adapter(body.get("lora_path"))
        ids = with_image_tokens(body["input_ids"], body.get("image_data") or ())
        drawn = self._draw(ids, params["stop_token_ids"], params["max_new_tokens"], body["rid"])
        return StreamingResponse(self._sglang_events(body["rid"], len(ids), drawn), media_type="text/event-stream")

    async def _sglang_events(
        self, rid: str, num_prompt: int, drawn: AsyncIterator[tuple[int, str | None]]
    ) -> AsyncIterator[str]:
        tokens: list[int] = []
        labels: list[str] = []
        async for token, reason in drawn:
            if token >= 0:
                tokens.append(token)
                labels.append(self.label)
            pairs = [[logprob_of(t, version_of(v)), t, None] for t, v in zip(tokens, labels, strict=True)]
            meta: dict[str, Any] = {
                "id": rid,
                "finish_reason": None if reason is None else {"type": reason},
                "prompt_tokens": num_prompt,
                "completion_tokens": len(tokens),
                "weight_version": self.label,
                "output_token_logprobs": pairs,
            }
            if reason is not None:
                meta["weight_versions"] = [{"version": label} for label in dict.fromkeys(labels)]
            yield f"data: {json.dumps({'output_ids': tokens, 'meta_info': meta})}\n\n"
        yield "data: [DONE]\n\n"

    async def _vllm_abort(self, body: Any, query: Any) -> Response:
        names = [name.removeprefix(VLLM_REQUEST) for name in body["request_ids"] if name.startswith(VLLM_REQUEST)]
        self._aborted |= {*names}
        return vllm_answer("abort")

    async def _vllm_generate(self, body: Any, query: Any) -> Response:
        if not self.scale_out:
            return JSONResponse({"error": {"message": "Scale-out endpoints are disabled."}}, 403)
        if "token_ids" not in body:
            return vllm_answer("without_fields")
        if (self.num_running + 1) > self.most:
            return JSONResponse({"error": "too many"}, 429)
        params = body["sampling_params"]
        if body["model"] not in ("tiny", *self.adapters):
            return vllm_answer("other_model")
        assert params["logprobs"] == 0 and params["ignore_eos"]
        self._check_adapter(body["model"])
        drawn = self._draw(body["token_ids"], params["stop_token_ids"], params["max_tokens"], body["request_id"])
        return StreamingResponse(self._vllm_events(body["request_id"], drawn), media_type="text/event-stream")

    def _check_adapter(self, name: str | None) -> None:
        if self.adapters and name != f"{ADAPTER}{self.label}":
            self.broken.append(f"a request for {name} instead of the adapters of {self.label}")

    async def _vllm_events(self, name: str, drawn: AsyncIterator[tuple[int, str | None]]) -> AsyncIterator[str]:
        spans: list[dict[str, Any]] = []
        count = 0
        async for token, reason in drawn:
            if self.engine_is_dead:
                yield f"data: {json.dumps(VLLM['broken']['content'][0])}\n\n"
                break
            tokens = [token] if token >= 0 else []
            if tokens and (not spans or spans[-1]["version"] != self.label):
                spans.append({"version": self.label, "start": count})
            count += len(tokens)
            if spans:
                spans[-1]["end"] = count
            yield f"data: {vllm_event(name, tokens, reason, spans, self.label)}\n\n"
        yield "data: [DONE]\n\n"

    async def _completions(self, body: Any, query: Any) -> Response:
        if (self.num_running + 1) > self.most:
            return JSONResponse({"error": "too many"}, 429)
        assert body["model"] == "tiny" and body["logprobs"] == 1
        if not body.get("stream"):
            top = None if self.kind == "rltrain" else [{"x": self._top_logprob(body["temperature"]), "y": -99.0}]
            return JSONResponse({"choices": [{"logprobs": {"top_logprobs": top}}]})
        assert body["return_token_ids"]
        drawn = self._draw(body["prompt"], body["stop_token_ids"], body["max_tokens"], "")
        return StreamingResponse(self._openai_events(drawn), media_type="text/event-stream")

    def _top_logprob(self, temperature: float) -> float:
        """Returns the log-prob of the likeliest token. It is less likely at higher temperatures."""
        return -min(temperature, 1.0) if self.is_tempered else -1.0

    async def _openai_events(self, drawn: AsyncIterator[tuple[int, str | None]]) -> AsyncIterator[str]:
        async for token, reason in drawn:
            tokens = [] if token < 0 else [token]
            logprobs = {"token_logprobs": [logprob_of(token, version_of(self.label)) for token in tokens]}
            choice = {"text": "x", "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}
            yield f"data: {json.dumps({'choices': [choice], 'weight_version': self.label})}\n\n"
        yield "data: [DONE]\n\n"

    async def _draw(
        self, prompt: list[int], ends: list[int], most: int, rid: str
    ) -> AsyncIterator[tuple[int, str | None]]:
        """Yields (token, reason for finishing or None). Token -1 means no token."""
        context, starts = [*prompt], self.num_starts
        self.num_running += 1
        try:
            for number in range(most):
                await asyncio.sleep(self.pace_s)
                while self.hangs:
                    await asyncio.sleep(0.01)
                if rid in self._aborted:
                    yield -1, "abort"
                    return
                version = version_of(self.label)
                context.append(next_token(context, version))
                if number == 0:
                    self.versions_drawn.append(version)
                is_end = context[-1] in ends
                reason = "stop" if is_end else "length" if number + 1 == most else None
                yield context[-1], reason
                if reason is not None:
                    return
        finally:
            if starts == self.num_starts:
                self.num_running -= 1
                self.holds_batch_until = time.monotonic() + self.holds_batch_s
