"""Evaluation by engines of its own, beside training and generation, which never wait for it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from rltrain.checkpoint.hf import save_checkpoint
from rltrain.checkpoint.run_files import Contents
from rltrain.observability.evaluations import BEST_FILE, BEST_FOLDER, Best, best_verdict_of
from rltrain.rewards.scorer import CombinedScorer
from rltrain.roles.drawing import DrawingRole
from rltrain.roles.evaluation_scoring import EvaluationScoring
from rltrain.roles.failure_limit import FailureLimit
from rltrain.roles.rank_records import RankRecords
from rltrain.roles.role import Job, Metrics
from rltrain.rollout.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.layout import engine_parts, whole_engine
from rltrain.rollout.sample import pack_groups
from rltrain.runtime.job_store import poll, poll_s


class Evaluation(DrawingRole):
    """Draws and scores the evaluation sets of a step while others go on, with the weights that the step has.

    Weights of later steps may come meanwhile, and wait on the host. So nothing here is a collective of several engines:
    one may have joined a weight sync while another has yet to.
    """

    name = "evaluation"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.weights: dict[int, dict[str, Tensor]] = {}
        """By step, of evaluations that are under way or to come: the engine's parameters by name, on the host."""
        self.in_flight: InFlightSync | NoInFlightSync = NoInFlightSync()
        self.scoring: EvaluationScoring | None = None
        """On each engine's first rank."""
        if self.decisions.is_leader:
            scorer = CombinedScorer(self.config.reward, job.heartbeat.advance)
            limit = FailureLimit(scorer.parts, self.config.reward)
            self.scoring = EvaluationScoring(job, scorer, limit, RankRecords(job, self.name, self.grid.owners()))
            self.logs.append(self.scoring.log)
        if job.world.rank == self.leader and "rollout" not in job.placement.roles:
            job.prompts.report_rows(job.config.batch.prompts_per_step)

    @property
    def draws_during_syncs(self) -> bool:
        return False

    def has_room(self) -> bool:
        waiting = [step for step in self.weights if step != self.engine.policy_version]
        return len(waiting) < self.config.evaluation.max_waiting

    def take_in_flight(self, in_flight: InFlightSync) -> None:
        self.in_flight = in_flight

    def run_evaluation(self, step: int, chunk: int) -> Metrics:
        """Draw and score the set of number `chunk`; its metrics on the role's leader. Collective over: this engine's
        ranks."""
        if self.decisions.group is not None:
            self.in_flight.enter_together(self.job.waiter, f"run_evaluation[{step}.{chunk}]")
        self._take_weights(step)
        finished, drawn = self.draw_set(step, chunk, self.in_flight)
        experience = pack_groups(drawn, [group.position for group in finished])
        self.count_operations(experience)
        if self.scoring is None:
            return {}
        return self.scoring.score(step, chunk, experience, serve=self.serve)

    def keep_evaluated(self, step: int, chunk: int) -> None:
        """Write <output_dir>/hf_best if the evaluation of the step is the best so far. Collective over: the ranks of
        the first engine."""
        if self.dp:
            return
        job_store, key = self.job.job_store, best_verdict_of(step)
        what = f"the verdict of rank {self.leader} at step {step}"
        every_s = poll_s(self.grid.tp)
        poll(self.job.waiter, lambda: job_store.has(key) or None, what, [self.leader], self.serve, every_s)
        if verdict := job_store.get(key, waiting_for=what):
            self._save(step, Best(**verdict))

    def save_state(self) -> Mapping[str, Contents]:
        """Which evaluation was the best so far. Those before the cut are over when a rank of the role comes to it."""
        return self.scoring.save_state() if self.scoring else {}

    def close(self) -> None:
        """End what the engine and reward functions have outside of this process."""
        super().close()
        if self.scoring:
            self.scoring.close()
            self.scoring.of_run.scorer.close()

    def _take_weights(self, step: int) -> None:
        """Draw with the weights of the step from here on."""
        for earlier in [kept for kept in self.weights if kept < step]:
            del self.weights[earlier]
        if self.engine.policy_version == step:
            return
        self.engine.begin_update()
        for number in range(len(engine_parts(self.config, self.job.architecture, self.grid, self.name))):
            for name, parameter in self.engine.incoming(number).items():
                parameter.copy_(self.weights[step][name])
            self.engine.arrived(number)
        self.engine.end_update(step)

    def _save(self, step: int, best: Best) -> None:
        """Collective over: this engine's ranks."""
        ranks, config = self.engine_ranks, self.config
        whole = whole_engine(config, self.job.architecture, replace(self.grid, ranks=ranks), self.name)
        save_checkpoint(
            Path(config.output_dir, BEST_FOLDER),
            self.weights[step],
            whole.plain,
            self.job.architecture,
            group=self.job.groups.cpu[ranks],
            rank=self.job.world.rank,
            like=Path(config.model.path),
            notes={BEST_FILE: best.as_json()},
        )
