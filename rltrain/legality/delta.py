"""A weight sync of what changed needs engines that keep their weights, and a sync that compares."""

from collections.abc import Iterator

from rltrain.config.schema import Config


def delta_problems(config: Config) -> Iterator[str]:
    """What weight_sync.delta cannot be combined with."""
    if config.weight_sync.delta is None:
        return
    if config.weight_sync.transport != "planned":
        yield (
            f"weight_sync.delta: got a section with weight_sync.transport {config.weight_sync.transport}, which "
            "assembles whole tensors; expected weight_sync.transport: planned, or weight_sync.delta: null"
        )
    if config.rollout.engine == "http":
        yield (
            "weight_sync.delta: got a section with rollout.engine http, whose servers take whole tensors; expected "
            "rollout.engine: embedded or sglang, or weight_sync.delta: null"
        )
    if config.rollout.offload is True:
        yield (
            "weight_sync.delta: got a section with rollout.offload true, by which engines give their weights up before "
            "every sync, so that each would send everything; expected rollout.offload: auto or false, or "
            "weight_sync.delta: null"
        )
