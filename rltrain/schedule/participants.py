"""Who takes part in what: the roles of a placement by what they do with a step's samples."""

from dataclasses import dataclass

from rltrain.runtime.placement import Placement
from rltrain.schedule.shape import RunShape
from rltrain.tasks.declaration import Task
from rltrain.tasks.roles import informing, takers, trained_roles

Informants = tuple[tuple[str, Task], ...]
"""Roles, each with a task that says something of samples."""


@dataclass(frozen=True)
class Participants:
    """`of` finds them."""

    roles: tuple[str, ...]
    drawing: tuple[str, ...]
    """Draw together."""
    scoring: Informants
    """Tell the reward something of samples as they were drawn."""
    scoring_evaluations: Informants
    """As well, of an evaluation's."""
    learners: tuple[str, ...]
    """Get scored samples."""
    early: Informants
    """Tell the actor something of scored samples, of those that are drawn ahead while others train: they hold up none
    of these."""
    late: Informants
    """Tell it when training has come to the step."""
    evaluates_apart: bool
    """Whether engines of their own evaluate, beside all others."""
    scores_early: bool
    """Whether samples that are drawn ahead are scored while others train."""

    @classmethod
    def of(cls, placement: Placement, shape: RunShape) -> "Participants":
        placed = placement.roles

        def among(found: list[tuple[str, Task]]) -> Informants:
            return tuple((role, task) for role, task in found if role in placed)

        def ranks_of(roles: tuple[str, ...]) -> set[int]:
            return {rank for role in roles if role in placed for rank in placement.ranks(role)}

        scoring = among(informing("reward", "samples"))
        learners = tuple(role for role in takers("scored") if role in placed and "reward" in placed)
        scores_early = ranks_of(("reward", *(role for role, _ in scoring))).isdisjoint(ranks_of(learners))
        informants, training = among(informing("actor", "scored")), ranks_of(trained_roles())
        ahead = shape.lead > 0 and scores_early
        early = tuple((role, task) for role, task in informants if ahead and training.isdisjoint(ranks_of((role,))))
        return cls(
            roles=placed,
            drawing=("rollout", *(role for role in ("env",) if role in placed)),
            scoring=scoring,
            scoring_evaluations=among(informing("reward", "evaluation_samples")),
            learners=learners,
            early=early,
            late=tuple(informant for informant in informants if informant not in early),
            evaluates_apart="evaluation" in placed,
            scores_early=scores_early,
        )
