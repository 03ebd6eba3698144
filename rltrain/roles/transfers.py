"""The posts and waits of the order: which fields travel, by which route, and when a post may be forgotten."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

from torch import Tensor

from rltrain.errors import CheckpointError
from rltrain.exchange.exchange import Exchange, Key, Route, Shipment, as_tensors, read_parts, share
from rltrain.observability.trace import Trace
from rltrain.roles.role import Role
from rltrain.runtime.grid import Grid
from rltrain.schedule.order import Entry, Order
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import TRANSFERS, trained_roles

REPLAYED, REPLAYING = ("samples", "scored"), ("reward", "actor", "inference")
"""Transfers with the experts that the engine chose, and roles to which these go: those of which the model makes the
actor's log-probs, and who passes them on."""


def key_of(post: Entry) -> Key:
    """Of the shipment that a post sends."""
    return post.roles[0], post.name, post.step, post.chunk


class Transfers:
    """This rank's ends of all transfers of `order`, for the roles that it hosts."""

    def __init__(
        self,
        shape: RunShape,
        grids: Mapping[str, Grid],
        order: Order,
        exchange: Exchange,
        roles: Mapping[str, Role],
        trace: Trace,
    ) -> None:
        self.shape, self.grids, self.order = shape, grids, order
        self.exchange, self.roles, self.trace = exchange, roles, trace
        self.awaited: dict[int, int] = {}
        """Position of a post in the exchange's outbox -> that of its wait."""

    def post(self, position: int) -> None:
        """Send what the source role left, once what should have been received before this position has been."""
        self._retire_before(position)
        entry = self.order[position]
        source, shipment = entry.roles[0], (entry.name, entry.step, entry.chunk)
        shipments = self.roles[source].shipments
        self.awaited[position] = self.order.wait_of(position)
        self.exchange.post(self._route(position), shipments[shipment])
        if not self._is_posted_again(position):
            del shipments[shipment]
        self.trace.counter("steps in the outbox", len({self.order[p].step for p in self.exchange.outbox}))

    def wait(self, position: int) -> None:
        """Receive for the destination role."""
        entry = self.order[position]
        shipment = self.exchange.wait(self._route(self.order.post_of(position)))
        self.roles[entry.roles[1]].shipments[entry.name, entry.step, entry.chunk] = shipment

    def finish(self, end: int) -> None:
        """Wait until all has been received that somebody waits for before position `end`, where the run ended."""
        self._retire_before(end)
        self.exchange.finish()

    def close(self) -> None:
        """Once nobody waits for this rank any more."""
        self.exchange.transport.close()

    def save(self, position: int) -> dict[str, Tensor]:
        """What this rank posted before `position` that is awaited behind it: copies, for `restore`; {} if nothing is.

        To be called when this rank has come to `position`.
        """
        crossing: dict[Key, Shipment] = {}
        for posted, entry in self.order.crossing(position).items():
            key = key_of(entry)
            if posted not in self.exchange.outbox:
                continue
            shipment = self.exchange.posted(posted)
            if key not in crossing or len(shipment.experience.present()) > len(crossing[key].experience.present()):
                crossing[key] = shipment  # roles may be sent different fields of the same samples
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

    def _expect_crossing(self, found: Mapping[Key, Sequence[Shipment]]) -> None:
        posts = [*takewhile(lambda entry: entry.kind == "post", self.order)]
        expected = {key_of(post) for post in posts}
        if expected != {*found}:
            raise CheckpointError(
                f"The checkpoint holds experience on its way as {sorted(found)} (role, transfer, step, chunk); "
                f"expected {sorted(expected)}. Go on with the schedule that it was saved with, and with the reward on "
                "ranks of training where it was."
            )
        for key in (key for key, (first, *_) in found.items() if not first.experience.has("routed_experts")):
            if any("routed_experts" in self._fields(post.name, post.roles[1]) for post in posts if key_of(post) == key):
                raise CheckpointError(
                    f"The checkpoint holds experience on its way without the experts that engines chose: {key} (role, "
                    "transfer, step, chunk). Go on with model.router_replay as it was when it was saved."
                )

    def _retire_before(self, position: int) -> None:
        """Wait until all has been received whose wait stands before `position`."""
        due = [posted for posted, awaited in self.awaited.items() if awaited < position]
        self.exchange.retire(due)
        for posted in due:
            del self.awaited[posted]

    def _is_posted_again(self, position: int) -> bool:
        """Whether another role is sent the same later."""
        entry = self.order[position]
        same = (entry.kind, entry.name, entry.roles[0], entry.chunk)
        return any(
            later > position and (e.kind, e.name, e.roles[0], e.chunk) == same
            for later, e in self.order.of_step(entry.step)
        )

    def _fields(self, transfer: str, destination: str) -> tuple[str, ...]:
        """Samples are scored already where the rollout selects groups by their rewards."""
        is_scored = transfer == "samples" and self.shape.selects_groups
        fields = TRANSFERS["scored" if is_scored else transfer]
        replayed = self.shape.replays_rollout and transfer in REPLAYED
        return (*fields, "routed_experts") if replayed and destination in REPLAYING else fields

    def _route(self, posted: int) -> Route:
        entry = self.order[posted]
        source, destination = entry.roles
        part = f"{entry.step}.{entry.chunk}" if self.shape.num_chunks > 1 else str(entry.step)
        return Route(
            name=f"{entry.name}[{part}] ({source} -> {destination})",
            source=self.grids[source],
            destination=self.grids[destination],
            fields=self._fields(entry.name, destination),
            position=posted,
            num_blocks=self.shape.chunk_blocks if destination in trained_roles() else 1,
        )
