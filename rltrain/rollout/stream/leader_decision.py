"""What the ranks of one engine do next: decided by the first of them, the leader, and told to the others."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class LeaderDecision:
    """Before the next decode step: take new weights, end the task, start these groups."""

    sync: bool = False
    done: bool = False
    claims: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.sync or self.done or bool(self.claims)


class LeaderDecisions:
    """Shares the leader's decisions over `group`, the engine's ranks on gloo; None where the engine has one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_leader = group is None or group.rank() == 0

    def share(self, decision: LeaderDecision) -> LeaderDecision:
        """The leader's decision, on every rank. Collective over: the engine's ranks."""
        if self.group is None:
            return decision
        words = torch.tensor([decision.sync, decision.done, len(decision.claims)])
        dist.broadcast(words, group=self.group, group_src=0)
        sync, done, num_claims = words.tolist()
        claims = torch.tensor(decision.claims, dtype=torch.int64).resize_(num_claims)
        if num_claims:
            dist.broadcast(claims, group=self.group, group_src=0)
        return LeaderDecision(bool(sync), bool(done), tuple(claims.tolist()))
