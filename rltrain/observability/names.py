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
    Metric("rollout/reward_mean", "", "mean reward of the step's samples"),
    Metric("rollout/reward_std", "", "their standard deviation"),
    Metric("rollout/response_length_mean", "tokens", "mean length of a response"),
    Metric("rollout/response_length_max", "tokens", "length of the longest response"),
    Metric("rollout/response_tokens", "tokens", "response tokens of the step"),
    Metric("rollout/truncated_ratio", "fraction", "responses cut at rollout.sampling.max_response_tokens"),
    Metric("rollout/reward_errors", "samples", "samples with reward 0 because the reward function raised"),
    Metric("rollout/reward_timeouts", "samples", "samples with reward 0 because it ran past reward.timeout_s"),
    Metric("eval/score", "", "mean reward of the greedily decoded held-out prompts"),
    Metric("eval/response_length_mean", "tokens", "mean length of their responses"),
    Metric("perf/step_time_s", "s", "from the end of the previous step to the end of this one"),
    Metric("perf/<task>_s", "s", "one task of the step, such as generate, score, update or weight_sync"),
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
    Metric("perf/weight_sync_gb_per_s", "GB/s", "bytes moved over the seconds of the sync, 1 GB = 1e9 bytes"),
    Metric("perf/weight_sync_copy_s", "s", "local copies, on the reporting rank as all of the following"),
    Metric("perf/weight_sync_pack_s", "s", "filling buffers to send from"),
    Metric("perf/weight_sync_wire_s", "s", "having messages on the wire; overlaps with the others"),
    Metric("perf/weight_sync_unpack_s", "s", "emptying buffers received into"),
    Metric("perf/weight_sync_launches", "", "kernel launches, or calls of the native library"),
    Metric("perf/weight_sync_rounds", "", "rounds of at most weight_sync.bucket_mb"),
    Metric("perf/weight_sync_staging_bytes", "bytes", "memory of its buffers"),
    Metric("perf/weight_sync_verify_s", "s", "comparing checksums of both sides, with weight_sync.verify"),
)

_PATTERNS = tuple(re.compile(re.escape(metric.name).replace("<task>", "[a-z_]+")) for metric in METRICS)


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
