"""Lays out the steps of a run as iterations, according to the schedule's mode, with evaluations and checkpoints."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, EvaluationPlan
from rltrain.runtime.placement import Placement
from rltrain.schedule.order import CHECKPOINT, LOAD_WEIGHTS, SYNC_EVALUATION, Iterations, Order
from rltrain.schedule.shape import RunShape
from rltrain.schedule.step import Flow, Part, Step, TaskOrder
from rltrain.tasks.roles import informing, takers, trained_roles

# The tasks of a step ahead of its training, and the tasks together with it.


def parts_of_step(placement: Placement, shape: RunShape) -> tuple[Part, Part]:
    """Returns two parts of a step: the tasks `lead` steps before its training, and the tasks together with it.

    Scoring runs ahead if it shares no ranks with the takers of scored samples, so it cannot delay them. In this
    case log-probs and values of scored samples run ahead too, if their ranks have no trained role.
    """
    placed = placement.roles

    def ranks_of(roles: Iterable[str]) -> set[int]:
        return {rank for role in roles if role in placed for rank in placement.ranks(role)}

    opinions = informing("actor", "scored", placed)
    if shape.lead == 0:
        none = Part(generates=False, scores=False, informants=(), trains=False)
        return none, Part(generates=True, scores=True, informants=tuple(task.name for _, task in opinions), trains=True)
    scoring = ("reward", *(role for role, _ in informing("reward", "samples", placed)))
    scores_ahead = ranks_of(scoring).isdisjoint(ranks_of(takers("scored", placed)))
    training = ranks_of(trained_roles())
    ahead = [task.name for role, task in opinions if scores_ahead and training.isdisjoint(ranks_of((role,)))]
    late = [task.name for _, task in opinions if task.name not in ahead]
    return (
        Part(generates=True, scores=scores_ahead, informants=ahead, trains=False),
        Part(generates=False, scores=not scores_ahead, informants=late, trains=True),
    )


# The evaluation sets of each step, and the decisions that depend on them.


@dataclass(frozen=True)
class DueEvaluations:
    """The evaluation sets of a run, with the metrics of `evaluation.keep_best` and `evaluation.stop_at`."""

    plans: Sequence[EvaluationPlan]
    last_step: int
    best_metric: str | None
    stop_metric: str | None

    @classmethod
    def of(cls, config: Config) -> "DueEvaluations":
        keep_best = config.evaluation.keep_best
        return cls(config.evaluations, config.steps, keep_best.metric if keep_best else None, config.stop_metric)

    def sets(self, step: int) -> list[int]:
        """Returns the numbers of the sets to be evaluated before training on `step`."""
        return [number for number, plan in enumerate(self.plans) if plan.is_due(step, self.last_step)]

    def finds_best(self, step: int) -> bool:
        """Returns whether an evaluation before `step` reports the metric of `evaluation.keep_best`."""
        return self._is_reported(self.best_metric, step)

    def may_end(self, step: int) -> bool:
        """Returns whether an evaluation before `step` reports the metric of `evaluation.stop_at`."""
        return self._is_reported(self.stop_metric, step)

    def _is_reported(self, metric: str | None, step: int) -> bool:
        return metric is not None and any(self.plans[number].reports(metric) for number in self.sets(step))


def build_order(config: Config, placement: Placement, first_step: int = 0) -> Order:
    """Returns the order of the run of `config` from `first_step` on, for the roles in `placement`.

    Iteration k trains on step k and generates for step k + lead. Lead 0 means one step after the other. If the
    algorithm trains nothing, the run is one evaluation of the checkpoint.
    """
    shape, due = RunShape.of(config), DueEvaluations.of(config)
    ahead, with_training = parts_of_step(placement, shape)
    flow = Flow(placement.roles, draws=algorithm_of(config).generates, late=with_training.informants)
    run = partial(Iteration, config, shape, flow, (ahead, with_training), due, first_step)
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
    """Returns whether a checkpoint is due: every `checkpoint.save_interval` steps, and after the last one."""
    interval = config.checkpoint.save_interval
    return interval > 0 and (step == config.steps or step % interval == 0)


def is_memory_save_step(config: Config, step: int) -> bool:
    """Returns whether a checkpoint in memory is due: every `checkpoint.memory.interval` steps, except after the last
    one."""
    memory = config.checkpoint.memory
    return memory is not None and step != config.steps and step % memory.interval == 0


def _intervals(config: Config) -> frozenset[int]:
    """Returns the intervals, in steps, of all repeated tasks. Checkpoints need none: their task is in every iteration
    that may save, and saves only if a checkpoint is due."""
    evaluated = (plan.interval for plan in config.evaluations)
    every = (config.schedule.sync_every, config.reference.refresh_every, config.checkpoint.save_hf_interval, *evaluated)
    return frozenset(every) - {0, 1}


class Iteration:
    """The entries (`order`) of one iteration. The first `boundary` of them belong to earlier steps."""

    def __init__(
        self,
        config: Config,
        shape: RunShape,
        flow: Flow,
        parts: tuple[Part, Part],
        due: DueEvaluations,
        first_step: int,
        number: int,
    ) -> None:
        self.config, self.lead, self.due, self.roles = config, shape.lead, due, flow.roles
        self.ahead, self.with_training = parts
        self.generates, self.evaluates_apart = algorithm_of(config).generates, "evaluation" in self.roles
        self.order = TaskOrder(flow)
        self.step = Step(self.order, shape)
        if not algorithm_of(config).trains:
            self.order.do(LOAD_WEIGHTS, 0)
            self._draw_evaluations(0)
            self._score_evaluations(0)
            return
        self._add(number, first_step)

    def _add(self, number: int, first_step: int) -> None:
        """Appends the iteration's tasks. Those of the boundary come first, because a resumed run begins after them."""
        is_first, at_boundary = number == first_step - self.lead, max(number, first_step)
        if number > first_step:
            self._save(number)
        self.boundary = len(self.order)
        if number > first_step:
            self._export(number)
        if number > first_step or is_first:
            self._refresh_reference(at_boundary)
            self._sync_and_evaluate(at_boundary, is_first=is_first)
        if self.lead and self.generates and number + self.lead < self.config.steps:
            self.step.run(number + self.lead, self.ahead)
        if first_step <= number < self.config.steps:
            if self.generates:
                self.step.run(number, self.with_training)
            else:
                self.step.run_on_data(number)
        if number > first_step or is_first:
            self._end_evaluation(at_boundary)
        if number == self.config.steps and self.config.checkpoint.save_hf:
            self.order.do("save_hf", number, final=True)

    def _save(self, step: int) -> None:
        """Appends the checkpoint task of every role. Each role saves if a checkpoint is due or requested.

        Between two weight syncs there is no checkpoint. It would lack the older weights of the rollout.
        """
        config = self.config
        saves = config.checkpoint.saves or config.checkpoint.memory
        if saves and (step == config.steps or step % config.schedule.sync_every == 0):
            self._each_role(CHECKPOINT, step)

    def _export(self, step: int) -> None:
        """Appends an export of the policy if `checkpoint.save_hf_interval` asks for one before the end."""
        exports = self.config.checkpoint.save_hf_interval
        if exports and step % exports == 0 and step != self.config.steps:
            self.order.do("save_hf", step)

    def _refresh_reference(self, step: int) -> None:
        """Appends the copy of the actor's weights to the reference if `reference.refresh_every` asks for it."""
        every = self.config.reference.refresh_every
        if every and "reference" in self.roles and 0 < step < self.config.steps and step % every == 0:
            self.order.do("refresh_reference", step)

    def _sync_and_evaluate(self, step: int, *, is_first: bool) -> None:
        """Appends the weight sync if generation follows, and the held-out evaluation if one is due."""
        if self.config.scores_held_out:
            if self.due.sets(step):
                self._score_held_out(step)
            return
        next_generated = step if is_first else step + self.lead
        is_used = self.generates and next_generated < self.config.steps
        if is_used and (is_first or step % self.config.schedule.sync_every == 0):
            self.step.sync(step)
        elif self.due.sets(step) and not self.evaluates_apart:
            self.order.do("weight_sync", step)
        if self.evaluates_apart:
            self._evaluate_apart(step)
            return
        self._draw_evaluations(step)
        if self.lead > 0 and self.due.finds_best(step):
            self.order.do("save_candidate", step)
        if self.lead == 0 or self.ahead.scores:
            self._score_evaluations(step)
        if self.lead == 0:
            self._judge(step)

    def _end_evaluation(self, step: int) -> None:
        """Appends the tasks that follow an evaluation after training on the step.

        With a lead, the rollout and training continue during an evaluation. If the reward shares ranks with training,
        its scores are computed here. Engines of role evaluation finish at an unknown time. Their result ends training
        at the end of the step that is then being trained on.
        """
        if self.evaluates_apart:
            if self.due.stop_metric is not None and step < self.config.steps:
                self._each_role("stop_if_reached", step)
        elif self.lead > 0:
            if not self.ahead.scores:
                self._score_evaluations(step)
            self._judge(step)

    def _each_role(self, task: str, step: int) -> None:
        for role in self.roles:
            self.order.do(task, step, roles=(role,))

    def _draw_evaluations(self, step: int) -> None:
        for number in self.due.sets(step):
            self.order.do("generate_evaluation", step, number)

    def _score_evaluations(self, step: int) -> None:
        for number in self.due.sets(step):
            self.step.score("evaluation_samples", "score_evaluation", step, number)

    def _evaluate_apart(self, step: int) -> None:
        """Appends the tasks of role evaluation. Its engines evaluate one step after the other. The actor waits only
        until it has sent its weights."""
        if sets := self.due.sets(step):
            self.order.do(SYNC_EVALUATION, step)
            for number in sets:
                self.order.do("run_evaluation", step, number)
        if self.due.finds_best(step):
            self.order.do("keep_evaluated", step)

    def _judge(self, step: int) -> None:
        """Appends the decisions about an evaluated policy: whether it is the best so far, and whether training ends.

        Without a lead the best policy is saved here. With a lead it already exists as a candidate.
        """
        if self.due.finds_best(step):
            self.order.do("keep_candidate" if self.lead > 0 else "save_best", step)
        if self.due.may_end(step):
            self.order.do("decide_to_stop", step, roles=self.roles)

    def _score_held_out(self, step: int) -> None:
        if "reference" in self.roles:
            self.order.do("evaluation_logprobs", step)
        self.order.do("score_held_out", step)
        if self.due.finds_best(step):
            self.order.do("save_best", step)
        if self.config.evaluation.stop_at is not None:
            self.order.do("decide_to_stop", step, roles=self.roles)


