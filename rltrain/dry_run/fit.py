"""How much the ranks hold at most, and what to say where that is too much."""

from collections import Counter
from collections.abc import Sequence
from textwrap import wrap

from rltrain.dry_run.sizes import WIDTH, numbered, size, sizes
from rltrain.errors import ConfigError
from rltrain.estimate.changes import Change
from rltrain.estimate.hardware import GB, Gpu
from rltrain.estimate.peak import RankMemory, largest


def describe_fit(memories: Sequence[RankMemory], gpu: Gpu, ranks_per_node: int) -> list[str]:
    """Of ranks with the same roles the pipeline stage with the highest peak, and the peaks of the others."""
    alike: dict[tuple[str, ...], list[RankMemory]] = {}
    for memory in memories:
        alike.setdefault(memory.kind.device_roles, []).append(memory)
    found = []
    for stages in alike.values():
        worst = largest(stages)
        peak = f"peak {size(worst.peak.total)} of {size(gpu.memory_gb * GB)} at {worst.peak.task}"
        found += _wrapped(f"{numbered('rank', worst.ranks)}: {peak}: {sizes(worst.peak.bytes_of)}")
        if worst.host:
            found += _wrapped(f"  pinned on the host: {sizes(worst.host)}")
        others = [f"{size(stage.peak.total)} on {numbered('rank', stage.ranks)}" for stage in stages if stage != worst]
        if others:
            found += _wrapped(f"  other stages: {', '.join(others)}")
    of_node: Counter[int] = Counter()
    for memory in memories:
        for rank in memory.ranks:
            of_node[rank // ranks_per_node] += sum(memory.host.values())
    most, there_is = max(of_node.values(), default=0), gpu.host_memory_gb * GB * ranks_per_node
    if most > there_is:
        found.append(f"a node would pin {size(most)} of the {size(there_is)} that its host has: offload fewer roles")
    return found


def _wrapped(line: str) -> list[str]:
    return wrap(line, WIDTH, initial_indent="", subsequent_indent="    ", break_on_hyphens=False)


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
