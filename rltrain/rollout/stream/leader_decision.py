"""What the ranks of one engine do next: decided by the first of them, the leader, and told to the others."""

import json
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rltrain.rollout.stream.episodes import Answer


@dataclass(frozen=True)
class LeaderDecision:
    """Before the next decode step: take new weights, end the task, start these groups, go on after these answers, count
    these finished groups or drop them."""

    sync: bool = False
    done: bool = False
    claims: tuple[int, ...] = ()
    answers: tuple[Answer, ...] = ()
    kept: tuple[int, ...] = ()
    """Finished groups that count, by position."""
    dropped: tuple[int, ...] = ()
    """Likewise those that do not."""
    guests: bool = False
    """Whether turns are asked for from outside; of an engine of one rank alone."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.sync or self.done or self.guests or any((self.claims, self.answers, self.kept, self.dropped))


class LeaderDecisions:
    """Shares the leader's decisions over `group`, the engine's ranks on gloo; None where the engine has one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_leader = group is None or group.rank() == 0

    def share(self, decision: LeaderDecision) -> LeaderDecision:
        """The leader's decision, on every rank. Collective over: the engine's ranks."""
        if self.group is None:
            return decision
        answers = json.dumps([answer.record() for answer in decision.answers]).encode() if decision.answers else b""
        positions = (decision.claims, decision.kept, decision.dropped)
        words = torch.tensor([decision.sync, decision.done, len(answers), *map(len, positions)])
        dist.broadcast(words, group=self.group, group_src=0)
        sync, done, num_bytes, *counts = words.tolist()
        flat = [position for part in positions for position in part]
        claims, kept, dropped = self._share(torch.tensor(flat, dtype=torch.int64), sum(counts)).split(counts)
        text = self._share(torch.tensor([*answers], dtype=torch.uint8), num_bytes)
        records = json.loads(bytes(text.tolist())) if num_bytes else []
        return LeaderDecision(
            bool(sync),
            bool(done),
            tuple(claims.tolist()),
            tuple(Answer.of_record(record) for record in records),
            tuple(kept.tolist()),
            tuple(dropped.tolist()),
        )

    def _share(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """The leader's `values`, of which there are `count`."""
        values = values.resize_(count)
        if count:
            dist.broadcast(values, group=self.group, group_src=0)
        return values
