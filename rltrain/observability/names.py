"""All metrics of a run, from its tasks and from the whole run.

docs/metrics.md is made from this table: python -m rltrain.observability.names.
"""

import re
from typing import NamedTuple

from rltrain.tasks.metrics import Metric
from rltrain.tasks.roles import all_tasks

# Names of rltrain's metrics in other trainers, from their code of August 2026. For docs/metrics.md.


class Aliases(NamedTuple):
    """A metric's names in other trainers, "" if there is none.

    `verl` and `slime` count throughput per GPU, like `perf/tokens_per_gpu_s`.
    """

    slime: str = ""
    verl: str = ""
    skyrl: str = ""
    trl: str = ""


ALIASES: dict[str, Aliases] = {
    "rollout/reward_mean": Aliases(
        "rollout/raw_reward", "critic/score/mean, critic/rewards/mean", "reward/avg_raw_reward", "reward"
    ),
    "rollout/response_length_mean": Aliases(
        "rollout/response_len/mean", "response_length/mean", "generate/avg_num_tokens", "completions/mean_length"
    ),
    "rollout/response_length_max": Aliases("", "response_length/max", "", "completions/max_length"),
    "rollout/truncated_ratio": Aliases(
        "rollout/truncated_ratio", "response_length/clip_ratio", "", "completions/clipped_ratio"
    ),
    "train/pg_loss": Aliases("train/pg_loss", "actor/pg_loss", "policy/policy_loss", "loss"),
    "train/ppo_kl": Aliases("train/ppo_kl", "actor/ppo_kl"),
    "train/pg_clipfrac": Aliases("train/pg_clipfrac", "actor/pg_clipfrac", "", "clip_ratio/region_mean"),
    "train/dual_clipfrac": Aliases("", "actor/pg_clipfrac_lower"),
    "train/entropy": Aliases("train/entropy_loss", "actor/entropy", "", "entropy"),
    "train/kl_loss": Aliases("train/kl_loss", "actor/kl_loss", "loss/avg_kl", "kl"),
    "train/grad_norm": Aliases("train/grad_norm", "actor/grad_norm", "", "grad_norm"),
    "train/lr": Aliases("train/lr-pg_0", "actor/lr", "", "learning_rate"),
    "train/train_rollout_logprob_abs_diff": Aliases(
        "train/train_rollout_logprob_abs_diff",
        "training/rollout_probs_diff_mean",
        "policy/rollout_train_logprobs_abs_diff_mean",
    ),
    "critic/loss": Aliases("", "critic/vf_loss"),
    "critic/explained_variance": Aliases("", "critic/vf_explained_var"),
    "eval/score": Aliases("eval/<set>", "val-core/<set>/<metric>/mean@k", "eval/all/avg_score"),
    "eval/<set>/pass@<k>": Aliases("passrate/pass@k", "val-aux/<set>/<metric>/best@k/mean", "eval/all/pass_at_k"),
    "train/staleness_mean": Aliases("", "training/off_policy/trajectory_staleness/mean", "async/staleness_mean"),
    "train/staleness_max": Aliases("", "training/off_policy/trajectory_staleness/max", "async/staleness_max"),
    "perf/step_time_s": Aliases("perf/step_time", "timing_s/step, perf/time_per_step", "timing/step", "step_time"),
    "perf/generate_s": Aliases("perf/rollout_time", "timing_s/gen", "timing/generate"),
    "perf/update_s": Aliases("perf/train_time", "timing_s/update_actor", "timing/train_critic_and_policy"),
    "perf/weight_sync_s": Aliases("perf/update_weights_time", "timing_s/update_weights", "timing/sync_weights"),
    "perf/tokens_per_gpu_s": Aliases(
        "perf/tokens_per_gpu_per_sec", "perf/throughput", "trainer/tokens_per_second_per_gpu"
    ),
    "perf/<role>_mfu": Aliases("", "perf/mfu/actor, perf/mfu/ref, ..."),
}


def table() -> list[str]:
    """Returns the names in other trainers as a Markdown table."""
    rows = [(name, *aliases) for name, aliases in ALIASES.items()]
    lines = ["| rltrain | slime | verl | SkyRL | TRL |", "| --- | --- | --- | --- | --- |"]
    return [*lines, *("| " + " | ".join(map(_quoted, row)) + " |" for row in rows)]


def _quoted(names: str) -> str:
    return ", ".join(f"`{name}`" if "/" in name or name.isidentifier() else name for name in names.split(", ") if name)