# Short runs with typical steps, for estimates.


def steady_order(config: Config, placement: Placement, more_steps: int = 0) -> Order:
    """Returns the order of a short run with the schedule of `config`.

    It has no critic warm-up, and evaluates every second step if the config evaluates at all.
    """
    steps = RunShape.of(config).lead + 2 * config.schedule.sync_every + 2 + more_steps
    sets = [one.model_copy(update={"interval": 2 if one.interval else one.interval}) for one in config.evaluation.sets]
    interval = 2 if config.evaluation.interval else 0
    evaluation = config.evaluation.model_copy(update={"interval": interval, "sets": tuple(sets)})
    critic = config.critic.model_copy(update={"critic_warmup_steps": 0})
    return build_order(
        config.model_copy(update={"steps": steps, "evaluation": evaluation, "critic": critic}), placement
    )


def evaluated_step(order: Order) -> int:
    """Returns the first step with an evaluation by role evaluation, or 0 if there is none."""
    return min((entry.step for entry in order.distinct() if entry.name == SYNC_EVALUATION), default=0)


def fullest_step(order: Order) -> int:
    """Returns the first of the steps with the most entries. Steps with an evaluation and step 0 are left out if
    possible."""
    distinct = [*order.distinct()]
    evaluated = {entry.step for entry in distinct if "evaluation" in entry.name}
    counts = Counter(entry.step for entry in distinct if entry.step and entry.step not in evaluated)
    return max(sorted(counts), key=lambda step: counts[step], default=0)
