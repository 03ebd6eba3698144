"""Every metric a run can report. docs/metrics.md is made from this table: python -m rltrain.observability.names."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str


METRICS = (
    Metric("train/loss", "", "the loss that was minimized, over the whole mini-batch"),
    Metric("train/pg_loss", "", "its policy-gradient part: the clipped surrogate"),
    Metric("train/kl_loss", "nats", "its KL part before the coefficient, with loss.kl.where: loss"),
    Metric("train/ppo_kl", "nats", "mean of old minus current log-prob over response tokens"),
    Metric("train/pg_clipfrac", "fraction", "response tokens whose ratio the clip holds back"),
    Metric("train/ratio_max", "", "largest ratio of current to old probability"),
    Metric("train/reference_kl", "nats", "KL to the reference policy, estimator k3, where a reference is placed"),
    Metric("train/entropy", "nats", "mean entropy of the policy over response tokens"),
    Metric("train/train_rollout_logprob_abs_diff", "nats", "mean |actor - engine| log-prob before the first update"),
    Metric("train/train_rollout_logprob_abs_diff_max", "nats", "the largest such difference"),
    Metric("train/grad_norm", "", "norm of the whole gradient before clipping"),
    Metric("train/lr", "", "learning rate"),
    Metric("train/tis_weight", "", "mean truncated importance weight of response tokens, with loss.tis_clip"),
    Metric("train/tis_clipped", "fraction", "response tokens whose importance weight loss.tis_clip cuts"),
    Metric("train/staleness_mean", "steps", "mean of step less policy version over the response tokens trained on"),
    Metric("train/staleness_max", "steps", "the largest of them"),
    Metric("train/stale_samples", "samples", "samples with a token staler than schedule.max_staleness"),
    Metric("train/stale_tokens", "tokens", "response tokens staler than schedule.max_staleness"),
    Metric("critic/loss", "", "half the squared error of the values, clipped, mean over response tokens"),
    Metric("critic/value_mean", "", "mean value of response tokens"),
    Metric("critic/value_clipfrac", "fraction", "response tokens whose value critic.value_clip holds back"),
    Metric("critic/return_mean", "", "mean return: what the values should have been"),
    Metric("critic/explained_variance", "", "1 - var(return - value) / var(return); null if all returns are equal"),
    Metric("critic/grad_norm", "", "norm of the critic's whole gradient before clipping"),
    Metric("critic/lr", "", "the critic's learning rate"),
    Metric("rollout/reward_mean", "", "mean reward of the step's samples"),
    Metric("rollout/reward_std", "", "their standard deviation"),
    Metric("rollout/response_length_mean", "tokens", "mean length of a response"),
    Metric("rollout/response_length_max", "tokens", "length of the longest response"),
    Metric("rollout/response_tokens", "tokens", "response tokens of the step"),
    Metric(
        "rollout/preemptions",
        "samples",
        "samples that waited again for room for keys and values, on the reporting engine",
    ),
    Metric(
        "rollout/kv_cache_peak", "fraction", "most of rollout.kv_cache_gb that was used at once, on the same engine"
    ),
    Metric("rollout/truncated_ratio", "fraction", "responses cut at rollout.sampling.max_response_tokens"),
    Metric(
        "rollout/reward_errors",
        "samples",
        "samples with reward 0 because the reward function raised or returned no number",
    ),
    Metric("rollout/reward_timeouts", "samples", "samples with reward 0 because it ran past reward.timeout_s"),
    Metric("eval/score", "", "mean reward of the greedily decoded held-out prompts"),
    Metric("eval/response_length_mean", "tokens", "mean length of their responses"),
    Metric("perf/step_time_s", "s", "from the end of the previous step to the end of this one"),
    Metric(
        "perf/<task>_s",
        "s",
        "work of one task of the step, such as generate, score, update or weight_sync, on the reporting rank: without "
        "waiting for others, and without a weight sync that an engine joins in the middle of it",
    ),
    Metric(
        "perf/<task>_wait_s",
        "s",
        "waiting for others within the task, on the same rank; waiting inside a collective counts as work",
    ),
    Metric("perf/decode_step_max_s", "s", "longest decode step: an in-flight weight sync waits for at most one"),
    Metric("perf/rollout_tokens_per_s", "tokens/s", "response tokens drawn per second, all engines together"),
    Metric(
        "perf/train_tokens_per_s", "tokens/s", "tokens (prompt and response) trained on per second, all ranks together"
    ),
    Metric("perf/weight_sync_bytes", "bytes", "bytes that the weight sync moved between ranks"),
    Metric("perf/weight_sync_local_bytes", "bytes", "bytes that it copied within ranks"),
    Metric("perf/weight_sync_node_bytes", "bytes", "of the bytes moved, those between ranks of a node"),
    Metric("perf/weight_sync_network_bytes", "bytes", "of the bytes moved, those between nodes"),
    Metric(
        "perf/weight_sync_network_ratio",
        "",
        "bytes between nodes over the least possible, each node getting what it lacks once",
    ),
    Metric(
        "perf/weight_sync_gb_per_s",
        "GB/s",
        "bytes moved over the seconds from when all ranks had come to when all were done, 1 GB = 1e9 bytes",
    ),
    Metric("perf/weight_sync_copy_s", "s", "local copies, on the reporting rank as all of the following"),
    Metric("perf/weight_sync_pack_s", "s", "filling buffers to send from"),
    Metric("perf/weight_sync_wire_s", "s", "having messages on the wire; overlaps with the others"),
    Metric("perf/weight_sync_unpack_s", "s", "emptying buffers received into"),
    Metric("perf/weight_sync_launches", "", "kernel launches, or calls of the native library"),
    Metric("perf/weight_sync_rounds", "", "rounds of at most weight_sync.bucket_mb, in shared memory of 4 MiB"),
    Metric("perf/weight_sync_staging_bytes", "bytes", "memory of its buffers"),
    Metric("perf/weight_sync_verify_s", "s", "comparing checksums of both sides, with weight_sync.verify"),
    Metric("perf/checkpoint_copy_s", "s", "of the step: copying what a checkpoint holds, on the actor's first rank"),
    Metric("perf/checkpoint_write_s", "s", "beside training: the longest of the ranks' writing of the last checkpoint"),
    Metric("perf/checkpoint_bytes", "bytes", "its size; both are in the step in which it became complete"),
    Metric(
        "memory/<role>_resident_bytes",
        "bytes",
        "most that its weights, gradients, optimizer and cache held on the device, on the reporting rank as below",
    ),
    Metric(
        "memory/<role>_residue_bytes", "bytes", "what was left on the device of nobody's after the role had left it"
    ),
    Metric("memory/host_bytes", "bytes", "host memory kept for what leaves the device, of all roles of the rank"),
    Metric("memory/offload_s", "s", "tasks waiting for other roles to leave the device"),
    Metric("memory/onload_s", "s", "tasks waiting for what they need to come back; less with residency.prefetch"),
)

_PATTERNS = tuple(re.compile(re.sub("<[a-z]+>", "[a-z_]+", metric.name)) for metric in METRICS)


def working_task(metric: str) -> str | None:
    """generate for perf/generate_s; None for a metric that is not a task's seconds of work."""
    return None if waiting_task(metric) else _task_before("_s", metric)


