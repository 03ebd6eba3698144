"""What the ranks of a role have to say of the same thing, brought together on one of them through the job's store."""

from collections.abc import Callable, Sequence
from typing import Any

from rltrain.roles.role import Job
from rltrain.runtime.job_store import poll, poll_s


class RankRecords:
    """Of `ranks` of a role, the first of which is their leader.

    No collective: these ranks may be an engine's too, which others need for weight syncs while it waits.
    """

    def __init__(self, job: Job, role: str, ranks: Sequence[int]) -> None:
        self.job, self.role, self.ranks = job, role, tuple(ranks)

    def collect(self, what: str, step: int, record: Any, serve: Callable[[], None] | None) -> list[Any]:
        """The records of all ranks on the leader, nothing on the others. `serve` is what it does for others while it
        waits."""
        job_store, rank = self.job.job_store, self.job.world.rank
        keys = {other: f"{self.role} {what}/{step}/{other}" for other in self.ranks}
        job_store.put(keys[rank], record)
        if rank != self.ranks[0]:
            return []
        others = [other for other in keys if other != rank]
        what, every_s = f"the rewards of step {step}", poll_s(len(keys))
        poll(self.job.waiter, lambda: job_store.has(*keys.values()) or None, what, others, serve, every_s)
        gathered = [job_store.get(key, waiting_for=key) for key in keys.values()]
        for key in keys.values():
            job_store.forget(key)
        return gathered
