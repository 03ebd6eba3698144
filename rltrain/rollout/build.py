"""The engine of a rollout rank, as rollout.engine names it."""

from collections.abc import Callable

from rltrain.rollout.embedded.build import build_embedded
from rltrain.rollout.sglang.build import build_sglang
from rltrain.rollout.site import EngineSite, HostedEngine

BUILDERS: dict[str, Callable[[EngineSite, Callable[[], None]], HostedEngine]] = {
    "embedded": build_embedded,
    "sglang": build_sglang,
}


def build_engine(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """This rank's share of the engine; without weights until the first weight sync.

    `leave` gives up what the engine has running, before its keys and values are dropped. Collective over: the engine's
    ranks.
    """
    return BUILDERS[site.config.rollout.engine](site, leave)
