"""Posts and waits of the order: the fields of each transfer, its route, and when its post can be freed."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.errors import CheckpointError
from rltrain.exchange.exchange import Exchange, Key, Route, Shipment, as_tensors, read_parts, share
from rltrain.exchange.image_requests import image_tensors, keys_of, put_images
from rltrain.observability.trace import Trace
from rltrain.roles.role import Role
from rltrain.runtime.grid import Grid
from rltrain.schedule.order import Entry, Order
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import TRANSFERS, trained_roles

REPLAYED, REPLAYING = ("samples", "scored"), ("reward", "actor", "inference")
"""Transfers with the experts chosen by the engine, and the roles that get them.

The roles compute the actor's log-probs, or pass the choices on to such a role.
"""
SEEING = ("reward", "actor", "critic", "reference", "inference")
"""Roles that get the images of the same transfers. Their models see, or they pass the images on."""
IMAGE_FIELDS = ("image_keys", "rope_positions")

HoldImages = Callable[[str, int, int, Experience], None]
"""Holds the images of the experience of (transfer, step, chunk) for this rank until the end of the step."""


def key_of(post: Entry) -> Key:
    """Returns the key of a post's shipment."""
    return post.roles[0], post.name, post.step, post.chunk


class Transfers:
    """This rank's ends of all transfers of `order`, for its roles."""

    def __init__(
        self,
        shape: RunShape,
        grids: Mapping[str, Grid],
        order: Order,
        exchange: Exchange,
        roles: Mapping[str, Role],
        trace: Trace,
        hold_images: HoldImages = lambda transfer, step, chunk, experience: None,
        *,
        saves_images: bool = False,
    ) -> None:
        """`hold_images` is called for all experience that this rank receives or restores.

        With `saves_images` checkpoints have the pixels of images.
        """
        self.hold_images, self.saves_images = hold_images, saves_images
        self.shape, self.grids, self.order = shape, grids, order
        self.exchange, self.roles, self.trace = exchange, roles, trace
        self.awaited: dict[int, int] = {}
        """Position of a post in the exchange's outbox -> position of its wait."""

    def post(self, position: int) -> None:
        """Sends the shipment left by the source role. Waits first until all posts awaited before `position` were
        received."""
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
        """Receives a shipment for the destination role."""
        entry = self.order[position]
        shipment = self.exchange.wait(self._route(self.order.post_of(position)))
        self.hold_images(entry.name, entry.step, entry.chunk, shipment.experience)
        self.roles[entry.roles[1]].shipments[entry.name, entry.step, entry.chunk] = shipment

    def finish(self, end: int) -> None:
        """Waits until all posts awaited before position `end` were received. The run ended at `end`."""
        self._retire_before(end)
        self.exchange.finish()

    def close(self) -> None:
        """Closes the connections. Called once no rank waits for this one."""
        self.exchange.transport.close()

    def save(self, position: int) -> dict[str, Tensor]:
        """Returns copies of this rank's posts before `position` that are awaited after it, or {} if there are none.

        Called when this rank has reached `position`. `restore` takes the result.
        """
        crossing: dict[Key, Shipment] = {}
        for posted, entry in self.order.crossing(position).items():
            key = key_of(entry)
            if posted not in self.exchange.outbox:
                continue
            shipment = self.exchange.posted(posted)
            if key not in crossing or len(shipment.experience.present()) > len(crossing[key].experience.present()):
                crossing[key] = shipment  # destinations of the same samples may get different fields
        images, found = self.exchange.images, as_tensors(crossing)
        if images is not None and self.saves_images:
            found |= image_tensors(images, {key for one in crossing.values() for key in keys_of(one.experience)})
        return found

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Gives experience that crossed a checkpoint back to its source roles. The first posts of the order send it
        again.

        `saved` has the results of `save` on all ranks of the saved run, in their order. Raises CheckpointError if the
        order begins with other posts.
        """
        step = min((entry.step for entry in self.order), default=0)
        images = None if self.exchange is None else self.exchange.images
        parts = read_parts([put_images(images, of_rank, step) for of_rank in saved])
        self._expect_crossing(parts)
        for (source, name, step, chunk), of_all in parts.items():
            if source in self.roles:
                role = self.roles[source]
                shipment = role.shipments[name, step, chunk] = share(of_all, role.dp, role.grid.dp)
                self.hold_images(name, step, chunk, shipment.experience)

    def _expect_crossing(self, found: Mapping[Key, Sequence[Shipment]]) -> None:
        posts = [*takewhile(lambda entry: entry.kind == "post", self.order)]
        expected = {key_of(post) for post in posts}
        if expected != {*found}:
            raise CheckpointError(
                f"The checkpoint holds unreceived experience for {sorted(found)} (role, transfer, step, chunk); "
                f"expected {sorted(expected)}. Resume with the schedule of the saved run, and keep the reward on "
                "training ranks if it was there."
            )
        for key, (first, *_) in found.items():
            fields = {name for post in posts if key_of(post) == key for name in self._fields(post.name, post.roles[1])}
            if "routed_experts" in fields and not first.experience.has("routed_experts"):
                raise CheckpointError(
                    f"The checkpoint's unreceived experience {key} (role, transfer, step, chunk) lacks the experts "
                    "chosen by engines. Resume with model.router_replay of the saved run."
                )
            if ("image_keys" in fields) != first.experience.has("image_keys"):
                found_images = "has images" if first.experience.has("image_keys") else "lacks images"
                raise CheckpointError(
                    f"The checkpoint's unreceived experience {key} (role, transfer, step, chunk) {found_images}. "
                    "Resume with model.vision of the saved run."
                )

    def _retire_before(self, position: int) -> None:
        """Waits until all posts awaited before `position` were received, and frees them."""
        due = [posted for posted, awaited in self.awaited.items() if awaited < position]
        self.exchange.retire(due)
        for posted in due:
            del self.awaited[posted]

    def _is_posted_again(self, position: int) -> bool:
        """Returns whether the same shipment goes to another role later."""
        entry = self.order[position]
        same = (entry.kind, entry.name, entry.roles[0], entry.chunk)
        return any(
            later > position and (e.kind, e.name, e.roles[0], e.chunk) == same
            for later, e in self.order.of_step(entry.step)
        )

    def _fields(self, transfer: str, destination: str) -> tuple[str, ...]:
        """Returns the fields of a transfer. Under dynamic sampling, samples leave the rollout with their scores."""
        is_scored = transfer == "samples" and self.shape.selects_groups
        fields = TRANSFERS["scored" if is_scored else transfer]
        replayed = self.shape.replays_rollout and transfer in REPLAYED
        if replayed and destination in REPLAYING:
            fields = (*fields, "routed_experts")
        if not self.shape.sees or destination not in SEEING:
            return fields
        if transfer == "evaluation_samples":  # images are only for the records of samples
            return (*fields, "image_keys")
        return (*fields, *IMAGE_FIELDS) if transfer in REPLAYED else fields

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
