"""Rewards of prompt groups as an engine finishes them, while it goes on with others: those groups count that a filter
keeps."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rltrain.data.experience import Experience, join
from rltrain.rewards.answers import Scorable
from rltrain.rewards.group_filter import GroupFilter
from rltrain.rewards.scorer import CombinedScorer, CombinedScores, PendingScores, Scores
from rltrain.roles.sample_log import SampleLog
from rltrain.roles.scored_samples import with_scores
from rltrain.rollout.groups import Verdict
from rltrain.rollout.sample import SampleGroup, pack_groups


@dataclass
class HandedOver:
    """What this engine drew for a chunk: each group that counts with its scores, how many it dropped by reason, and how
    many count because no more could be dropped."""

    groups: list[tuple[Experience, CombinedScores]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_groups: list[Experience] = field(default_factory=list)
    """Those, with their scores."""
    num_spared: int = 0


class GroupScoring:
    """On an engine's first rank: implements `rollout.stream.selection.GroupFilter`, by the role reward there.

    Reward functions work in processes of their own; a trusted one is called at once, so that what it says of a group
    is known before the next decode step.
    """

    def __init__(
        self,
        scorer: CombinedScorer,
        scorables: Callable[[Experience, int], list[Scorable]],
        dropped_for: GroupFilter,
        log: SampleLog | None,
    ) -> None:
        """`log` gets the ids of samples that were dropped."""
        self.scorer, self.scorables, self.dropped_for, self.log = scorer, scorables, dropped_for, log
        self.handed_over: dict[tuple[int, int], HandedOver] = {}
        """By step and chunk, for the task that reports of them."""
        self._pending: dict[int, tuple[list[Scorable], Sequence[PendingScores]]] = {}
        """By position."""
        self._doubtful: dict[int, Experience] = {}
        """By position: scored groups that are dropped unless too many have been."""
        self._since = HandedOver()
        """The last hand-over."""

    def verdicts(self, groups: Mapping[int, SampleGroup], step: int) -> list[Verdict]:
        for position, group in groups.items():
            if position not in self._pending:
                samples = self.scorables(pack_groups([group], [position]), step)
                self._pending[position] = samples, self.scorer.begin(samples)
        known = [position for position in groups if all(scores.is_done for scores in self._pending[position][1])]
        return [self._verdict(position, groups[position]) for position in known]

    def _verdict(self, position: int, group: SampleGroup) -> Verdict:
        samples, pending = self._pending.pop(position)
        scores = self.scorer.wait(pending)
        reason = self.dropped_for(samples, scores)
        if reason is not None:
            self._doubtful[position] = with_scores(pack_groups([group], [position]), scores)
        return Verdict(position, reason, json.dumps(scores.record()))

    def drop(self, group: SampleGroup, step: int, reason: str) -> None:
        self._since.dropped[reason] += 1
        self._since.dropped_groups.append(self._doubtful.pop(group.position))
        if self.log is not None:
            ids = [sample.id for sample in group.samples]
            self.log.append({"step": step, "reason": reason, "sample_ids": ids})

    def spare(self, group: SampleGroup, step: int, reason: str) -> None:
        self._doubtful.pop(group.position, None)
        self._since.num_spared += 1

    def hand_over(
        self, step: int, chunk: int, experience: Experience, groups: Iterable[tuple[SampleGroup, str]]
    ) -> Experience:
        """`experience` of these groups, one after the other, with the rewards that their records have."""
        handed_over, first = self._since, 0
        self._since = HandedOver()
        for group, record in groups:
            scores = CombinedScores.of_record(json.loads(record))
            own = experience.select(torch.arange(first, first + len(group.samples)))
            handed_over.groups.append((with_scores(own, scores), scores))
            first += len(group.samples)
        self.handed_over[step, chunk] = handed_over
        nothing = CombinedScores([], {function.title: Scores([], 0, 0) for function in self.scorer.functions})
        none = with_scores(experience.select(torch.arange(0)), nothing)
        return join([scored for scored, _ in handed_over.groups] or [none])
