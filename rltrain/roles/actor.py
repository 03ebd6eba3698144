"""The actor: the policy in training, its advantages, its parity with the engine, and its exports."""

import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms import correction
from rltrain.algorithms.advantages import (
    KlCoefficient,
    mean_kl_sums,
    num_truncated,
    overlong_penalties,
    response_kl,
    without_truncated,
)
from rltrain.algorithms.algorithm import Algorithm, Replicas
from rltrain.algorithms.correction import apply_staleness_limit
from rltrain.algorithms.kl import kl_estimate, with_teacher_advantages
from rltrain.algorithms.losses import LossFunction, LossOutput, SharedLoss, masked_sum, of_response
from rltrain.algorithms.registry import algorithm_of
from rltrain.checkpoint.hf_writer import NO_NOTES, replace_checkpoint, save_checkpoint
from rltrain.checkpoint.peft_files import replace_adapters, save_adapters
from rltrain.checkpoint.run_files import Contents, read_texts
from rltrain.checkpoint.run_folder import name_of
from rltrain.config.evaluation import has_reached
from rltrain.config.schema import Checks
from rltrain.data.demonstrations import Demonstrations, GivenTexts
from rltrain.data.experience import Experience
from rltrain.data.prompts import report_dropped
from rltrain.errors import ParityError
from rltrain.exchange.image_requests import keys_of
from rltrain.observability.evaluations import (
    BEST_FILE,
    BEST_FOLDER,
    Best,
    BestSoFar,
    best_verdict_of,
    end_verdict_of,
    reported,
)
from rltrain.reshard.layout import MADE_BYTES
from rltrain.roles.prompt_images import sources_of
from rltrain.roles.role import Job, Metrics, SampleLog
from rltrain.roles.trained import StepBatch, TrainedRole, summarize
from rltrain.runtime.grid import Grid
from rltrain.runtime.group_messages import gather_rows
from rltrain.tasks.roles import informing

# Parity of trainer and engine: the difference of their log-probs for tokens sampled with the trainer's weights.

SHARE, DIFFERENCE, KL = "fresh_tokens", "fresh_logprob_abs_diff", "fresh_kl"
IMAGE_SHARE, IMAGE_DIFFERENCE = "fresh_image_tokens", "fresh_image_logprob_abs_diff"
SHARE_OF = {DIFFERENCE: SHARE, KL: SHARE, IMAGE_DIFFERENCE: IMAGE_SHARE}
"""For each difference, the metric with the share of its tokens."""
METRICS = frozenset({*SHARE_OF, *SHARE_OF.values()})
"""Metrics measured under the weights that sampled the tokens. Only a step's first mini-batch still
has those weights."""


def measuring_parity(loss_function: LossFunction, step: int) -> LossFunction:
    """Returns a loss function that also measures the difference between log-probs of trainer and engine.

    It adds METRICS to the `token_sums` of the output, summed over the response tokens with policy version `step`. Those
    of images are for samples with images, if the run sees any. The loss is that of `loss_function`. A SharedLoss stays
    one, with its divisor shares.
    """

    def measured(experience: Experience, logprobs: Tensor, *others: Any) -> LossOutput:
        output = loss_function(experience, logprobs, *others)
        fresh = (experience.response_mask & (experience.policy_version == step)).float()
        trained = logprobs.detach().masked_fill(~experience.response_mask, 0)
        drawn = of_response(experience, "rollout_logprobs")
        distance = (trained - drawn).abs()
        sums = {
            SHARE: fresh.sum(),
            DIFFERENCE: masked_sum(distance, fresh),
            KL: masked_sum(kl_estimate(drawn, trained, "k3"), fresh),
        }
        if experience.has("image_keys"):
            seeing = fresh * _beside_images(experience).to(fresh)
            sums |= {IMAGE_SHARE: seeing.sum(), IMAGE_DIFFERENCE: masked_sum(distance, seeing)}
        return replace(output, token_sums={**output.token_sums, **sums})

    return replace(loss_function, function=measured) if isinstance(loss_function, SharedLoss) else measured