METRICS: tuple[Metric, ...] = (
    *(metric for task in all_tasks() for metric in task.reports),
    Metric("images/decoded", "images", "images of rows decoded since the last report, on all ranks"),
    Metric(
        "images/cache_hits",
        "images",
        "images of rows that were about to be decoded and found among those of earlier steps or other ranks, since the "
        "last report, on all ranks",
    ),
    Metric("images/bytes_sent", "bytes", "pixels sent to other nodes since the last report, by all ranks"),
    Metric("perf/step_time_s", "s", "seconds from the end of the previous step to the end of this one"),
    Metric("perf/tokens_per_gpu_s", "tokens/s", "trained tokens per second of the step, per rank of the job"),
    Metric(
        "perf/<role>_idle",
        "fraction",
        "share of the time since the last report without work of the role's first rank on the role's tasks: it waited, "
        "or worked for another role",
    ),
    Metric(
        "perf/<role>_tflops",
        "TFLOP/s",
        "FLOPs of the role's model per second of its computing tasks, per rank: matrix products only, backward twice "
        "the forward, no recomputation (models/flops.py)",
    ),
    Metric("perf/<role>_mfu", "fraction", "perf/<role>_tflops over the device's peak in model.dtype, if it is known"),
    Metric(
        "perf/<role>_tokens_per_gpu_s",
        "tokens/s",
        "tokens through the role's model per second of its computing tasks, per rank: prompts and responses, passes of "
        "every kind",
    ),
    Metric("perf/<role>_pflop", "PFLOP", "FLOPs of the role's model since the last report, on all of its ranks"),
    Metric("perf/tflops_per_gpu", "TFLOP/s", "FLOPs of all roles' models per second of the step, per rank of the job"),
    Metric("perf/mfu", "fraction", "perf/tflops_per_gpu over the device's peak in model.dtype, if it is known"),
    Metric(
        "perf/<task>_s",
        "s",
        "work on one task of the step, such as generate, score, update or weight_sync, on the reporting rank: without "
        "waiting for others, and without a weight sync joined in the middle of the task",
    ),
    Metric(
        "perf/<task>_wait_s",
        "s",
        "waiting for others within the task, on the same rank; waiting inside a collective counts as work",
    ),
    Metric(
        "perf/checkpoint_copy_s",
        "s",
        "copying the content of a checkpoint except weights and optimizer, in the step, on the actor's first rank",
    ),
    Metric(
        "perf/checkpoint_late_copy_s",
        "s",
        "the step's first update, or an offload, waiting until weights and optimizer are copied, on the same rank",
    ),
    Metric(
        "perf/checkpoint_write_s",
        "s",
        "writing the last checkpoint beside training, on the slowest rank, in the step of its completion",
    ),
    Metric("perf/checkpoint_bytes", "bytes", "size of the last checkpoint, in the step of its completion"),
    Metric(
        "perf/memory_checkpoint_s",
        "s",
        "from the boundary until all ranks had written and copied the last checkpoint in memory, beside training",
    ),
    Metric(
        "perf/memory_checkpoint_bytes",
        "bytes",
        "size of the last checkpoint in memory without copies, in the step of its completion",
    ),
    Metric(
        "memory/<role>_resident_bytes",
        "bytes",
        "peak of the role's weights, gradients, optimizer and cache on the device, on the role's first rank",
    ),
    Metric("memory/<role>_residue_bytes", "bytes", "device memory that belongs to no role after the role left"),
    Metric("memory/host_bytes", "bytes", "host memory kept for offloading, for all roles of the rank"),
    Metric("memory/peak_bytes", "bytes", "peak allocated on the device; on a CPU the process's peak so far"),
    Metric("memory/reserved_bytes", "bytes", "device memory held by torch's allocator; on a CPU the resident set"),
    Metric("memory/<role>_peak_bytes", "bytes", "memory/peak_bytes of the role's first rank, with all roles there"),
    Metric("memory/<role>_reserved_bytes", "bytes", "memory/reserved_bytes of the role's first rank"),
    Metric("memory/offload_s", "s", "tasks waiting for other roles to be offloaded from the device"),
    Metric("memory/onload_s", "s", "tasks waiting for their memory to come back; less with residency.prefetch"),
)

_PATTERNS = [
    (re.compile(r"\w+".join(map(re.escape, re.split(r"<\w+>", metric.name)))), metric)
    for metric in sorted(METRICS, key=lambda metric: ("<" in metric.name, -len(metric.name)))
]
"""Patterns of metric names. The one of <task>_wait_s comes before <task>_s."""

_RATE = re.compile("_per_([a-z]+_)?s$")
"""Matches the end of a rate, such as tokens per second, or per GPU and second."""


def working_task(metric: str) -> str | None:
    """Returns the task of a metric with its seconds of work, such as generate for perf/generate_s. None for other
    metrics."""
    return None if waiting_task(metric) else _task_before("_s", metric)


def waiting_task(metric: str) -> str | None:
    """Returns the task of a metric with its seconds of waiting, such as generate for perf/generate_wait_s. None for
    others."""
    return _task_before("_wait_s", metric)


def times_a_task(metric: str) -> bool:
    return (working_task(metric) or waiting_task(metric)) is not None


def _task_before(suffix: str, metric: str) -> str | None:
    is_task_time = metric.startswith("perf/") and metric.endswith(suffix) and not _RATE.search(metric)
    if not is_task_time or any(metric == known.name for known in METRICS):  # parts of a task, and whole steps
        return None
    return metric.removeprefix("perf/").removesuffix(suffix)


def documented(name: str) -> Metric | None:
    """Returns the table's entry of a metric, or None if the name is unknown."""
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def document() -> str:
    """Returns the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "`<output_dir>/metrics.jsonl` has one JSON object per step: `step` (from 0), `time_s` (seconds of the run,",
        "continued when it is resumed) and the metrics below. Weights & Biases shows the same names if",
        "`logging.wandb.project` is set.",
        "",
        "- A value that is not finite is written as `null`. A metric is missing in steps and algorithms without it.",
        "- An evaluation runs before the training of its step. So the record after the last training step has the last",
        "  evaluation.",
        "- With several optimizer steps per step, `train/*` are means over those not skipped, and `*_max` are maxima.",
        "  `train_rollout_logprob_abs_diff` is of the first one, before any update.",
        "",
        "| name | unit | meaning |",
        "| --- | --- | --- |",
    ]
    sections = list(dict.fromkeys(_section(metric) for metric in METRICS))
    lines += [
        f"| `{metric.name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |"
        for metric in sorted(METRICS, key=lambda metric: sections.index(_section(metric)))
    ]
    lines += ["", "## Names in other trainers", "", *table()]
    lines += ["", "Made by `python -m rltrain.observability.names > docs/metrics.md`."]
    return "\n".join(lines)


def _section(metric: Metric) -> str:
    return metric.name.split("/")[0]


if __name__ == "__main__":
    print(document())
