"""Small values that ranks leave for each other in the shared store, and waits for them."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rltrain.cluster.world import World
from rltrain.errors import StallError
from rltrain.liveness.heartbeat import Heartbeat
from rltrain.liveness.node_beats import beats_of
from rltrain.liveness.observer import Observer
from rltrain.liveness.stall import what_it_does
from rltrain.liveness.store_waits import wait_briefly

LOOK_S = 1.0
"""Between two looks at the heartbeats of the ranks waited for."""
GUARDED_LOOK_S = 10.0
"""As long a wait goes on at the store where a watchdog looks at them."""


class JobStore:
    """Small JSON values that ranks leave for each other in the store: metrics, verdicts; and this rank's heartbeat.

    In a `guarded` job a watchdog ends waits that are in vain; otherwise they end
    themselves.
    """

    def __init__(self, world: World, guarded: bool = False) -> None:
        self.world = world
        self.guarded = guarded
        self.store = dist.PrefixStore("job_store", world.store)
        self.beats = beats_of(world)
        self.heartbeat = Heartbeat(world.rank, world.store, put=self.beats.put)
        self.observer = Observer(self.heartbeat.board, world.size, world.timeouts)

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        return self.store.check(list(keys))

    def get(self, key: str, waiting_for: str) -> Any:
        """The value at `key`, once any other rank has put it there; StallError naming `waiting_for` if none will."""
        if not self.has(key):
            self._wait_for(key, waiting_for)
        return json.loads(self.store.get(key))

    def agreed(self, key: str, proposed: bool) -> bool:
        """What the first rank to come here has proposed, for all ranks."""
        found: bool = json.loads(self.store.compare_set(key, "", json.dumps(proposed)))
        return found

    def meet(self, key: str, num_ranks: int, waiting_for: str) -> None:
        """Return once so many ranks have come here. Collective over: those ranks."""
        if self.store.add(f"{key}/came", 1) == num_ranks:
            self.put(key, True)
        self.get(key, waiting_for)

    def forget(self, key: str) -> None:
        self.store.delete_key(key)

    def activity(self, rank: int) -> str:
        """What `rank` is doing, in words."""
        beat = self.heartbeat.now() if rank == self.world.rank else self.heartbeat.board.read([rank])[rank]
        return f"{what_it_does(beat)} since {max(time.time() - beat.since, 0):.0f} s"

    def end_wait_in_vain(self, describe: Callable[[], str]) -> None:
        """Raise StallError if nobody in the job gets on, or a rank is lost; `describe` says what it waits for.

        To be called every LOOK_S seconds of a wait inside `heartbeat.waiting`.
        """
        if not self.guarded and (verdict := self.observer.verdict()):
            raise StallError(f"{describe()}: {verdict}")

    def _wait_for(self, key: str, waiting_for: str) -> None:
        with self.heartbeat.waiting(waiting_for, ()):
            while not wait_briefly(self.store, [key], GUARDED_LOOK_S if self.guarded else LOOK_S):
                self.end_wait_in_vain(lambda: f"rank {self.world.rank} waits for {waiting_for}")
