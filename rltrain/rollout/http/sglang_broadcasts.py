"""SGLang's update groups: weights by broadcasts, within a session that it opens and closes for an update."""

from collections.abc import Sequence

from rltrain.checkpoint.safetensors_file import Entry
from rltrain.rollout.http.calls import Calls, ServerBusy, ServerRefuses
from rltrain.rollout.http.update_group import GroupAddress

JOIN = "/init_weights_update_group"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
FLUSH_S = 30
"""For requests to be over that were ended."""


class SGLangBroadcasts:
    """Implements `BroadcastProtocol`. Between `begin` and `end` the server is not paused: it has no requests, and each
    call waits for those that others may have sent it."""

    async def join(self, calls: Calls, group: GroupAddress, limit_s: float) -> None:
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await calls.post(JOIN, body, limit_s)

    async def begin(self, calls: Calls) -> None:
        try:
            await calls.post(BEGIN, {"selector": "target"})
        except ServerRefuses:
            await calls.post(END, {})
            await calls.post(BEGIN, {"selector": "target"})

    async def receive(self, calls: Calls, group: str, entries: Sequence[Entry], limit_s: float) -> None:
        body = {
            "names": [entry.name for entry in entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in entries],
            "shapes": [entry.shape for entry in entries],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "selector": "target",
        }
        await calls.post("/update_weights_from_distributed", body, limit_s)

    async def end(self, calls: Calls, label: str, limit_s: float) -> None:
        await calls.post(END, {}, limit_s)
        await flush_and_label(calls, label, limit_s)

    async def leave(self, calls: Calls, group: str) -> None:
        await calls.post("/destroy_weights_update_group", {"group_name": group})


async def flush_and_label(calls: Calls, label: str, limit_s: float) -> None:
    """Empties the prefix cache of a server that has taken new weights, and gives these their label.

    The scheduler may still hold the last batch of requests that have ended, so the server waits for it. Raises
    ServerBusy where it takes longer than FLUSH_S: the server has no label of ours then, and is given the weights anew.
    """
    try:
        await calls.post(f"/flush_cache?timeout={FLUSH_S}", {}, limit_s)
    except ServerRefuses as refused:
        raise ServerBusy(str(refused)) from None
    await calls.post("/update_weight_version", {"new_version": label, "abort_all_requests": False}, limit_s)
