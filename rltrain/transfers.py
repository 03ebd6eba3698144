"""The posts and waits of the order: which fields travel, by which route, and when a post may be forgotten."""

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from torch import Tensor

from rltrain.errors import CheckpointError
from rltrain.exchange.exchange import Exchange, Route, Shipment
from rltrain.exchange.saved_shipments import Key, as_tensors, read_parts, share
from rltrain.observability.trace import AnyTrace
from rltrain.roles.role import Job, Role
from rltrain.schedule.order import Order

SAMPLES = (
    "sample_ids",
    "group_ids",
    "prompt_ids",
    "lengths",
    "truncated",
    "tokens",
    "response_mask",
    "policy_version",
    "rollout_logprobs",
)

# The fields of Experience that each transfer carries.
FIELDS_OF: dict[str, tuple[str, ...]] = {
    "samples": SAMPLES,
    "evaluation_samples": SAMPLES,
    "scored": (*SAMPLES, "rewards"),
    "reference_logprobs": ("group_ids", "lengths", "reference_logprobs"),
    "values": ("group_ids", "lengths", "values"),
    "returns": ("group_ids", "lengths", "response_mask", "returns"),
}

MINI_BATCHED = ("actor", "critic")
"""Roles whose replicas each get their share of every mini-batch."""


class Transfers:
    """This rank's ends of all transfers of `order`, for the roles that it hosts."""

    def __init__(self, job: Job, order: Order, exchange: Exchange, roles: Mapping[str, Role], trace: AnyTrace) -> None:
        self.job, self.order, self.exchange, self.roles, self.trace = job, order, exchange, roles, trace
        self.wait_position = {entry.transfer: i for i, entry in enumerate(order) if entry.kind == "wait"}
        self.post_position = {entry.transfer: i for i, entry in enumerate(order) if entry.kind == "post"}
        self.last_post = {(e.name, e.roles[0], e.step, e.chunk): i for i, e in enumerate(order) if e.kind == "post"}

    def post(self, position: int) -> None:
        """Send what the source role left, once what should have been received before this position has been."""
        self.exchange.retire([p for p in self.exchange.outbox if self._wait_of(p) < position])
        entry = self.order[position]
        source, shipment = entry.roles[0], (entry.name, entry.step, entry.chunk)
        shipments = self.roles[source].shipments
        self.exchange.post(self._route(position), shipments[shipment])
        if position == self.last_post[entry.name, source, entry.step, entry.chunk]:
            del shipments[shipment]
        self.trace.counter("steps in the outbox", len({self.order[p].step for p in self.exchange.outbox}))

    def wait(self, position: int) -> None:
        """Receive for the destination role."""
        entry = self.order[position]
        shipment = self.exchange.wait(self._route(self.post_position[entry.transfer]))
        self.roles[entry.roles[1]].shipments[entry.name, entry.step, entry.chunk] = shipment

    def finish(self, end: int) -> None:
        """Wait until all has been received that somebody waits for before position `end`, where the run ended."""
        self.exchange.retire([p for p in self.exchange.outbox if self._wait_of(p) < end])

    def save(self, position: int) -> dict[str, Tensor]:
        """What this rank posted before `position` that is awaited behind it: copies, for `restore`; {} if nothing is.

        To be called when this rank has come to `position`.
        """
        crossing: dict[Key, Shipment] = {}
        for entry in self.order.crossing(position):
            posted = self.post_position[entry.transfer]
            key = (entry.roles[0], entry.name, entry.step, entry.chunk)
            if posted in self.exchange.outbox and key not in crossing:
                crossing[key] = self.exchange.posted(posted)
        return as_tensors(crossing)

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Give what crossed a checkpoint to the roles that posted it, from which the order's first posts send it again.

        `saved` is what `save` returned on all ranks of the run that saved, in their order. Raises CheckpointError where
        the order begins with other posts.
        """
        parts = read_parts(saved)
        self._expect_crossing(parts)
        for (source, name, step, chunk), of_all in parts.items():
            if source in self.roles:
                role = self.roles[source]
                role.shipments[name, step, chunk] = share(of_all, role.dp, role.grid.dp)

    def _expect_crossing(self, found: Collection[Key]) -> None:
        posts = takewhile(lambda entry: entry.kind == "post", self.order)
        expected = {(entry.roles[0], entry.name, entry.step, entry.chunk) for entry in posts}
        if expected != {*found}:
            raise CheckpointError(
                f"The checkpoint holds experience on its way as {sorted(found)} (role, transfer, step, chunk); "
                f"expected {sorted(expected)}. Go on with the schedule that it was saved with, and with the reward on "
                "ranks of training where it was."
            )

    def _wait_of(self, posted: int) -> int:
        return self.wait_position[self.order[posted].transfer]

    def _route(self, posted: int) -> Route:
        entry = self.order[posted]
        source, destination = entry.roles
        part = f"{entry.step}.{entry.chunk}" if self.job.shape.num_chunks > 1 else str(entry.step)
        return Route(
            name=f"{entry.name}[{part}] ({source} -> {destination})",
            source=self.job.grids[source],
            destination=self.job.grids[destination],
            fields=FIELDS_OF[entry.name],
            position=posted,
            num_blocks=self.job.shape.chunk_blocks if destination in MINI_BATCHED else 1,
        )