def _beside_images(experience: Experience) -> Tensor:
    """Returns whether each token is in a sample with images, bool [tokens] on the host."""
    lengths = experience.lengths.cpu()
    shown = [bool(keys.any()) for keys in experience.image_keys.cpu().split(lengths.tolist())]
    return torch.tensor(shown, dtype=torch.bool).repeat_interleave(lengths)


def summarize_parity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns a step's metrics with the differences as means over their fresh tokens instead of all tokens.

    Leaves the differences out if the step has no such tokens.
    """
    shares = {name: metrics.get(share, 0.0) for name, share in SHARE_OF.items()}
    return {
        name: value / shares[name] if name in SHARE_OF else value
        for name, value in metrics.items()
        if shares.get(name, 1.0)
    }


# Limits on the difference between trainer and engine.

logger = logging.getLogger(__name__)


class ParityGate:
    """The check that ends or pauses a run, or warns, when trainer and engine drift apart.

    `speaks` is True on the rank that warns. `pause` makes the job save a checkpoint and end for the given reason.
    """

    def __init__(self, checks: Checks, *, speaks: bool, pause: Callable[[str], None]) -> None:
        self.action, self.speaks, self.pause = checks.action, speaks, pause
        self.limits = {
            ("checks.max_logprob_diff", DIFFERENCE): checks.max_logprob_diff,
            ("checks.max_logprob_diff", IMAGE_DIFFERENCE): checks.max_logprob_diff,
            ("checks.max_kl", KL): checks.max_kl,
        }

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compares a step's metrics with the limits. `metrics` must be equal on all ranks of the actor.

        Raises ParityError beyond a limit if `checks.action` is "stop".
        """
        beyond = [
            f"train/{metric} is {metrics[metric]:.3g}, {key} {limit:g}"
            for (key, metric), limit in self.limits.items()
            # NaN is beyond every limit.
            if limit is not None and metric in metrics and not metrics[metric] <= limit
        ]
        if not beyond:
            return
        said = (
            f"step {step}: the trainer's log-probs are far from the engine's for tokens sampled with equal weights: "
            f"{'; '.join(beyond)}"
        )
        if self.action == "stop":
            raise ParityError(
                f"{said}. This step is not saved. tools/parity.py compares the two layer by layer on the last exported "
                "checkpoint. If the difference is within the rounding described in docs/precision.md, raise the limit; "
                "checks.action: warn continues in spite of it."
            )
        if self.action == "pause":
            self.pause(
                f"{said} (checks.action pause). tools/parity.py compares the two layer by layer. Raise the limit, set "
                "checks.action to warn, or resume from an earlier checkpoint with checkpoint.resume"
            )
        elif self.speaks:
            logger.warning("%s (checks.action warn)", said)


# Advantages of a step's scored samples, and their metrics.

SUMMED = ("samples", "overlong_samples", "overlong_penalty", "masked_truncated")


