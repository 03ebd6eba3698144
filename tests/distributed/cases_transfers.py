"""Cases for test_transfers.py: roles without models follow an asynchronous order, and one resumed from a cut."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import Config
from rltrain.exchange.exchange import Exchange, Shipment
from rltrain.exchange.transport import Transport
from rltrain.roles.transfers import Transfers
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.placement import resolve_placement
from rltrain.runtime.world import LOOPBACK, join_world
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import Order
from rltrain.schedule.shape import RunShape
from tests.unit.test_exchange import make_experience

NUM_RANKS, RANKS_PER_NODE = 4, 2
NUM_STEPS, PER_STEP, NUM_SAMPLES = 6, 8, 2
CHUNKS = 2
Received = dict[str, list[list[float]]]


def make_config(placement: Mapping[str, str | int]) -> Config:
    return Config.model_validate(
        {
            "steps": NUM_STEPS,
            "placement": placement,
            "model": {"path": "m"},
            "data": {"train": {"path": "t"}},
            "batch": {"prompts_per_step": PER_STEP, "samples_per_prompt": NUM_SAMPLES},
            "schedule": {"mode": "asynchronous", "max_staleness": 2, "chunks": CHUNKS},
        }
    )


@dataclass
class StandIn:
    """A role without a model."""

    grid: Grid
    rank: int
    shipments: dict[tuple[str, int, int], Shipment] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        return self.grid.coordinates(self.rank).dp


class Rank:
    """One rank of a job `name`, with its own transport. So it never meets messages left over by an earlier job."""

    def __init__(self, name: str, job_store: JobStore, placement: Mapping[str, str | int], training_tp: int) -> None:
        self.config = make_config(placement)
        self.placement = resolve_placement(placement, NUM_RANKS, NUM_RANKS)
        self.order = build_order(self.config, self.placement)
        rank = job_store.world.rank
        tp = {"actor": training_tp, "reference": training_tp}
        self.grids = {role: Grid(self.placement.ranks(role), tp=tp.get(role, 1)) for role in self.placement.roles}
        self.roles = {role: StandIn(self.grids[role], rank) for role in self.placement.hosts(rank)}
        world = job_store.world
        stores = [dist.PrefixStore(name, store) for store in (world.store, world.background)]
        transport = Transport(rank, LOOPBACK, *stores)
        self.exchange = Exchange(rank, transport, Waiter(job_store), RANKS_PER_NODE)
        self.received: Received = {}

    def follow(
        self, order: Order, restored: list[dict[str, Tensor]] | None = None, save_at: int = -1
    ) -> dict[str, Tensor]:
        """Executes `order` and returns the data saved at position `save_at`."""
        trace = SimpleNamespace(counter=lambda *_: None)
        transfers = Transfers(RunShape.of(self.config), self.grids, order, self.exchange, self.roles, trace)
        if restored is not None:
            transfers.restore(restored)
        saved: dict[str, Tensor] = {}
        for position, entry in order.items():
            if position == save_at:
                saved = transfers.save(position)
            if not self.roles.keys() & {*entry.actors}:
                continue
            if entry.kind == "task":
                if task := getattr(self, entry.name, None):  # other tasks have no experience
                    task(entry.step, entry.chunk)
            else:
                {"post": transfers.post, "wait": transfers.wait}[entry.kind](position)
        transfers.finish(order.end)
        return saved

    def generate(self, step: int, chunk: int) -> None:
        """Posts this replica's groups of the chunk."""
        role, num_groups = self.roles["rollout"], PER_STEP // CHUNKS
        seed = step * CHUNKS + chunk
        lengths = [1 + (3 * i + seed) % 11 for i in range(num_groups * NUM_SAMPLES)]
        whole = make_experience(lengths, [i // NUM_SAMPLES for i in range(len(lengths))], seed)
        whole = whole.with_fields(sample_ids=seed * 100 + torch.arange(len(lengths)))
        mine = (whole.group_ids % role.grid.dp == role.dp).nonzero().flatten()
        group_tokens = torch.tensor(lengths).view(-1, NUM_SAMPLES).sum(1)
        holders = torch.arange(num_groups) % role.grid.dp
        role.shipments["samples", step, chunk] = Shipment(whole.select(mine), group_tokens, holders)

    def score(self, step: int, chunk: int) -> None:
        role = self.roles["reward"]
        samples = role.shipments.pop(("samples", step, chunk))
        rewards = samples.experience.sample_ids.float()
        role.shipments["scored", step, chunk] = samples.with_fields(rewards=rewards, reward_parts=rewards[:, None])

    def reference_logprobs(self, step: int, chunk: int) -> None:
        role = self.roles["reference"]
        scored = role.shipments.pop(("scored", step, chunk))
        logprobs = scored.experience.tokens.float()
        nobody_asks = torch.empty(len(logprobs), 0)
        role.shipments["reference_logprobs", step, chunk] = scored.with_fields(
            reference_logprobs=logprobs, reference_top_ids=nobody_asks.long(), reference_top_logprobs=nobody_asks
        )

    def advantages(self, step: int, chunk: int) -> None:
        """Records the received numbers of every sample under its id."""
        shipments = self.roles["actor"].shipments
        scored = shipments.pop(("scored", step, chunk)).experience
        reference = shipments.pop(("reference_logprobs", step, chunk)).experience
        lengths = scored.lengths.tolist()
        tokens, logprobs = scored.tokens.split(lengths), scored.rollout_logprobs.split(lengths)
        judged = reference.reference_logprobs.split(lengths)
        for i, (sample, reward) in enumerate(zip(scored.sample_ids.tolist(), scored.rewards.tolist(), strict=True)):
            assert str(sample) not in self.received
            self.received[str(sample)] = [[step, chunk, reward], *(x[i].tolist() for x in (tokens, logprobs, judged))]


def cut_and_go_on(placements: list[tuple[dict[str, str], dict[str, str], int]], step: int) -> list[dict]:
    """Runs on each pair of placements: the first run saves at `step`, the second resumes from there.

    Returns the numbers received by an actor's rank in both runs.
    """
    job_store = JobStore(join_world(60.0))
    return [_cut_and_go_on(job_store, *pair, step, number) for number, pair in enumerate(placements)]


def _cut_and_go_on(
    job_store: JobStore, before: dict[str, str], after: dict[str, str], training_tp: int, step: int, number: int
) -> dict:
    first = Rank(f"{number} before", job_store, before, training_tp)
    second = Rank(f"{number} after", job_store, after, training_tp)
    saved = first.follow(first.order, save_at=first.order.boundary(step))
    files = dist.PrefixStore(f"files {number}", job_store.world.store)
    files.set(str(job_store.world.rank), safetensors.torch.save(saved))
    by_rank = [safetensors.torch.load(files.get(str(rank))) for rank in range(NUM_RANKS)]
    second.follow(second.order.from_step(step), by_rank)
    return {
        "before": first.received,
        "after": second.received,
        "num_saved": len(saved),
        "outbox": len(second.exchange.outbox) + len(second.exchange.relayed),
    }
