"""How many blocks of keys and values a rank may have."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rltrain.errors import ConfigError
from rltrain.rollout.embedded.block_tables import blocks_of
from rltrain.rollout.workspace import room_for_cache

GB = 10**9


@dataclass(frozen=True)
class KvBudget:
    """`num_bytes` is asked whenever the memory is taken; `given` is rollout.kv_cache_gb."""

    given: float | str
    num_bytes: Callable[[], int]


def budget_of(given: float | str, device: torch.device, workspace_bytes: int) -> KvBudget | None:
    """What rollout.kv_cache_gb means on `device`: "auto" is no limit where the device is the host, and on a GPU what is
    free without the `workspace_bytes` that the engine needs besides."""
    if not isinstance(given, str):
        num_bytes = int(given * GB)
        return KvBudget(given, lambda: num_bytes)
    return KvBudget(given, lambda: free_bytes(device, workspace_bytes)) if device.type == "cuda" else None


def free_bytes(device: torch.device, workspace_bytes: int) -> int:
    """Of what is free on a CUDA device now, what keys and values may have."""
    torch.cuda.empty_cache()  # what the allocator keeps for others lies in pieces
    free, total = torch.cuda.mem_get_info(device)
    return room_for_cache(free, total, workspace_bytes)


def num_blocks(
    budget: KvBudget,
    num_bytes: int,
    *,
    block_bytes: int,
    block_tokens: int,
    max_context_tokens: int,
    max_running_requests: int,
    states_bytes: int = 0,
    is_cut: bool = True,
) -> int:
    """Blocks that `num_bytes` hold beside `states_bytes` of states of samples, no more than all running samples can
    fill, one for idle slots included. `is_cut`: whether ranks share out what a token has.

    ConfigError where they do not hold the longest sample.
    """
    longest = blocks_of(max_context_tokens, block_tokens)
    found = max(0, num_bytes - states_bytes) // block_bytes
    remedy = ", lower rollout.max_context_tokens, or give the engine more ranks (rollout.parallel.tp)"
    if not is_cut:
        remedy = " or lower rollout.max_context_tokens"
    if found < longest + 1:
        beside = ""
        if states_bytes:
            beside = f", beside {states_bytes / GB:.3g} GB of states of rollout.max_running_requests samples"
        raise ConfigError(
            f"rollout.kv_cache_gb: got {budget.given}, which is {num_bytes / GB:.3g} GB here: {found} blocks of "
            f"{block_tokens} tokens, {block_bytes / GB:.3g} GB each{beside}; expected at least {longest + 1}, or "
            f"{((longest + 1) * block_bytes + states_bytes) / GB:.3g} GB, for one sample of rollout.max_context_tokens "
            f"= {max_context_tokens} and one block for idle slots. Raise rollout.kv_cache_gb{remedy}."
        )
    return min(found, max_running_requests * longest + 1)