def waiting_task(metric: str) -> str | None:
    """generate for perf/generate_wait_s; None for a metric that is not a task's seconds of waiting."""
    return _task_before("_wait_s", metric)


def times_a_task(metric: str) -> bool:
    return (working_task(metric) or waiting_task(metric)) is not None


def _task_before(suffix: str, metric: str) -> str | None:
    is_task_time = metric.startswith("perf/") and metric.endswith(suffix) and not metric.endswith("_per_s")
    if not is_task_time or any(metric == known.name for known in METRICS):  # parts of a task, and whole steps
        return None
    return metric.removeprefix("perf/").removesuffix(suffix)


def is_documented(name: str) -> bool:
    """Whether the table has this metric."""
    return any(pattern.fullmatch(name) for pattern in _PATTERNS)


def document() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "`<output_dir>/metrics.jsonl` has one JSON object per step: `step` (from 0), `time_s` (seconds since the",
        "start) and the metrics below. Weights & Biases shows the same names when `logging.wandb.project` is set.",
        "A value that is not finite is written as `null`. A metric appears in the steps, and for the algorithms, that",
        "have it. An evaluation counts to the step before whose training it ran, so the record after the last training",
        "step holds the final one. With several mini-batches per step, `train/*` are means over them, `*_max` maxima,",
        "and `train_rollout_logprob_abs_diff` is that of the first, before any update.",
        "",
        "| name | unit | meaning |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| `{metric.name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |" for metric in METRICS
    ]
    lines += ["", "Made by `python -m rltrain.observability.names > docs/metrics.md`."]
    return "\n".join(lines)


if __name__ == "__main__":
    print(document())
