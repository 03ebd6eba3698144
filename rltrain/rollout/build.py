"""The engine of a rank of the rollout or the judge, as <role>.engine names it."""

from collections.abc import Callable

from rltrain.rollout.embedded.build import build_embedded
from rltrain.rollout.http.build import build_http
from rltrain.rollout.sglang.build import build_sglang
from rltrain.rollout.site import EngineSite, HostedEngine

BUILDERS: dict[str, Callable[[EngineSite, Callable[[], None]], HostedEngine]] = {
    "embedded": build_embedded,
    "sglang": build_sglang,
    "http": build_http,
}


def build_engine(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """This rank's share of the engine; without weights until the first update.

    `leave` gives up what the engine has running, before its keys and values are dropped. Collective over: the engine's
    ranks.
    """
    return BUILDERS[site.settings.engine](site, leave)
