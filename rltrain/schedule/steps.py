"""The tasks of a run: the algorithm's step, laid out in the order that the schedule's mode asks for."""

from collections.abc import Iterable
from functools import cached_property

from rltrain.algorithms.registry import algorithm_of
from rltrain.cluster.placement import Placement
from rltrain.config.roles import TRAINING_ROLES
from rltrain.config.schema import Config
from rltrain.schedule.order import CHECKPOINT, Order
from rltrain.schedule.shape import RunShape


def build_order(config: Config, placement: Placement, first_step: int = 0) -> Order:
    """The whole run of `config` from `first_step` on, for the roles that `placement` has.

    Iteration k of the loop trains on step k and generates for step k + lead: lead 0 is step by step.
    """
    run = Run(config, placement)
    start = first_step - run.lead
    for step in range(start, config.steps + 1):
        if step > first_step:
            run.begin(step)
        if step > first_step or step == start:
            run.sync_and_evaluate(max(step, first_step), is_first=step == start)
        if step + run.lead < config.steps:
            run.generate(step + run.lead)
        if first_step <= step < config.steps:
            run.train(step)
    if config.checkpoint.save_hf:
        run.order.task("save_hf", "actor", step=config.steps, final=True)
    return run.order


def is_evaluation_step(config: Config, step: int) -> bool:
    """Before the first step, after the last one, and every `evaluation.interval` steps between."""
    if config.data.eval is None:
        return False
    interval = config.evaluation.interval
    return step in (0, config.steps) or (interval > 0 and step % interval == 0)


class Run:
    """Appends the parts of a step to `order`."""

    def __init__(self, config: Config, placement: Placement) -> None:
        self.config, self.shape = config, RunShape.of(config)
        self.roles = placement.roles
        self.order = Order()
        self.lead, self.chunks = self.shape.lead, range(self.shape.num_chunks)
        self.scores_early = not any(
            set(placement.ranks("reward")) & set(placement.ranks(role)) for role in self._training_roles
        )

    @property
    def _training_roles(self) -> Iterable[str]:
        return (role for role in TRAINING_ROLES if role in self.roles and "reward" in self.roles)

    @cached_property
    def _has_rollout(self) -> bool:
        return algorithm_of(self.config).generates

    def begin(self, step: int) -> None:
        """The boundary before `step`, at which every role saves what it has where a checkpoint is due or asked for.

        None where the rollout would go on with weights that it got earlier: those are in no checkpoint.
        """
        config, order = self.config, self.order
        interval, is_last = config.checkpoint.save_interval, step == config.steps
        if interval and (is_last or step % config.schedule.sync_every == 0):
            for role in self.roles:
                order.task(CHECKPOINT, role, step=step)
            if is_last or step % interval == 0:
                order.saves.add(step)
        order.boundaries[step] = len(order)
        exports = config.checkpoint.save_hf_interval
        if exports and step % exports == 0 and not is_last:
            order.task("save_hf", "actor", step=step)

    def sync_and_evaluate(self, step: int, *, is_first: bool) -> None:
        """Weights of this step to the rollout where they are about to be used, and the held-out evaluation if due."""
        config, order = self.config, self.order
        due = is_evaluation_step(config, step)
        next_generated = step if is_first else step + self.lead
        is_used = self._has_rollout and next_generated < config.steps
        if due or (is_used and (is_first or step % config.schedule.sync_every == 0)):
            order.task("weight_sync", "actor", "rollout", step=step)
        if due:
            order.task("generate_evaluation", "rollout", step=step)
            order.post("evaluation_samples", "rollout", "reward", step)
            order.wait("evaluation_samples", "rollout", "reward", step)
            order.task("score_evaluation", "reward", step=step)
            if config.evaluation.stop_at is not None:
                order.task("decide_to_stop", *self.roles, step=step)

    def generate(self, step: int) -> None:
        """What comes before training on the step, for the first time `lead` steps earlier.

        A reward that shares ranks with training is not asked before the training that it would hold up.
        """
        if self.lead == 0 or not self._has_rollout:
            return
        for chunk in self.chunks:
            self._generate(step, chunk)
            if self.scores_early:
                self._score(step, chunk)

    def train(self, step: int) -> None:
        """Everything else of the step."""
        if not self._has_rollout:
            self.order.task("load_sft_batch", "actor", step=step)
            self.order.task("update", "actor", step=step)
            return
        for chunk in self.chunks:
            if self.lead == 0:
                self._generate(step, chunk)
            if self.lead == 0 or not self.scores_early:
                self._score(step, chunk)
            self._evaluate_policy(step, chunk)
            self._estimate_advantages(step, chunk)
        self._update(step)

    def _generate(self, step: int, chunk: int) -> None:
        self.order.task("generate", "rollout", step=step, chunk=chunk)
        self.order.post("samples", "rollout", "reward", step, chunk)

    def _score(self, step: int, chunk: int) -> None:
        self.order.wait("samples", "rollout", "reward", step, chunk)
        self.order.task("score", "reward", step=step, chunk=chunk)
        for role in self._training_roles:
            self.order.post("scored", "reward", role, step, chunk)

    def _evaluate_policy(self, step: int, chunk: int) -> None:
        """What the reference and the critic say of the samples, for the actor."""
        for role, task in (("reference", "reference_logprobs"), ("critic", "values")):
            if role in self.roles:
                self.order.wait("scored", "reward", role, step, chunk)
                self.order.task(task, role, step=step, chunk=chunk)
                self.order.post(task, role, "actor", step, chunk)

    def _estimate_advantages(self, step: int, chunk: int) -> None:
        order = self.order
        order.wait("scored", "reward", "actor", step, chunk)
        if self.shape.needs_actor_logprobs:
            order.task("actor_logprobs", "actor", step=step, chunk=chunk)
        for role, task in (("reference", "reference_logprobs"), ("critic", "values")):
            if role in self.roles:
                order.wait(task, role, "actor", step, chunk)
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
