"""What the ranks of one engine do next: decided by the first of them, the leader, and told to the others."""

import json
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rltrain.rollout.stream.episodes import Answer
from rltrain.rollout.stream.guests import Mail


@dataclass(frozen=True)
class LeaderDecision:
    """Before the next decode step: take new weights, end the task, start these groups, go on after these answers and
    with these turns that are asked for from outside, count these finished groups or drop them."""

    sync: bool = False
    done: bool = False
    claims: tuple[int, ...] = ()
    answers: tuple[Answer, ...] = ()
    kept: tuple[int, ...] = ()
    """Finished groups that count, by position."""
    dropped: tuple[int, ...] = ()
    """Likewise those that do not."""
    mail: Mail | None = None
    """None: a decode step has nothing to do for whoever is outside."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        positions = any((self.claims, self.answers, self.kept, self.dropped))
        return self.sync or self.done or positions or self.mail is not None

    def text(self) -> bytes:
        """Of answers and mail, as JSON; nothing where there are none."""
        if not self.answers and not self.mail:
            return b""
        mail = None if self.mail is None else self.mail.record()
        return json.dumps([[answer.record() for answer in self.answers], mail]).encode()


class LeaderDecisions:
    """Shares the leader's decisions over `group`, the engine's ranks on gloo; None where the engine has one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_leader = group is None or group.rank() == 0

    def share(self, decision: LeaderDecision) -> LeaderDecision:
        """The leader's decision, on every rank. Collective over: the engine's ranks."""
        if self.group is None:
            return decision
        text = decision.text()
        positions = (decision.claims, decision.kept, decision.dropped)
        words = torch.tensor([decision.sync, decision.done, len(text), *map(len, positions)])
        dist.broadcast(words, group=self.group, group_src=0)
        sync, done, num_bytes, *counts = words.tolist()
        flat = [position for part in positions for position in part]
        claims, kept, dropped = self._share(torch.tensor(flat, dtype=torch.int64), sum(counts)).split(counts)
        told = self._share(torch.tensor(bytearray(text), dtype=torch.uint8), num_bytes)
        answers, mail = json.loads(told.numpy().tobytes()) if num_bytes else ([], None)
        return LeaderDecision(
            bool(sync),
            bool(done),
            tuple(claims.tolist()),
            tuple(Answer.of_record(record) for record in answers),
            tuple(kept.tolist()),
            tuple(dropped.tolist()),
            None if mail is None else Mail.of_record(mail),
        )

    def _share(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """The leader's `values`, of which there are `count`."""
        values = values.resize_(count)
        if count:
            dist.broadcast(values, group=self.group, group_src=0)
        return values
