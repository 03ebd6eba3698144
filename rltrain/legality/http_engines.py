"""Engines that somebody else runs: what the config says of them, and what cannot be asked of them."""

from collections.abc import Iterator

from rltrain.config.rollout import Served
from rltrain.config.schema import Config
from rltrain.tasks.roles import served_roles


def http_problems(config: Config) -> Iterator[str]:
    """Of every role that is served by such."""
    for role in (role for role in served_roles() if role in config.placed_roles):
        served, engine_key = config.served(role), config.engine_key(role, "engine")
        if served.engine != "http":
            if role != "evaluation" and served.urls:
                yield f"{role}.urls: got some with {engine_key} {served.engine}; expected engine http, or none"
            continue
        if role == "evaluation":
            yield (
                f"{engine_key}: got http for role evaluation, whose weights are of other steps than those that the "
                "same servers roll out by; expected evaluation.engine: embedded or sglang, or the role not placed: the "
                "rollout's servers then evaluate"
            )
            continue
        yield from _settings_problems(config, role)


def _settings_problems(config: Config, role: str) -> Iterator[str]:
    served, (parallel, parallel_key) = config.served(role), config.parallel_of(role)
    num_ranks = parallel.tp * parallel.pp * parallel.cp * parallel.ep
    if not served.urls:
        yield f"{role}.urls: got none with {role}.engine http; expected URLs of servers, or a file with one a line"
    yield from _group_problems(served, role)
    if num_ranks > 1:
        yield (
            f"{parallel_key}: got tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}, ep {parallel.ep} with "
            f"{role}.engine http, whose ranks each ask servers that are cut as they were started; expected 1 of each"
        )
    if served.dtype != "auto":
        yield (
            f"{role}.dtype: got {served.dtype} with {role}.engine http, whose servers quantise what they are given as "
            "they were started; expected auto"
        )
    if served.kv_cache_gb != "auto":
        yield (
            f"{role}.kv_cache_gb: got {served.kv_cache_gb} with {role}.engine http, whose servers decide; expected auto"
        )
    if role == "rollout" and config.model.router_replay == "rollout":
        yield (
            "model.router_replay: got rollout with rollout.engine http, whose servers are not asked which experts "
            "tokens visit; expected recompute or off"
        )


def _group_problems(served: Served, role: str) -> Iterator[str]:
    """Of weights that servers take over a process group."""
    if served.http.weights != "group":
        return
    if role != "rollout":
        yield (
            f"{role}.http.weights: got group, by which syncs bring weights, and role {role} has those of its "
            "checkpoint; expected folder"
        )
    if served.protocol not in ("auto", "sglang"):
        yield (
            f"{role}.http.weights: got group with {role}.protocol {served.protocol}; expected sglang or auto, since "
            "SGLang's servers alone take weights so, or weights: folder"
        )
    if served.http.weights_dir is not None:
        yield (
            f"{role}.http.weights_dir: got {served.http.weights_dir} with {role}.http.weights group, by which nothing "
            "is written; expected none, or weights: folder"
        )


def url_problems(config: Config, role: str, num_ranks: int) -> Iterator[str]:
    """Of a role placed on so many ranks."""
    urls = config.served(role).urls
    if config.served(role).engine == "http" and isinstance(urls, tuple) and 0 < len(urls) < num_ranks:
        yield (
            f"placement.{role}: got {num_ranks} ranks for {len(urls)} {role}.urls; expected at most one rank for each, "
            "since a rank asks many servers"
        )