class AdvantageEstimation:
    """The advantages of one replica of the actor, chunk by chunk.

    Call `begin_step` before a step's first chunk. For each chunk call `shaped` on its samples, drop stale ones, and
    call `with_advantages` on the rest. `kl` is equal on all replicas.
    """

    def __init__(self, algorithm: Algorithm, kl_coef: float | None = None) -> None:
        """`kl_coef` is the adaptive coefficient of the resumed run, or None."""
        self.algorithm, config = algorithm, algorithm.config
        self.settings = config.advantages
        self.max_response_tokens = config.rollout.sampling.max_response_tokens
        self.kl = KlCoefficient(config.loss.kl, config.loss.kl.coef if kl_coef is None else kl_coef)
        self.begin_step()

    def begin_step(self) -> None:
        self.counts: dict[str, float] = defaultdict(float)
        self.kl_sums = torch.zeros(2, dtype=torch.float64)

    def shaped(self, experience: Experience) -> Experience:
        """Returns the samples to train on, with rewards shaped according to the config. Expects complete samples as
        generated."""
        if self.settings.overlong_penalty is not None:
            penalties = overlong_penalties(experience, self.settings.overlong_penalty, self.max_response_tokens)
            rewards = experience.rewards + penalties.to(experience.rewards.dtype)
            experience = experience.with_fields(rewards=rewards)
            self.counts["overlong_samples"] += int((penalties < 0).sum())
            self.counts["overlong_penalty"] += float(penalties.sum())
        self.counts["samples"] += experience.num_samples
        return self.algorithm.compared_with_greedy(experience)

    def with_advantages(self, experience: Experience) -> Experience:
        """Returns the samples ready for the loss. Tokens outside the response mask count nowhere."""
        penalty = None
        if self.algorithm.penalizes_reward():
            token_kl = response_kl(experience, self.kl.settings)
            self.kl_sums += mean_kl_sums(experience, token_kl)
            penalty = -self.kl.coef * token_kl
        experience = self.algorithm.with_advantages(experience, penalty)
        teacher = self.algorithm.config.teacher
        if experience.has("teacher_logprobs") and teacher.where == "advantage":
            experience = with_teacher_advantages(experience, teacher.coef, teacher.max_distance)
        if self.settings.mask_truncated:
            self.counts["masked_truncated"] += num_truncated(experience)
            experience = without_truncated(experience)
        return experience

    def end_step(self, total: Callable[[Tensor], Tensor]) -> Metrics:
        """Returns the metrics of the step, and adapts the KL coefficient for the next one. `total` sums a tensor over
        all replicas.

        Collective over: the actor's ranks, unless there is nothing to report.
        """
        penalizes = self.algorithm.penalizes_reward()
        if not penalizes and self.settings.overlong_penalty is None and not self.settings.mask_truncated:
            return {}
        sums = torch.tensor([self.counts[name] for name in SUMMED], dtype=torch.float64)
        *counts, kl_sum, num_responses = total(torch.cat([sums, self.kl_sums])).tolist()
        samples, overlong, penalty, masked = counts
        metrics: Metrics = {}
        if self.settings.overlong_penalty is not None:
            metrics |= {"overlong_samples": overlong, "overlong_penalty": penalty / max(samples, 1)}
        if self.settings.mask_truncated:
            metrics["masked_truncated"] = masked
        if penalizes:
            metrics |= {"reward_kl": kl_sum / max(num_responses, 1), "kl_coef": self.kl.coef}
            self.kl.after(metrics["reward_kl"], num_responses)
        return metrics


# Staleness of a step's samples: counts of its chunks, summed over replicas into metrics.

STALENESS_SUMMED = ("stale_samples", "stale_tokens", "tokens", "staleness_sum")


class StalenessCounts:
    """The staleness counts of one replica in one step. rltrain.algorithms.correction defines them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.longest = 0

    def add(self, counts: Mapping[str, int]) -> None:
        """Adds the counts of a chunk."""
        self.counts.update({name: counts[name] for name in STALENESS_SUMMED})
        self.longest = max(self.longest, counts["staleness_max"])

    def sums(self) -> Tensor:
        """Returns the counts to be summed over replicas, shape [4], fp64."""
        return torch.tensor([self.counts[name] for name in STALENESS_SUMMED], dtype=torch.float64)

    @staticmethod
    def metrics(sums: Tensor, longest: int) -> dict[str, float]:
        """Returns the metrics for the sums and the maximum over all replicas."""
        stale_samples, stale_tokens, tokens, total = sums.tolist()
        return {
            "stale_samples": stale_samples,
            "stale_tokens": stale_tokens,
            "staleness_mean": total / max(tokens, 1),
            "staleness_max": longest,
        }


# The actor's low-rank adapters in PEFT's file format, saved next to every export of its merged weights.


def adapters_folder(export: Path) -> Path:
    """Returns the adapters' folder, next to the export's folder.

    transformers would apply adapters inside the export a second time, to weights that already contain them.
    """
    return export.with_name(f"{export.name}_adapter")


# Values of all replicas of a role, collected on each of them.


def gathered(values: Tensor, grid: Grid, group: dist.ProcessGroup) -> Tensor:
    """Returns the `values` of all replicas in the replicas' order, shape [n].

    Replicas may have different numbers of values. They must be equal on a replica's ranks, and in host memory.
    Collective over: `group`, the ranks of `grid`.
    """
    of_ranks = gather_rows(values, group)
    return torch.cat([of_ranks[dist.get_group_rank(group, owner)] for owner in grid.owners()])


# The role.

CANDIDATE = "hf_candidate"
"""A folder in output_dir."""
ON_POLICY_METRICS = METRICS | {
    *("train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"),
    "replayed_choices_differing",
}
"""Metrics measured under the weights that sampled the tokens. Only the first mini-batch still has those weights."""

KL_COEF = "kl_coef"
"""A key in the metadata of the actor's checkpoint files."""
HELD_OUT_BEST = "held_out_best"
"""A key in the same metadata."""


