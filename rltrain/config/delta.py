"""Config section weight_sync.delta."""

from typing import Literal

from rltrain.config.section import Count, NonNegativeInt, Section


class WeightDelta(Section):
    """The weight sync sends what changed since the last one, bit for bit what it would have sent otherwise. With
    rollout.engine http it sends everything to the rollout's ranks, and these write what changed to
    rollout.http.weights_dir, for servers that take it: launch/serve.py, and SGLang with rltrain's plugin."""

    full_every: Count = 50
    """Syncs from one that sends everything to the next. So do the first of a job, every one that finds an engine
    without the weights of the last, and some behind one that saved nothing because nearly all had changed. Of files,
    whole ones are written as well once those of what changed have as many bytes."""
    check_every: NonNegativeInt = 0
    """Syncs of what changed from one behind which checksums of both sides are compared, as weight_sync.verify does
    after every sync, to the next; 0: the first of a job alone. Where they differ everything is sent at once, and later
    ones are all compared. Not for files: those who apply them check what comes of it every time."""
    keep_on: Literal["device", "host"] = "device"
    """Where a rank keeps what it sent or wrote last: as many bytes as when that is everything."""
    in_shared_memory: bool = False
    """Compare what passes through memory that ranks of a node share on CPUs as well. To copy all of it takes no longer,
    so this is for measuring and for tests."""
