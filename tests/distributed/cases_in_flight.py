"""Cases for test_in_flight.py: an actor and engines without models follow the order of an asynchronous run."""

import random
import time
from types import SimpleNamespace

import torch.distributed as dist

from rltrain.config.schema import Config
from rltrain.rollout.generation_loop import (
    CompletionLog,
    GenerationLoop,
    LeaderDecisions,
    SharedAssignment,
    StreamRules,
)
from rltrain.rollout.in_flight_sync import InFlightSync
from rltrain.rollout.sample import SampleGroup
from rltrain.runtime.job_store import poll
from rltrain.runtime.placement import resolve_placement
from rltrain.runtime.world import join_world
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import WEIGHT_SYNC, Entry
from tests.support.generation_loops import prompt_groups
from tests.support.shared_store import ShortPatience

ACTOR = 0
ENGINES = ((1, 2, 3, 4), (5,))
NUM_RANKS = 6
PER_STEP, NUM_SAMPLES = 4, 2
PATIENCE = ShortPatience()
CONFIG = Config.model_validate(
    {
        "steps": 15,
        "placement": {"actor": ACTOR, "rollout": "1-5", "reward": ACTOR},
        "model": {"path": "m"},
        "data": {"train": {"path": "t"}},
        "batch": {"prompts_per_step": PER_STEP, "samples_per_prompt": NUM_SAMPLES},
        "schedule": {"mode": "asynchronous", "max_staleness": 2},
    }
)
ORDER = build_order(CONFIG, resolve_placement(CONFIG.placement, NUM_RANKS, NUM_RANKS))


class Rank:
    """One rank. A weight sync is a barrier of all ranks; pauses of random length replace all other work."""

    def __init__(self) -> None:
        world = join_world(60.0)
        groups = {ranks: dist.new_group(list(ranks)) for ranks in ENGINES}
        self.rank, self.store = world.rank, dist.PrefixStore("case", world.store)
        self.rng = random.Random(self.rank)
        self.joined: list[int] = []
        self.engine_ranks = next((ranks for ranks in ENGINES if self.rank in ranks), ())
        leader, *followers = self.engine_ranks or (ACTOR,)
        self.in_flight = InFlightSync(
            ORDER.syncs(), self.store, leader=leader, followers=followers, rank=self.rank, run=self.take_weights
        )
        self.drawn: list[SampleGroup] = []
        if self.engine_ranks:
            self.loop = self.make_loop(groups[self.engine_ranks] if len(self.engine_ranks) > 1 else None)

    def make_loop(self, group: dist.ProcessGroup | None) -> GenerationLoop:
        return GenerationLoop(
            prompt_groups(lambda number: 1 + number * 7 % 23, NUM_SAMPLES, num_slots=6),
            SharedAssignment(self.store),
            CompletionLog(self.store, PER_STEP, num_readers=NUM_RANKS - 1, chunks_per_log=1),
            LeaderDecisions(group),
            PATIENCE,
            SimpleNamespace(advance=lambda: self.pause(2e-3)),
            StreamRules(
                CONFIG.steps * PER_STEP, PER_STEP, num_ahead=PER_STEP, max_staleness=CONFIG.schedule.max_staleness
            ),
            engine=ENGINES.index(self.engine_ranks),
            ranks=[],
            in_flight=self.in_flight,
        )

    def pause(self, longest_s: float) -> None:
        time.sleep(self.rng.random() * longest_s)

    def take_weights(self, position: int) -> None:
        if self.engine_ranks:
            self.loop.groups.engine.begin_update()
        dist.barrier()
        self.joined.append(ORDER[position].step)
        if self.engine_ranks:
            self.loop.groups.engine.policy_version = ORDER[position].step

    def act(self) -> None:
        """Trains on a step after all engines have handed it over. Announces each sync and waits for it."""
        for position, entry in ORDER.items():
            if entry.name == "update":
                due = (entry.step + 1) * (NUM_RANKS - 1)
                poll(PATIENCE, lambda due=due: self.store.add("handed over", 0) >= due or None, str(entry), [])
                self.pause(20e-3)
            elif entry.name == WEIGHT_SYNC:
                self.in_flight.announce()
                self.take_weights(position)

    def draw(self) -> None:
        for position, entry in ORDER.items():
            if "rollout" not in entry.actors:
                continue
            self.in_flight.position = position
            if entry.name == WEIGHT_SYNC:
                self.in_flight.reach(position)
            elif entry.name == "generate":
                self.generate(entry)
            else:
                self.serve_for(self.rng.random() * 10e-3)

    def generate(self, entry: Entry) -> None:
        self.in_flight.enter_together(PATIENCE, str(entry))
        _, drawn = self.loop.run(entry.step, 0)
        self.drawn += drawn
        self.store.add("handed over", 1)

    def serve_for(self, seconds: float) -> None:
        """Waits for other ranks, as the exchange does."""
        end = time.monotonic() + seconds
        poll(PATIENCE, lambda: time.monotonic() >= end or None, "a while", [], serve=self.in_flight.join_if_due)


def a_run() -> dict:
    rank = Rank()
    rank.draw() if rank.engine_ranks else rank.act()
    dist.barrier()
    return {
        "joined": rank.joined,
        "positions": [group.position for group in rank.drawn],
        "versions": [list(s.policy_versions) for group in rank.drawn for s in group.samples],
    }
