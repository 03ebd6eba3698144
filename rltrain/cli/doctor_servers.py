"""The doctor's questions to the servers of a config: what each one is, and what it lacks for a job of this config."""

import asyncio
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.cli.doctor import FINE, WRONG, Finding
from rltrain.config.schema import Config
from rltrain.errors import ConfigError, EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Access, ServerBusy, ServerGone, ServerRefuses
from rltrain.rollout.servers.fleet import FleetServer, checked, in_known_form, read
from rltrain.rollout.servers.http_engine import CheckpointWeights, token_of, way_of
from rltrain.rollout.servers.http_weights import GroupWeights
from rltrain.rollout.servers.protocols import MODELS, ServerProtocol
from rltrain.rollout.servers.remote_engine import Drawing
from rltrain.rollout.servers.sglang_process import MIN_VERSION, numbers_of
from rltrain.tasks.roles import served_roles

LIMIT_S = 60.0
"""Seconds for all questions to one server. vLLM runs programs before it reports its settings."""
PROMPT = (1, 2, 3)
"""Token ids of any vocabulary."""
COLD, HOT = 0.05, 2.0
"""Temperatures with very different log-probs of the likeliest token."""
SAME_LOGPROB = 0.05
"""Largest difference of equal log-probs. Models in bfloat16 differ by this much between two batches."""
SHOWN_CHARACTERS = 400


def of_servers(config: Config) -> Iterator[Finding]:
    """Yields a finding for each server of the config's roles, and one for each role without a usable server.

    The servers of a role are asked together. They generate one token each and keep their weights.
    """
    for role in served_roles():
        if role in config.placed_roles and config.served(role).engine == "http":
            try:
                asked = _Questions.of(config, role)
            except ConfigError as error:
                yield Finding(f"{role} servers", WRONG, str(error))
                continue
            answers = asyncio.run(asked.ask_all())
            yield from (answer.finding for answer in answers)
            if not any(answer.is_there for answer in answers):
                yield Finding(f"{role}.urls", WRONG, asked.nobody())


@dataclass(frozen=True)
class Answer:
    """The finding about one server, and whether the server has answered at all."""

    finding: Finding
    is_there: bool = True


class _NeverGiven(CheckpointWeights):
    """Weights of a way that no server is given. They stand for those of a job in questions."""

    def __init__(self, way: str, lora_rank: int) -> None:
        super().__init__(LIMIT_S)
        self.way, self.lora_rank = way, lora_rank

    def refusal(self, protocol: ServerProtocol) -> str | None:
        if self.way != GroupWeights.way or protocol.broadcasts is None:
            return None
        return protocol.broadcasts.refusal(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True)
