"""Bytes and seconds of a weight sync that sends what changed, beside those of one that sends everything."""

from rltrain.estimate.planned import PlannedJob
from rltrain.reshard.kernels.delta_format import BLOCK
from rltrain.residency.memory_plan import ranks_left_by_engines

CHANGED_SHARE = 0.03
"""Of elements of 16 bits that a step changes, as published of such training: 1 to 3%. Of wider ones all do."""


def keeping(job: PlannedJob) -> str | None:
    """Where ranks keep what they sent last, "device" or "host"; None where syncs send everything."""
    delta = job.config.synced_delta
    return delta.keep_on if delta and {"actor", "rollout"} <= job.grids.keys() else None


def kept_bytes(job: PlannedJob, rank: int) -> int:
    """What `rank` sends in a full sync, about, and therefore keeps: the actor what each node lacks, shared out evenly,
    engines what they pass on within their node. What a rank has in both roles is not taken off."""
    if keeping(job) is None:
        return 0
    actor, rollout = job.grids["actor"].ranks, job.grids["rollout"].ranks
    held = job.served_bytes_of("rollout")
    num_nodes = len({engine // job.ranks_per_node for engine in rollout})
    of_node = held * len(rollout) // num_nodes
    entering = min(of_node, held * job.grids["rollout"].tp)
    sent = entering * num_nodes // len(actor) if rank in actor else 0
    return sent + ((of_node - entering) * num_nodes // len(rollout) if rank in rollout else 0)


def sent_share(job: PlannedJob) -> float:
    """Bytes of a sync over those of a full one, in the mean over `full_every` of them: a changed element is sent with a
    byte for its place, and a block of elements has one for how many these are. Engines that have left their GPU get
    everything."""
    delta = job.config.synced_delta
    if delta is None or ranks_left_by_engines(job.config, job.placement):
        return 1.0
    item = job.item_bytes
    changed = CHANGED_SHARE if item <= 2 else 1.0
    share = min(1.0, (changed * (item + 1) + 1 / BLOCK) / item)
    return (1 + (delta.full_every - 1) * share) / delta.full_every
