"""A weight sync of what changed needs engines that keep their weights, and a sync that compares."""

from collections.abc import Iterator

from rltrain.config.schema import Config


def delta_problems(config: Config) -> Iterator[str]:
    """What weight_sync.delta cannot be combined with."""
    if config.weight_sync.delta is not None and config.rollout.engine == "http":
        yield from _problems_of_files(config)
    if config.synced_delta is None:
        return
    if config.weight_sync.transport != "planned":
        yield (
            f"weight_sync.delta: got a section with weight_sync.transport {config.weight_sync.transport}, which "
            "assembles whole tensors; expected weight_sync.transport: planned, or weight_sync.delta: null"
        )
    if config.rollout.offload is True:
        yield (
            "weight_sync.delta: got a section with rollout.offload true, by which engines give their weights up before "
            "every sync, so that each would send everything; expected rollout.offload: auto or false, or "
            "weight_sync.delta: null"
        )


def _problems_of_files(config: Config) -> Iterator[str]:
    """For servers that somebody else runs."""
    if config.rollout.http.weights == "group":
        yield (
            "weight_sync.delta: got a section with rollout.http.weights group, by which servers take whole tensors; "
            "expected rollout.http.weights: folder, or weight_sync.delta: null"
        )
    if config.rollout.protocol == "vllm":
        yield (
            "weight_sync.delta: got a section with rollout.protocol vllm, whose servers load whole checkpoints alone; "
            "expected weight_sync.delta: null"
        )
