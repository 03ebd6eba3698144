"""How much the ranks hold at most, and what to say where that is too much."""

from collections.abc import Sequence

from rltrain.dry_run.sizes import numbered, size, sizes
from rltrain.errors import ConfigError
from rltrain.estimate.changes import Change
from rltrain.estimate.hardware import GB, Gpu
from rltrain.estimate.peak import RankMemory, largest


def describe_fit(memories: Sequence[RankMemory], gpu: Gpu, ranks_per_node: int) -> list[str]:
    """Peak and host memory per kind of rank; kinds with equal numbers share a line."""
    lines: dict[tuple[str, ...], list[int]] = {}
    for memory in memories:
        peak = memory.peak
        text = [f"peak {size(peak.total)} of {size(gpu.memory_gb * GB)} at {peak.task}: {sizes(peak.bytes_of)}"]
        if memory.host:
            text.append(f"  pinned on the host: {sizes(memory.host)}")
        lines.setdefault(tuple(text), []).extend(memory.ranks)
    found = []
    for (first, *others), ranks in lines.items():
        found += [f"{numbered('rank', ranks)}: {first}", *others]
    fullest = max((sum(memory.host.values()) for memory in memories), default=0)
    if fullest * min(ranks_per_node, 8) > gpu.host_memory_gb * GB * 8:
        found.append(f"  a node's memory of {size(gpu.host_memory_gb * GB * ranks_per_node)} may not hold that")
    return found


def refuse_what_does_not_fit(memories: Sequence[RankMemory], gpu: Gpu, name: str, changes: Sequence[Change]) -> None:
    """ConfigError with the ranks that hold most, and the changes of the config that would save most."""
    worst = largest(memories)
    lines = [
        f"{numbered('rank', worst.ranks)} ({', '.join(worst.kind.device_roles)}) would "
        f"hold {size(worst.peak.total)} at {worst.peak.task}; expected at most {size(gpu.usable_bytes)} of the "
        f"{size(gpu.memory_gb * GB)} of --gpu {name}: {sizes(worst.peak.bytes_of)}"
    ]
    for change in changes:
        peak = change.memory.peak
        verdict = "fits" if change.memory.fits(gpu) else "still too much"
        lines.append(f"  {change.text}: {size(peak.total)} at {peak.task}, {verdict}")
    if changes:
        lines.insert(1, "What would save most, each alone:")
    raise ConfigError("\n".join(lines))
