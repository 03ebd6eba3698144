"""The SGLang engine on two ranks: the first has a stand-in for the server, and the second follows."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from rltrain.config.schema import SGLang
from rltrain.errors import DivergenceError, EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_session import EngineBroadcast
from tests.support.rollout_models import ragged_requests
from tests.support.sglang_server import FakeDelivery, FakeServer

LONG = SamplingParams(1.0, 1.0, 0, 150, (3,))


class SharedDelivery(FakeDelivery):
    """Reports a loss to all ranks of the engine alike, as a real delivery does."""

    def _raise(self) -> None:
        EngineBroadcast(dist.group.WORLD).together(super()._raise)


class Rig:
    def __init__(self, max_restarts: int = 5) -> None:
        first = dist.get_rank() == 0
        self.server = FakeServer(pace_s=0.005) if first else None
        self.client = Client(limit_s=2.0) if first else None
        self.num_advances = self.num_drawn = 0
        if self.server is not None:
            self.server.draw = self._counted(self.server.draw)
        self.engine = SGLangEngine(
            self.server,
            self.client,
            SharedDelivery(self.client),
            group=dist.group.WORLD,
            max_running_requests=6,
            max_context_tokens=256,
            settings=SGLang(hang_timeout_s=5.0, max_restarts=max_restarts),
            advance=self._advance,
        )
        if self.server is not None:
            self.server.wait_until_ready = lambda timeout_s, advance: [advance() for _ in range(3)]
        self.engine.start()
        self.sync(0)

    def _counted(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.num_drawn += 1
            return draw(*arguments)

        return counted

    def _advance(self) -> None:
        self.num_advances += 1

    def sync(self, version: int) -> None:
        self.engine.begin_update()
        self.engine.end_update(version)

    def die(self) -> None:
        if self.server is not None:
            self.server.die()

    def steps(self, seconds: float, least_drawn: int = 0) -> list[Sample]:
        """Makes equally many steps on all ranks, for about `seconds` on the first, until `least_drawn` tokens are
        generated."""
        done, start, least = [], time.monotonic(), self.num_drawn + least_drawn
        while self.engine.num_unfinished:
            going_on = torch.tensor([time.monotonic() - start < seconds or self.num_drawn < least])
            dist.broadcast(going_on, 0)
            if not going_on:
                break
            done += self.engine.step()
        return done


def follow_the_first_rank() -> dict[str, Any]:
    """Generates with weight changes, suspensions and deaths of the server. Returns this rank's observations."""
    rig = Rig()
    engine, seen = rig.engine, {}
    seen["plain"] = engine.generate(ragged_requests(), LONG)
    engine.submit(ragged_requests(), LONG)
    done = rig.steps(0.1)
    rig.sync(1)
    done += rig.steps(0.1, least_drawn=1)
    suspended = [replace(sample, loss_mask=(False,) * len(sample.tokens)) for sample in engine.suspend()]
    seen["suspended"] = suspended
    engine.release_cache()
    engine.submit(suspended, LONG)
    done += rig.steps(0.05)
    rig.die()
    done += rig.steps(60)
    seen["interrupted"] = done
    engine.submit(ragged_requests(), LONG)
    engine.step()
    engine.begin_update()
    rig.die()
    engine.end_update(2)
    seen["update"] = rig.steps(60)
    seen["facts"] = [engine.num_unfinished, engine.num_restarts, engine.policy_version, rig.num_advances]
    seen["errors"] = _errors(rig)
    engine.close()
    assert rig.server is None or rig.server.broken == []
    return {name: [asdict(one) if hasattr(one, "id") else one for one in values] for name, values in seen.items()}


def _errors(rig: Rig) -> list[str]:
    """Returns the errors. Errors of the first rank are raised on the other as well."""
    texts = []
    rig.engine.begin_update()
    rig.engine.end_update(3)
    if rig.server is not None:
        rig.server.draw = lambda context, version: (1, None)
    try:
        rig.engine.generate(ragged_requests(2), LONG)
    except DivergenceError as error:
        texts.append(f"{error}, {rig.engine.num_unfinished} unfinished")
    if rig.server is not None:
        rig.server.answers["/generate"] = (400, "no such thing as straße")
    try:
        rig.engine.generate(ragged_requests(2), LONG)
    except EngineError as error:
        texts.append(str(error))
    return texts