class _Questions:
    """The questions to the servers of a role."""

    config: Config
    role: str
    urls: Sequence[str]
    access: Access

    @classmethod
    def of(cls, config: Config, role: str) -> "_Questions":
        """Returns the questions of a config. Raises ConfigError if its URLs or its token are wrong or missing."""
        served, where = config.served(role), f"{role}.urls"
        given = served.urls
        urls = read(Path(given), where) if isinstance(given, str) else checked(given, where)
        token = token_of(served.http, f"{role}.http")
        return cls(config, role, urls, Access(token, served.http.ca_file, connect_timeout_s=LIMIT_S))

    def nobody(self) -> str:
        """Returns what to do if no server answers."""
        if not self.urls:
            return "no URLs; expected one or more: add them, and start a server for each (docs/engines.md)"
        limit_s = self.config.served(self.role).http.start_timeout_s
        return (
            f"none of {len(self.urls)} answers, and a job would end after {self.role}.http.start_timeout_s = "
            f"{limit_s:g} s: start a server for each URL (docs/engines.md), or correct the URLs"
        )

    async def ask_all(self) -> list[Answer]:
        return [*await asyncio.gather(*map(self._ask, self.urls))]

    async def _ask(self, url: str) -> Answer:
        """Returns the finding about the server at `url`."""
        weights_change = self.role == "rollout" and algorithm_of(self.config).trains
        way = way_of(self.config, self.role, weights_change=weights_change).way
        has_images = self.config.model.vision is not None and self.role != "judge"
        server = FleetServer(
            url,
            self.access,
            _NeverGiven(way, lora.rank if (lora := self.config.model.lora) else 0),
            needs_weights=weights_change,
            needs_images=has_images,
            trained_sampling=self.config.served(self.role).sampling if weights_change else None,
        )
        what, is_there = f"{self.role}: {url}", False
        try:
            async with asyncio.timeout(LIMIT_S):
                with in_known_form(url):
                    return await self._examine(server, what)
        except TimeoutError:
            why = f"no answer within {LIMIT_S:g} s: look at its log"
        except ServerGone as gone:
            why = f"{gone}; start it, or correct the URL"
        except ServerBusy as busy:
            why, is_there = str(busy), True
        except ServerRefuses as refused:
            key, is_token = f"{self.role}.http.token_env or token_file", refused.status in (401, 403)
            why, is_there = f"{refused}{f'; {key} names its token' if is_token else ''}", True
        finally:
            await server.close()
        return Answer(Finding(what, WRONG, _line(why)), is_there=is_there)

    async def _examine(self, server: FleetServer, what: str) -> Answer:
        served = self.config.served(self.role)
        await server.ask(served.protocol)
        software = await _software(server)
        lacks = [
            *_old_release(software),
            *await server.lacks(served.max_context_tokens),
            *await self._unlike_engines(server),
        ]
        context = server.described.max_context_tokens
        facts = [software, f"model {server.described.model}", f"context of {context or 'unknown'} tokens"]
        if server.keeps_own is not None and not lacks:
            facts.append(f"keeps the weights that it was started with ({server.keeps_own})")
        told = ", ".join(facts) + "".join(f"; it {lack}" for lack in lacks)
        return Answer(Finding(what, WRONG if lacks else FINE, _line(told)))

    async def _unlike_engines(self, server: FleetServer) -> list[str]:
        """Has the server generate one token. Returns what is wrong with it, and with log-probs at the temperature of
        the config."""
        sampling = self.config.served(self.role).sampling
        drawing = Drawing(Sample(0, PROMPT, seed=0), 1, name=f"doctor-{secrets.token_hex(4)}.")
        given = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, 1, ())
        try:
            server.drawings[drawing.sample.id] = drawing
            await server.draw([drawing], given, LIMIT_S, lambda ended: None)
            if self.role != "rollout" or sampling.temperature in (0.0, 1.0) or server.protocol.name not in UNTEMPERED:
                return []
            cold, hot = [await _top_logprob(server, temperature) for temperature in (COLD, HOT)]
        except (ServerGone, ServerRefuses, EngineError) as problem:
            return [f"does not generate: {problem}"]
        if cold is None or hot is None or abs(cold - hot) > SAME_LOGPROB or hot > -SAME_LOGPROB:
            return []
        return [
            f"returns log-probs of temperature 1, but rollout.sampling.temperature is {sampling.temperature:g}. "
            f"{UNTEMPERED[server.protocol.name]}"
        ]


async def _software(server: FleetServer) -> str:
    """Asks the server for its program and release, such as "SGLang 0.5.23"."""
    if server.protocol.name == "sglang":
        return f"SGLang {(await server.calls.get('/server_info')).get('version')}"
    if server.protocol.name == "vllm":
        return f"vLLM {(await server.calls.get('/version')).get('version')}"
    owner = (await server.calls.get(MODELS))["data"][0].get("owned_by")
    if owner == "rltrain":
        return f"rltrain serve {(await server.calls.get('/model_info')).get('version')}"
    return f"OpenAI's API, of {owner}"


async def _top_logprob(server: FleetServer, temperature: float) -> float | None:
    """Returns the log-prob of the likeliest token after PROMPT, as the server reports it at this temperature.

    Returns None if the server reports only sampled tokens' log-probs.
    """
    if server.protocol.name == "sglang":
        sampling = {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
        of_top = {"return_logprob": True, "top_logprobs_num": 1}
        answer = await server.calls.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling, **of_top})
        return float(answer["meta_info"]["output_top_logprobs"][0][0][0])
    body = {"model": server.described.model, "prompt": PROMPT, "max_tokens": 1, "temperature": temperature}
    answer = await server.calls.post("/v1/completions", {**body, "logprobs": 1})
    top = answer["choices"][0]["logprobs"].get("top_logprobs")
    return max(top[0].values()) if top else None


UNTEMPERED = {
    "sglang": "Start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
    "openai": "Expected log-probs of the tempered distribution, or temperature 1",
}
"""What to do about log-probs of temperature 1, by protocol. vLLM reports its mode."""


def _old_release(software: str) -> list[str]:
    """Returns a complaint about a release of SGLang that lacks what rltrain calls."""
    name, _, release = software.partition(" ")
    if name != "SGLang" or numbers_of(release) >= numbers_of(MIN_VERSION):
        return []
    return [f"is too old; expected SGLang {MIN_VERSION} or newer"]


def _line(text: str) -> str:
    """Returns a text as one line, without its middle if it is long."""
    text = re.sub(r"\s+", " ", text).strip()
    half = SHOWN_CHARACTERS
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"
