"""slime's generate functions as episodes, and replacements for the modules that they import from slime."""

import asyncio
import functools
import importlib.abc
import importlib.machinery
import inspect
import ssl
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, parameters_of
from rltrain.environments.encoding import BadAnswer
from rltrain.environments.interface import Action, Environment, Opening, Row, StepResult, TokenIds, Trajectory
from rltrain.environments.one_by_one import one_by_one
from rltrain.rewards.slime_sample import SlimeSample, SlimeStatus

# Turns sampled by the engine for the coroutine of an episode.

_EPISODE: ContextVar["Episode"] = ContextVar("episode")


async def draw(ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> Action:
    """Samples a turn after `ids` with the engine, for the episode of the calling coroutine. The result has `ids` and
    `logprobs`. Concurrent calls are served one after the other."""
    return await _EPISODE.get().draw(TokenIds(tuple(ids), sampling or {}))


class Episode:
    """A running coroutine and its requests for turns."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._wanted: asyncio.Queue[TokenIds] = asyncio.Queue()
        self._drawn: asyncio.Queue[Action] = asyncio.Queue()
        self._one_at_a_time = asyncio.Lock()
        self._task = asyncio.create_task(self._run(coroutine))

    async def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        _EPISODE.set(self)
        return await coroutine

    async def draw(self, turn: TokenIds) -> Action:
        async with self._one_at_a_time:
            self._wanted.put_nowait(turn)
            return await self._drawn.get()

    def answer(self, action: Action) -> None:
        """Passes the sampled turn to the coroutine, after `next` returned its request."""
        self._drawn.put_nowait(action)

    async def next(self) -> tuple[TokenIds | None, Any]:
        """Returns (the next requested turn, None), or (None, the coroutine's result). Raises the coroutine's
        exception."""
        wanted = asyncio.create_task(self._wanted.get())
        try:
            await asyncio.wait({wanted, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                return wanted.result(), None
            return None, self._task.result()
        finally:
            wanted.cancel()

    def cancel(self) -> None:
        self._task.cancel()


# Replacements for an uninstalled slime: Sample, post and GenerateState.

ENGINE = "rltrain.engine"
"""The host of the router if the engine samples for the episode. It is not a valid network name."""
NUM_AT_ONCE = 1 << 16
NO_IMAGES = (
    "expected none, as turns in token ids have no images. Environments with chat messages can show them "
    "(docs/environments.md)"
)
POST_TIMEOUT_S = 600.0


ENDED = {"length": SlimeStatus.TRUNCATED, "abort": SlimeStatus.ABORTED, "stop": SlimeStatus.COMPLETED}


@dataclass
class Sample(SlimeSample):
    """A sample to be filled by slime's functions."""

    multimodal_inputs: dict[str, Any] | None = None
    status: SlimeStatus = SlimeStatus.PENDING
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Updates weight version and status from the engine's meta_info of a turn."""
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = ENDED[meta_info["finish_reason"]["type"]]


class EnvironmentArguments:
    """The args of a generate function: env.options as attributes, with defaults for common ones."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self.sglang_router_ip = ENGINE
        self.sglang_router_port = 0
        self.hf_checkpoint = factory.model_path
        self.input_key, self.label_key, self.metadata_key = factory.prompt_key, factory.label_key, "metadata"
        self.partial_rollout = self.apply_chat_template = self.use_slime_router = False
        self.reward_key = self.sglang_speculative_algorithm = None
        self.rollout_temperature = factory.sampling.get("temperature", 1.0)
        self.rollout_max_response_len = factory.sampling.get("max_new_tokens")
        self.rollout_max_context_len = factory.sampling.get("max_context_len")
        self.sampling = factory.sampling
        vars(self).update(factory.options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"args has no {name!r}; set it in env.options")


class GenerateState:
    """The object through which slime's functions get the tokenizer."""

    def __init__(self, args: EnvironmentArguments) -> None:
        self.args = args
        self.sampling_params = dict(args.sampling)
        self.semaphore = asyncio.Semaphore(NUM_AT_ONCE)
        self.processor = None
        self.aborted = False

    @functools.cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.args.hf_checkpoint)


_TOKENIZERS: dict[str, Any] = {}


def tokenizer_of(path: str | None) -> Any:
    if path is None:
        raise ValueError("there is no tokenizer, because no checkpoint is known")
    if path not in _TOKENIZERS:
        from transformers import AutoTokenizer

        _TOKENIZERS[path] = AutoTokenizer.from_pretrained(path)
    return _TOKENIZERS[path]


class EpisodeTexts:
    """The text and ids of an episode that posts texts. Only new text is encoded, so sampled ids never change."""

    def __init__(self, model_path: str | None) -> None:
        self.model_path = model_path
        self.text = ""
        self.ids: tuple[int, ...] = ()

    def encode(self, text: str) -> tuple[int, ...]:
        known, ids = (self.text, self.ids) if text.startswith(self.text) else ("", ())
        rest = text.removeprefix(known)
        more = tokenizer_of(self.model_path)(rest, add_special_tokens=False)["input_ids"] if rest else ()
        return (*ids, *more)

    def drawn(self, text: str, ids: Sequence[int]) -> None:
        self.text, self.ids = text, tuple(ids)


_TEXTS: ContextVar[EpisodeTexts] = ContextVar("texts")


async def play(generate: Callable[..., Any], args: EnvironmentArguments, *rest: Any, **more: Any) -> Any:
    """Returns the function's result. The function may post texts."""
    _TEXTS.set(EpisodeTexts(args.hf_checkpoint))
    return await generate(args, *rest, **more)


async def post(url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Any = None) -> Any:
    """Posts the payload and returns the JSON answer. If `url` is the router's /generate, the engine answers in SGLang's
    form."""
    if url == f"http://{ENGINE}:0/generate":
        return await _generate(payload)
    import httpx

    transport = httpx.AsyncHTTPTransport(verify=_certificates(), retries=max_retries)
    async with httpx.AsyncClient(timeout=POST_TIMEOUT_S, transport=transport) as client:
        response = await client.post(url, json=dict(payload), headers=headers)
    response.raise_for_status()
    return response.json()


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Returns the trusted certificates. Reading them takes 50 ms, and calls of many episodes share one event loop."""
    import httpx

    return httpx.create_ssl_context()


async def _generate(payload: Mapping[str, Any]) -> Any:
    if payload.get("image_data"):
        raise BadAnswer(f"posted image_data; {NO_IMAGES}")
    texts = _TEXTS.get()
    ids = payload["input_ids"] if "input_ids" in payload else texts.encode(payload["text"])
    turn = await draw(ids, payload.get("sampling_params"))
    if "text" in payload:
        texts.drawn(payload["text"] + turn.text, (*ids, *turn.ids))
    return {
        "text": turn.text,
        "output_ids": list(turn.ids),
        "meta_info": {
            "finish_reason": {"type": "length" if turn.truncated else "stop"},
            "output_token_logprobs": [
                [logprob, id_, None] for logprob, id_ in zip(turn.logprobs, turn.ids, strict=True)
            ],
            "weight_version": str(turn.policy_version),
            "prompt_tokens": len(ids),
            "completion_tokens": len(turn.ids),
            "cached_tokens": 0,
        },
    }


MODULES: Mapping[str, Mapping[str, Any]] = {
    "slime": {},
    "slime.rollout": {},
    "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
    "slime.utils": {},
    "slime.utils.http_utils": {"post": post},
    "slime.utils.types": {"Sample": Sample},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder at the end of sys.meta_path, so an installed slime comes first."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=not MODULES[name])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(MODULES[module.__name__])


def provide() -> None:
    """Makes the replacements importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


# slime's generate(args, sample, sampling_params): a coroutine that plays a whole episode and returns its Sample(s).

PARAMETERS = ("args", "sample", "sampling_params")


def recognises(thing: Any) -> bool:
    return inspect.iscoroutinefunction(thing) and (parameters_of(thing) or ())[:3] == PARAMETERS


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    return one_by_one(lambda: SlimeGenerate(build, factory))


class SlimeGenerate:
    """One episode of a generate function. `args` has env.options and the defaults of EnvironmentArguments.

    The engine samples and records the turns requested by `draw`, or by slime's `post` to the router's /generate. With
    sglang_router_ip and sglang_router_port in env.options, `post` uses HTTP to that server instead.
    """

    def __init__(self, generate: Build, factory: EnvironmentFactory) -> None:
        self.generate = generate
        self.factory = factory
        self.args = EnvironmentArguments(factory)
        parameters = inspect.signature(generate).parameters
        evaluation = parameters.get("evaluation")
        needs_it = evaluation is not None and evaluation.default is inspect.Parameter.empty
        self.more: Mapping[str, Any] = {"evaluation": False} if needs_it else {}
        self.episode: Episode | None = None

    async def reset(self, row: Row, seed: int) -> Opening:
        self.close()
        sample = Sample(
            index=seed,
            prompt=row[self.factory.prompt_key],
            label=row.get(self.factory.label_key),
            metadata=dict(row.get(self.args.metadata_key) or {}),
        )
        sampling = dict(self.factory.sampling)
        self.episode = Episode(play(self.generate, self.args, sample, sampling, **self.more))
        return await self._next()

    async def step(self, action: Action) -> StepResult:
        assert self.episode is not None
        self.episode.answer(action)
        return await self._next()

    async def _next(self) -> StepResult:
        assert self.episode is not None
        turn, returned = await self.episode.next()
        return StepResult(turn) if turn is not None else self._end(returned)

    def _end(self, returned: Any) -> StepResult:
        samples: Sequence[Any] = returned if isinstance(returned, list | tuple) else [returned]
        trajectories = tuple(self._trajectory(sample) for sample in samples)
        rewards = [one.reward for one in trajectories if one.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        return StepResult(reward=mean, done=True, trajectories=trajectories)

    def _trajectory(self, sample: Any) -> Trajectory:
        if getattr(sample, "multimodal_inputs", None) or getattr(sample, "multimodal_train_inputs", None):
            raise BadAnswer(f"returned a sample with multimodal inputs; {NO_IMAGES}")
        reward = sample.reward
        if isinstance(reward, Mapping):
            reward = reward[self.args.reward_key or "score"]
        mask, logprobs = sample.loss_mask, sample.rollout_log_probs
        status = getattr(sample.status, "value", sample.status)
        return Trajectory(
            ids=tuple(sample.tokens),
            num_response_tokens=sample.response_length,
            reward=None if reward is None else float(reward),
            loss_mask=None if mask is None else tuple(map(bool, mask)),
            logprobs=None if logprobs is None else tuple(map(float, logprobs)),
            status="completed" if status == "pending" else status,
            trained_on=not sample.remove_sample and bool(sample.response_length),
            info={name: value for name, value in sample.metadata.items() if isinstance(value, int | float)},
        )

    def close(self) -> None:
        if self.episode is not None:
            self.episode.cancel()
            self.episode = None
