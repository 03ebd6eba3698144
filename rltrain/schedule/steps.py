"""The tasks of a run: the algorithm's step, laid out in the order that the schedule's mode asks for."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, EvaluationPlan
from rltrain.runtime.placement import Placement
from rltrain.schedule.order import CHECKPOINT, LOAD_WEIGHTS, SYNC_EVALUATION, Entries, Iterations, Order
from rltrain.schedule.shape import RunShape
from rltrain.tasks.declaration import Task
from rltrain.tasks.roles import informing, takers, trained_roles

# Who takes part in what: the roles of a placement by what they do with a step's samples.

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


# Which evaluation sets are due when, and which steps are judged by them.


@dataclass(frozen=True)
class DueEvaluations:
    """`of` finds them."""

    plans: Sequence[EvaluationPlan]
    last_step: int
    best_metric: str | None
    stop_metric: str | None

    @classmethod
    def of(cls, config: Config) -> "DueEvaluations":
        keep_best = config.evaluation.keep_best
        return cls(config.evaluations, config.steps, keep_best.metric if keep_best else None, config.stop_metric)

    def sets(self, step: int) -> list[int]:
        """Those to be evaluated before training on the step, by number."""
        return [number for number, plan in enumerate(self.plans) if plan.is_due(step, self.last_step)]

    def finds_best(self, step: int) -> bool:
        """Whether the policy may turn out the best so far."""
        return self._is_reported(self.best_metric, step)

    def may_end(self, step: int) -> bool:
        """Whether it may turn out good enough."""
        return self._is_reported(self.stop_metric, step)

    def _is_reported(self, metric: str | None, step: int) -> bool:
        return metric is not None and any(self.plans[number].reports(metric) for number in self.sets(step))


def build_order(config: Config, placement: Placement, first_step: int = 0) -> Order:
    """The whole run of `config` from `first_step` on, for the roles that `placement` has.

    Iteration k trains on step k and generates for step k + lead: lead 0 is step by step. Where nothing is trained the
    run is one evaluation of the checkpoint.
    """
    shape, due = RunShape.of(config), DueEvaluations.of(config)
    run = partial(Iteration, config, shape, Participants.of(placement, shape), due, first_step)
    if not algorithm_of(config).trains:
        return Order.of(run(0).order)
    begin, generated = first_step - shape.lead, config.steps - shape.lead
    return Order(
        Iterations(
            entries=lambda number: run(number).order,
            numbers=range(begin, config.steps + 1),
            lead=shape.lead,
            turns=frozenset((begin + 1, first_step, first_step + 1, shape.first_actor_step, generated, config.steps)),
            intervals=_intervals(config),
            boundary=lambda number: run(number).boundary,
            saves=lambda step: is_save_step(config, step) or is_memory_save_step(config, step),
        )
    )


def is_save_step(config: Config, step: int) -> bool:
    """Every `checkpoint.save_interval` steps, and after the last one."""
    interval = config.checkpoint.save_interval
    return interval > 0 and (step == config.steps or step % interval == 0)


def is_memory_save_step(config: Config, step: int) -> bool:
    """Every `checkpoint.memory.interval` steps, but for the last one, after which nothing is left to be done."""
    memory = config.checkpoint.memory
    return memory is not None and step != config.steps and step % memory.interval == 0


def _intervals(config: Config) -> frozenset[int]:
    """The numbers of steps after which something comes again. A checkpoint's is none of them: the roles come to the
    boundary of every step, and save there where that is due."""
    evaluated = (plan.interval for plan in config.evaluations)
    every = (config.schedule.sync_every, config.reference.refresh_every, config.checkpoint.save_hf_interval, *evaluated)
    return frozenset(every) - {0, 1}


class Iteration:
    """The `order` of one iteration, of which the first `boundary` entries belong to the steps before it."""

    def __init__(
        self,
        config: Config,
        shape: RunShape,
        participants: Participants,
        due: DueEvaluations,
        first_step: int,
        number: int,
    ) -> None:
        self.config, self.shape = config, shape
        self.participants, self.roles = participants, participants.roles
        self.due = due
        self.order = Entries()
        self.lead, self.chunks = self.shape.lead, range(self.shape.num_chunks)
        if not algorithm_of(config).trains:
            self.order.task(LOAD_WEIGHTS, "rollout", step=0)
            self._evaluate(0)
            self._score_evaluations(0)
            return
        is_first = number == first_step - self.lead
        if number > first_step:
            self.save(number)
        self.boundary = len(self.order)
        if number > first_step:
            self.export(number)
        if number > first_step or is_first:
            self.refresh_reference(max(number, first_step))
            self.sync_and_evaluate(max(number, first_step), is_first=is_first)
        if number + self.lead < config.steps:
            self.generate(number + self.lead)
        if first_step <= number < config.steps:
            self.train(number)
        if number > first_step or is_first:
            self.end_evaluation(max(number, first_step))
        if number == config.steps and config.checkpoint.save_hf:
            self.order.task("save_hf", "actor", step=number, final=True)

    @cached_property
    def _has_rollout(self) -> bool:
        return algorithm_of(self.config).generates

    def save(self, step: int) -> None:
        """Where every role saves what it has if a checkpoint is due or asked for.

        Not where the rollout would go on with weights that it got earlier: those are in no checkpoint.
        """
        config = self.config
        saves = config.checkpoint.saves or config.checkpoint.memory
        if saves and (step == config.steps or step % config.schedule.sync_every == 0):
            for role in self.roles:
                self.order.task(CHECKPOINT, role, step=step)

    def export(self, step: int) -> None:
        """The policy alone, before the last step."""
        exports = self.config.checkpoint.save_hf_interval
        if exports and step % exports == 0 and step != self.config.steps:
            self.order.task("save_hf", "actor", step=step)

    def refresh_reference(self, step: int) -> None:
        """The reference becomes the actor as it is now, where that is due."""
        every = self.config.reference.refresh_every
        if every and "reference" in self.roles and 0 < step < self.config.steps and step % every == 0:
            self.order.task("refresh_reference", "actor", "reference", step=step)

    def sync_and_evaluate(self, step: int, *, is_first: bool) -> None:
        """Weights of this step to the rollout where they are about to be used, and the held-out evaluation if due."""
        config, order = self.config, self.order
        due, apart = bool(self.due.sets(step)), self.participants.evaluates_apart
        if config.scores_held_out:
            if due:
                self._score_held_out(step)
            return
        next_generated = step if is_first else step + self.lead
        is_used = self._has_rollout and next_generated < config.steps
        syncs = is_used and (is_first or step % config.schedule.sync_every == 0)
        if syncs or (due and not apart):
            order.task("weight_sync", "actor", "rollout", step=step)
        if syncs and "inference" in self.roles:
            order.task("sync_inference", "actor", "inference", step=step)
        if apart:
            self._evaluate_apart(step)
            return
        self._evaluate(step)
        if self.lead > 0 and self.due.finds_best(step):
            order.task("save_candidate", "actor", step=step)
        if self.lead == 0 or self.participants.scores_early:
            self._score_evaluations(step)
        if self.lead == 0:
            self._judge(step)

    def end_evaluation(self, step: int) -> None:
        """What follows from an evaluation beside which the rollout and training have gone on. A reward that shares
        ranks with training has scored nothing of it yet. What engines of their own found ends training at the end of
        the step that was trained on when they did, which nobody knows beforehand."""
        if self.participants.evaluates_apart:
            for role in self.roles if self.due.stop_metric is not None and step < self.config.steps else ():
                self.order.task("stop_if_reached", role, step=step)
            return
        if self.lead == 0:
            return
        if not self.participants.scores_early:
            self._score_evaluations(step)
        self._judge(step)

    def _evaluate(self, step: int) -> None:
        for number in self.due.sets(step):
            self.order.task("generate_evaluation", *self.participants.drawing, step=step, chunk=number)
            self._hand_over("evaluation_samples", self.participants.scoring_evaluations, step, number)

    def _evaluate_apart(self, step: int) -> None:
        """Whoever evaluates has this in its order after the evaluation before; the actor goes on once it has given its
        weights."""
        if sets := self.due.sets(step):
            self.order.task(SYNC_EVALUATION, "actor", "evaluation", step=step)
            for number in sets:
                self.order.task("run_evaluation", "evaluation", step=step, chunk=number)
        if self.due.finds_best(step):
            self.order.task("keep_evaluated", "evaluation", step=step)

    def _score_evaluations(self, step: int) -> None:
        for number in self.due.sets(step):
            self._tell_reward(self.participants.scoring_evaluations, step, number)
            self.order.wait("evaluation_samples", "rollout", "reward", step, number)
            self.order.task("score_evaluation", "reward", step=step, chunk=number)

    def _judge(self, step: int) -> None:
        """Whether the policy is the best so far, which is saved now or has been as a candidate, and good enough."""
        if self.due.finds_best(step):
            self.order.task("keep_candidate" if self.lead > 0 else "save_best", "actor", step=step)
        if self.due.may_end(step):
            self.order.task("decide_to_stop", *self.roles, step=step)

    def _score_held_out(self, step: int) -> None:
        self._ask_reference("evaluation_logprobs", step)
        self.order.task("score_held_out", "actor", step=step)
        if self.due.finds_best(step):
            self.order.task("save_best", "actor", step=step)
        if self.config.evaluation.stop_at is not None:
            self.order.task("decide_to_stop", *self.roles, step=step)

    def generate(self, step: int) -> None:
        """What comes before training on the step, for the first time `lead` steps earlier.

        A reward that shares ranks with training is not asked before the training that it would hold up.
        """
        if self.lead == 0 or not self._has_rollout:
            return
        for chunk in self.chunks:
            self._generate(step, chunk)
            if self.participants.scores_early:
                self._score(step, chunk)
            self._tell_actor(self.participants.early, step, chunk)

    def train(self, step: int) -> None:
        """Everything else of the step."""
        if not self._has_rollout:
            self._train_on_data(step)
            return
        for chunk in self.chunks:
            if self.lead == 0:
                self._generate(step, chunk)
            if self.lead == 0 or not self.participants.scores_early:
                self._score(step, chunk)
            self._tell_actor(self.participants.late, step, chunk)
            self._estimate_advantages(step, chunk)
        self._update(step)

    def _train_on_data(self, step: int) -> None:
        self._ask_reference("reference_logprobs", step)
        self.order.task("load_batch", "actor", step=step)
        self.order.task("update", "actor", step=step)

    def _ask_reference(self, logprobs: str, step: int) -> None:
        """It reads the samples as the actor does, ahead of it where it has ranks of its own."""
        if "reference" in self.roles:
            self.order.task(logprobs, "reference", step=step)
            self.order.post(logprobs, "reference", "actor", step)
            self.order.wait(logprobs, "reference", "actor", step)

    def _generate(self, step: int, chunk: int) -> None:
        self.order.task("generate", *self.participants.drawing, step=step, chunk=chunk)
        self._hand_over("samples", self.participants.scoring, step, chunk)

    def _hand_over(self, samples: str, scoring: Informants, step: int, chunk: int = 0) -> None:
        """What was drawn, to all who say what it is worth."""
        for role in ("reward", *(role for role, _ in scoring)):
            self.order.post(samples, "rollout", role, step, chunk)

    def _score(self, step: int, chunk: int) -> None:
        self._tell_reward(self.participants.scoring, step, chunk)
        self.order.wait("samples", "rollout", "reward", step, chunk)
        self.order.task("score", "reward", step=step, chunk=chunk)
        for role in self.participants.learners:
            self.order.post("scored", "reward", role, step, chunk)

    def _tell_reward(self, informants: Informants, step: int, chunk: int = 0) -> None:
        """What models say of the samples, there before the reward takes up these."""
        for role, task in informants:
            self._tell(role, task, "rollout", "reward", step, chunk)
        for role, task in informants:
            self.order.wait(task.leaves[0], role, "reward", step, chunk)

    def _tell_actor(self, informants: Informants, step: int, chunk: int) -> None:
        """What models say of scored samples; the actor takes it before its advantages."""
        for role, task in informants:
            self._tell(role, task, "reward", "actor", step, chunk)

    def _tell(self, role: str, task: Task, source: str, informed: str, step: int, chunk: int) -> None:
        self.order.wait(task.takes[0], source, role, step, chunk)
        self.order.task(task.name, role, step=step, chunk=chunk)
        self.order.post(task.leaves[0], role, informed, step, chunk)

    def _estimate_advantages(self, step: int, chunk: int) -> None:
        order = self.order
        order.wait("scored", "reward", "actor", step, chunk)
        if self.shape.needs_actor_logprobs and "inference" not in self.roles:
            order.task("actor_logprobs", "actor", step=step, chunk=chunk)
        for role, task in (*self.participants.early, *self.participants.late):
            order.wait(task.leaves[0], role, "actor", step, chunk)
        order.task("advantages", "actor", step=step, chunk=chunk)
        if "critic" in self.roles:
            order.post("returns", "actor", "critic", step, chunk)
        if self.shape.accumulates_actor and self._trains_actor(step):
            order.task("accumulate", "actor", step=step, chunk=chunk)
        if "critic" in self.roles and self.shape.accumulates_critic:
            order.wait("returns", "actor", "critic", step, chunk)
            order.task("accumulate_critic", "critic", step=step, chunk=chunk)

    def _update(self, step: int) -> None:
        if "critic" in self.roles:
            if not self.shape.accumulates_critic:
                for chunk in self.chunks:
                    self.order.wait("returns", "actor", "critic", step, chunk)
            self.order.task("update_critic", "critic", step=step)
        if self._trains_actor(step):
            self.order.task("update", "actor", step=step)

    def _trains_actor(self, step: int) -> bool:
        return step >= self.shape.first_actor_step


# A few steps of a run, without what is special about its first ones: what stands for all of them.


def steady_order(config: Config, placement: Placement, more_steps: int = 0) -> Order:
    """The order of a run like `config`'s of a few steps, without what is special about its first ones."""
    steps = RunShape.of(config).lead + 2 * config.schedule.sync_every + 2 + more_steps
    sets = [one.model_copy(update={"interval": 2 if one.interval else one.interval}) for one in config.evaluation.sets]
    interval = 2 if config.evaluation.interval else 0
    evaluation = config.evaluation.model_copy(update={"interval": interval, "sets": tuple(sets)})
    critic = config.critic.model_copy(update={"critic_warmup_steps": 0})
    return build_order(
        config.model_copy(update={"steps": steps, "evaluation": evaluation, "critic": critic}), placement
    )


def evaluated_step(order: Order) -> int:
    """The first step in which engines of their own evaluate; 0 without any."""
    return min((entry.step for entry in order.distinct() if entry.name == SYNC_EVALUATION), default=0)


def fullest_step(order: Order) -> int:
    """The first of the steps with most entries, among those without an evaluation and after step 0 if there are any."""
    distinct = [*order.distinct()]
    evaluated = {entry.step for entry in distinct if "evaluation" in entry.name}
    counts = Counter(entry.step for entry in distinct if entry.step and entry.step not in evaluated)
    return max(sorted(counts), key=lambda step: counts[step], default=0)
