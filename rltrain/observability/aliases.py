"""What other trainers call metrics that rltrain has, as their code of August 2026 names them; for docs/metrics.md."""

from typing import NamedTuple


class Aliases(NamedTuple):
    """Empty where a trainer has none. `verl` and `slime` count throughput per GPU, as `perf/tokens_per_gpu_s` does."""

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
    """In Markdown."""
    rows = [(name, *aliases) for name, aliases in ALIASES.items()]
    lines = ["| rltrain | slime | verl | SkyRL | TRL |", "| --- | --- | --- | --- | --- |"]
    return [*lines, *("| " + " | ".join(map(_quoted, row)) + " |" for row in rows)]


def _quoted(names: str) -> str:
    return ", ".join(f"`{name}`" if "/" in name or name.isidentifier() else name for name in names.split(", ") if name)
