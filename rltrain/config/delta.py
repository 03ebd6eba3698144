"""Config section weight_sync.delta."""

from typing import Literal

from rltrain.config.section import Count, NonNegativeInt, Section


class WeightDelta(Section):
    """The weight sync sends what changed since the last one, bit for bit what it would have sent otherwise."""

    full_every: Count = 50
    """Syncs from one that sends everything to the next. So do the first of a job, every one that finds an engine
    without the weights of the last, and some behind one that saved nothing because nearly all had changed."""
    check_every: NonNegativeInt = 0
    """Syncs of what changed from one behind which checksums of both sides are compared, as weight_sync.verify does
    after every sync, to the next; 0: the first of a job alone. Where they differ everything is sent at once, and later
    ones are all compared."""
    keep_on: Literal["device", "host"] = "device"
    """Where a rank keeps what it sent last: as many bytes as it sends in a full sync."""
    in_shared_memory: bool = False
    """Compare what passes through memory that ranks of a node share on CPUs as well. To copy all of it takes no longer,
    so this is for measuring and for tests."""
