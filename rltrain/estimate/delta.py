"""Bytes and seconds of a weight sync that sends what changed, beside those of one that sends everything; and bytes of
the files that servers are given which somebody else runs."""

from rltrain.estimate.planned import PlannedJob
from rltrain.reshard.slices import DELTA_BLOCK
from rltrain.schedule.memory_plan import ranks_left_by_engines

CHANGED_SHARE = 0.03
"""Of elements of 16 bits that a step changes, as published of such training: 1 to 3%. Of wider ones all do."""


def keeping(job: PlannedJob) -> str | None:
    """Where ranks keep what they sent or wrote last, "device" or "host"; None where all is sent and written."""
    delta = job.config.weight_sync.delta
    return delta.keep_on if delta and {"actor", "rollout"} <= job.grids.keys() else None


def kept_bytes(job: PlannedJob, rank: int) -> int:
    """What `rank` sends in a full sync, about, and therefore keeps: the actor what each node lacks, shared out evenly,
    engines what they pass on within their node. What a rank has in both roles is not taken off. Of files for servers
    the rollout's ranks keep what they write."""
    if keeping(job) is None:
        return 0
    actor, rollout = job.grids["actor"].ranks, job.grids["rollout"].ranks
    held = job.served_bytes_of("rollout")
    if job.config.synced_delta is None:
        return held // len(rollout) if rank in rollout else 0
    num_nodes = len({engine // job.ranks_per_node for engine in rollout})
    of_node = held * len(rollout) // num_nodes
    entering = min(of_node, held * job.grids["rollout"].tp)
    sent = entering * num_nodes // len(actor) if rank in actor else 0
    return sent + ((of_node - entering) * num_nodes // len(rollout) if rank in rollout else 0)


def sent_share(job: PlannedJob) -> float:
    """Bytes of a sync over those of a full one, in the mean. Engines that have left their GPU get everything."""
    if job.config.synced_delta is None or ranks_left_by_engines(job.config, job.placement):
        return 1.0
    return changed_share(job)


def changed_share(job: PlannedJob) -> float:
    """Bytes of what changed over those of all weights, in the mean over `full_every` syncs: a changed element has a
    byte for its place, and a block of elements one for how many these are."""
    delta = job.config.weight_sync.delta
    assert delta is not None, "what changed is told apart"
    item = job.item_bytes
    changed = CHANGED_SHARE if item <= 2 else 1.0
    share = min(1.0, (changed * (item + 1) + 1 / DELTA_BLOCK) / item)
    return (1 + (delta.full_every - 1) * share) / delta.full_every