class ActorRole(TrainedRole):
    name = "actor"

    def __init__(self, job: Job) -> None:
        config = job.config
        super().__init__(job, config.actor, total_updates=job.shape.num_actor_updates)
        self.algorithm = algorithm_of(config)
        self.loss_function = self.algorithm.loss_function()
        self.temperature = self.algorithm.temperature()
        self.parity_gate = ParityGate(config.checks, speaks=job.world.rank == self.leader, pause=job.pause)
        self.training_data = job.rows.training_data
        if self.training_data is not None and job.world.rank == self.leader:
            for key, dataset in self.training_data.datasets.items():
                report_dropped(key, dataset)
        kl_coef = self._saved(KL_COEF) if config.loss.kl.adaptive is not None else None
        self.estimation = AdvantageEstimation(self.algorithm, None if kl_coef is None else float(kl_coef))
        self.batch = StepBatch(config)
        self.staleness = StalenessCounts()
        self.sample_ids = SampleLog(config.output_dir, f"sample_ids/rank{job.world.rank}.jsonl")
        self.logs.append(self.sample_ids)
        self.accumulate_s = 0.0
        self.held_out_best = self._saved_best()

    def load_batch(self, step: int, chunk: int) -> None:
        """Adds this replica's share of the step's training rows to the batch, with the results of other
        roles for them."""
        assert self.training_data is not None, "only an algorithm that generates nothing has this task"
        experience = self.training_data.for_step(step, part=self.dp, num_parts=self.grid.dp)
        self.job.hold_images(experience, step, self.training_data.train)
        self._decode_ahead(self.training_data, step + 1)
        experience = self._with_what_is_told(experience, step, chunk)
        self.batch.add(chunk, experience)
        self._log_sample_ids(step, chunk, experience)

    def _decode_ahead(self, rows: GivenTexts, step: int) -> None:
        """Starts to decode the images of this replica's rows of a later step."""
        if self.job.decoder is not None and isinstance(rows, Demonstrations) and step < self.config.steps:
            own = rows.rows_of(step)[self.dp :: self.grid.dp]
            self.job.decoder.request(sources_of(rows.train, own), step)

    def actor_logprobs(self, step: int, chunk: int) -> None:
        """Computes the log-probs of the sampled tokens before the first update. Collective over: this replica."""
        scored, max_tokens = self.shipments["scored", step, chunk], self.config.actor.micro_batch_limit
        if self.config.model.router_replay == "recompute":
            logprobs, routed = self.model.evaluate_routing(
                scored.experience, max_tokens=max_tokens, temperature=self.temperature
            )
            scored = scored.with_fields(actor_logprobs=logprobs, routed_experts=routed)
        elif self.algorithm.needs_actor_squares:
            logprobs, squares = self.model.evaluate_squares(
                scored.experience, max_tokens=max_tokens, temperature=self.temperature
            )
            scored = scored.with_fields(actor_logprobs=logprobs, actor_squares=squares)
        else:
            scored = scored.with_fields(actor_logprobs=self.logprobs(scored.experience))
        self.shipments["scored", step, chunk] = scored

    def advantages(self, step: int, chunk: int) -> None:
        """Merges the results of other roles, applies the staleness limit, and turns rewards into advantages."""
        scored = self.shipments.pop(("scored", step, chunk))
        experience = self._with_what_is_told(scored.experience, step, chunk)
        schedule = self.config.schedule
        if chunk == 0:
            self.estimation.begin_step()
        experience = self.estimation.shaped(experience)
        experience, counts = apply_staleness_limit(experience, step, schedule.max_staleness, schedule.on_stale)
        if chunk == 0:
            self.staleness = StalenessCounts()
        self.staleness.add(counts)
        experience = self.estimation.with_advantages(experience)
        self.batch.add(chunk, experience)
        self._log_sample_ids(step, chunk, experience)
        if experience.has("returns"):  # for the critic, with the mask of trained tokens
            self.shipments["returns", step, chunk] = replace(scored, experience=experience)

    def _with_what_is_told(self, experience: Experience, step: int, chunk: int) -> Experience:
        """Returns the samples with the results that other roles sent for them."""
        for name in (task.leaves[0] for _, task in informing("actor", "scored", self.job.placement.roles)):
            if (name, step, chunk) in self.shipments:
                experience = experience.with_fields_of(self.shipments.pop((name, step, chunk)).experience)
        return experience

    def score_held_out(self, step: int, chunk: int) -> Metrics:
        """Returns the loss and its metrics over the held-out rows. Collective over: the actor's ranks."""
        assert self.training_data is not None, "only an algorithm that generates nothing has this task"
        experience = self.training_data.held_out(part=self.dp, num_parts=self.grid.dp)
        self.job.hold_images(experience, step, self.training_data.datasets["data.eval"])
        if ("evaluation_logprobs", step, chunk) in self.shipments:
            said = self.shipments.pop(("evaluation_logprobs", step, chunk))
            experience = experience.with_fields_of(said.experience)
        output = self.loss_function(experience, self.logprobs(experience))
        totals = self._total(torch.stack([output.divisor, output.loss, *output.sums.values()]))
        means = (totals[1:] / totals[0]).tolist()
        metrics = {f"eval/{name}": mean for name, mean in zip(["loss", *output.sums], means, strict=True)}
        goal, metric = self.config.evaluation.stop_at, self.config.stop_metric
        if goal is not None and metric is not None and self.job.world.rank == self.leader:
            is_reached = has_reached(metric, reported(metrics, metric, "evaluation.stop_metric"), goal)
            self.job.job_store.put(end_verdict_of(step), is_reached)
        if self.held_out_best is not None:
            self.held_out_best.verdict(step, metrics)
        return metrics

    def accumulate(self, step: int, chunk: int) -> None:
        """Accumulates the gradients of a chunk while engines still decode later ones. Collective over: this replica."""
        start = time.perf_counter()
        self.model.accumulate(self.batch.chunks[chunk], self._loss_of(step), temperature=self.temperature)
        self.accumulate_s += time.perf_counter() - start

    def update(self, step: int, chunk: int) -> Metrics:
        """Makes one optimizer step per mini-batch and pass. If gradients were accumulated by chunk, makes the step's
        only one.

        Collective over: the actor's ranks.
        """
        start = time.perf_counter()
        experience = self.algorithm.over_whole_step(self.batch.take(), Replicas(self._total, self._gathered))
        if self.job.shape.accumulates_actor:
            updates = [self.model.step()]
        else:
            updates = self._train(experience, self._loss_of(step))
        seconds, self.accumulate_s = time.perf_counter() - start + self.accumulate_s, 0.0
        self.warn_of_skipped(step, updates)
        self.replicas.check(step, self.model)
        updates = [correction.summarize(update) for update in updates]
        summary = summarize_parity(summarize(updates, ON_POLICY_METRICS))
        self.parity_gate.check(step, summary)
        metrics = {f"train/{name}": value for name, value in summary.items()}
        num_tokens = float(self._total(torch.tensor(experience.num_tokens)))
        tokens_per_s = num_tokens * self.config.batch.epochs / seconds
        metrics |= {
            "train/tokens": num_tokens,
            "perf/train_tokens_per_s": tokens_per_s,
            "perf/train_tokens_per_gpu_s": tokens_per_s / len(self.grid.ranks),
        }
        if self.job.shape.sees:
            shown = torch.tensor([int((experience.image_keys > 0).sum()), len(keys_of(experience))])
            of_step = self._total(shown).tolist()
            metrics |= dict(zip(("images/tokens", "images/distinct"), of_step, strict=True))
        if self.training_data is not None:
            metrics |= self._row_metrics(experience)
        if self.algorithm.generates:
            metrics |= self._staleness_metrics()
            shaping = self.estimation.end_step(self._total)
            metrics |= {f"train/{name}": value for name, value in shaping.items()}
        return metrics

    def _train(self, experience: Experience, loss_function: LossFunction) -> list[dict[str, float]]:
        """Makes the optimizer steps over the mini-batches and returns their metrics. Collective over: the actor's
        ranks."""
        normalized_over = self.config.loss.correction.normalize
        if normalized_over == "step":
            experience = self._with_weight_mean(experience)
        mini_batches = self.batch.mini_batches(experience)
        if normalized_over != "mini_batch":
            return self.model.train_batches(mini_batches, loss_function, temperature=self.temperature)
        return [  # one by one: weights may depend on the log-probs after the previous mini-batch
            self.model.train_batch(self._with_weight_mean(one), loss_function, temperature=self.temperature)
            for one in mini_batches
        ]

    def _with_weight_mean(self, experience: Experience) -> Experience:
        """Sets the mean of the correction weights over all replicas' samples. Collective over: the actor's ranks."""
        settings = self.config.loss
        present = self.logprobs(experience) if settings.old_logprobs == "rollout" else None
        sums = self._total(correction.weight_sums(experience, present, settings))
        return correction.with_weight_mean(experience, sums)

    def _loss_of(self, step: int) -> LossFunction:
        """Returns the algorithm's loss function. If an engine generates samples, it also measures the parity with the
        engine."""
        return measuring_parity(self.loss_function, step) if self.algorithm.generates else self.loss_function

    def _staleness_metrics(self) -> Metrics:
        totals = self._total(self.staleness.sums())
        longest = torch.tensor(self.staleness.longest)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.job.groups.cpu[self.grid.ranks])
        return {f"train/{name}": value for name, value in StalenessCounts.metrics(totals, int(longest)).items()}

    def _row_metrics(self, experience: Experience) -> Metrics:
        """Returns metrics of responses read from rows. Collective over: the actor's ranks."""
        cut = self._total(torch.tensor([float(experience.truncated.sum()), experience.num_samples]))
        dropped = self.job.rows.training_rows.dropped
        long_rows = float(dropped.num_long + dropped.num_cut)
        return {"train/truncated_ratio": float(cut[0] / cut[1]), "train/long_rows": long_rows}

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all replicas, in host memory. Collective over: the actor's ranks."""
        totals = values.double() * self.grid.dp / len(self.grid.ranks)  # all ranks of a replica have the same values
        dist.all_reduce(totals, group=self.job.groups.cpu[self.grid.ranks])
        return totals

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values of all replicas, concatenated to shape [n]. Collective over: the actor's ranks."""
        return gathered(values, self.grid, self.job.groups.cpu[self.grid.ranks])

    def _log_sample_ids(self, step: int, chunk: int, experience: Experience) -> None:
        if self.config.logging.sample_ids and self.job.world.rank in self.grid.owners():
            self.sample_ids.append({"step": step, "chunk": chunk, "sample_ids": experience.sample_ids.tolist()})

    def save_state(self) -> Mapping[str, Contents]:
        """Returns the state of a trained role. Its metadata adds the adaptive KL coefficient and the best evaluation of
        held-out rows."""
        text = {KL_COEF: repr(self.estimation.kl.coef)} if self.config.loss.kl.adaptive else {}
        text |= {HELD_OUT_BEST: self.held_out_best.state()} if self.held_out_best else {}
        return {name: Contents(c.tensors, {**c.metadata, **text}) for name, c in super().save_state().items()}

    def _saved_best(self) -> BestSoFar | None:
        """Returns the best evaluation of held-out rows, if the run keeps that policy. It is the same on every rank."""
        settings = self.config.evaluation.keep_best
        if settings is None or not self.config.scores_held_out:
            return None
        best = BestSoFar(settings)
        if (saved := self._saved(HELD_OUT_BEST)) is not None:
            best.restore(saved)
        return best

    def _saved(self, key: str) -> str | None:
        """Returns the metadata value of the resumed checkpoint under a key, or None. All ranks have saved the same
        value."""
        return read_texts(self.job.resumed.files(self.name)[0]).get(key) if self.job.resumed else None

    def save_hf(self, step: int, chunk: int) -> None:
        """Writes <output_dir>/hf for the last step, and a folder in <output_dir>/hf_steps for an earlier one.

        Collective over: the actor's ranks.
        """
        is_last = step == self.config.steps
        self._save("hf" if is_last else f"hf_steps/{name_of(step)}")

    def save_best(self, step: int, chunk: int) -> None:
        """Writes <output_dir>/hf_best if the evaluation of the step is the best so far. Collective over: the actor's
        ranks."""
        if best := self._best_of(step):
            self._save(BEST_FOLDER, {BEST_FILE: best.as_json()})

    def save_candidate(self, step: int, chunk: int) -> None:
        """Writes a candidate for <output_dir>/hf_best, before the evaluation of the step is known. It runs beside
        training.

        Collective over: the actor's ranks.
        """
        self._save(CANDIDATE)

    def keep_candidate(self, step: int, chunk: int) -> None:
        """Moves the candidate to <output_dir>/hf_best if the evaluation of the step is the best so far. Deletes it
        otherwise."""
        best = self._best_of(step)
        if self.job.world.rank != self.grid.ranks[0]:
            return
        output_dir = Path(self.config.output_dir)
        candidate = output_dir / CANDIDATE
        if best:
            notes, kept = {BEST_FILE: best.as_json()}, output_dir / BEST_FOLDER
            replace_checkpoint(kept, candidate, like=Path(self.config.model.path), notes=notes)
            if adapters_folder(candidate).exists():
                replace_adapters(adapters_folder(kept), adapters_folder(candidate))
        else:
            shutil.rmtree(candidate, ignore_errors=True)
            shutil.rmtree(adapters_folder(candidate), ignore_errors=True)

    def _best_of(self, step: int) -> Best | None:
        """Returns the evaluation of the step if it is the best so far, else None. The result is the same
        on all ranks."""
        if self.held_out_best is not None:
            best = self.held_out_best.best
            return best if best and best.step == step else None
        awaited = f"the verdict of rank {self.job.leader_of('reward')} at step {step}"
        verdict = self.job.job_store.get(best_verdict_of(step), waiting_for=awaited)
        return Best(**verdict) if verdict else None

    def _save(self, folder: str, notes: Mapping[str, str] = NO_NOTES) -> None:
        """Saves the merged weights, and the adapters in a folder next to them. Collective over: the actor's ranks."""
        export = Path(self.config.output_dir, folder)
        group, cpu_group = self.job.groups[self.grid.ranks], self.job.groups.cpu[self.grid.ranks]
        save_checkpoint(
            export,
            self.model.published,
            self.model.layout,
            self.job.architecture,
            group=group,
            cpu_group=cpu_group,
            rank=self.job.world.rank,
            like=Path(self.config.model.path),
            dtype=getattr(torch, self.config.model.dtype),
            made_bytes=MADE_BYTES if self.config.makes_actor_weights else None,
            notes=notes,
        )
        lora = self.config.model.lora
        if lora is not None and self.model.adapted:
            save_adapters(
                adapters_folder(export),
                self.model.adapted.parameters,
                self.model.adapted.layout,
                self.job.architecture.adapted(lora.rank, lora.targets, vision=lora.vision),
                lora,
                group=group,
                cpu_group=cpu_group,
                rank=self.job.world.rank,
                base=self.config.model.path,
            )

    def logprobs(self, experience: Experience) -> torch.Tensor:
        """Returns the log-probs under the actor's tempered distribution, or scores, shape [tokens], fp32.

        Collective over: this replica.
        """
        return self.model.evaluate(
            experience, max_tokens=self.config.actor.micro_batch_limit, temperature=self.temperature
        )
