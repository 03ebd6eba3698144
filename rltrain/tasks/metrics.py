"""The metrics that tasks report."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str


OF_PAIRS = (
    ("accuracy", "fraction", "pairs whose chosen response has the higher reward"),
    ("margin", "", "reward of the chosen response less that of the rejected one"),
    ("chosen_reward", "", "reward of the chosen response: of dpo preference.beta times its log-ratio, else its score"),
    ("rejected_reward", "", "reward of the rejected response"),
    ("truncated_ratio", "fraction", "responses in rows that are cut at data.max_response_tokens"),
    ("chosen_logprob", "nats", "log-prob of the whole chosen response, of dpo"),
    ("rejected_logprob", "nats", "log-prob of the whole rejected response, of dpo"),
    ("sft_loss", "nats", "the loss's part with preference.sft_coef, before the coefficient"),
    ("center_loss", "", "the loss's part with preference.center_coef, before the coefficient"),
)
"""(name, unit, meaning) of what is told of pairs, in training and in evaluations."""

OF_SKIPPING = ("skipped_updates", "loss_scale", "overflowed_updates")

OF_EXPERTS = (
    ("moe_load_imbalance", "", "tokens of a layer's busiest expert over the mean of its experts, in the worst layer"),
    ("moe_load_imbalance_mean", "", "the same, mean over the layers with experts"),
    ("moe_load_min", "", "tokens of the idlest expert of any layer over the mean of its layer"),
    ("moe_idle_experts", "experts", "of all layers that no token of the mini-batch went to"),
    ("moe_aux_loss", "", "balance loss before model.moe.aux_loss_coef, mean over layers: 1 where loads are even"),
    ("moe_z_loss", "", "mean squared log-sum-exp of routing scores, before model.moe.z_loss_coef"),
    ("moe_load/<layer>/<expert>", "", "tokens of an expert over the mean of its layer, with model.moe.log_loads"),
)
"""(name, unit, meaning) of what is told of models with experts; tokens are those of samples, padding left out."""

UPDATE = (
    Metric("train/loss", "", "the loss that was minimized, over the whole mini-batch"),
    Metric(
        "train/pg_loss", "", "its policy-gradient part: the surrogate of loss.policy, corrected as loss.correction says"
    ),
    Metric("train/kl_loss", "nats", "its KL part before the coefficient, with loss.kl.where: loss"),
    Metric("train/ppo_kl", "nats", "mean of old minus current log-prob over response tokens"),
    Metric(
        "train/pg_clipfrac", "fraction", "response tokens whose ratio the clip holds back, where loss.policy has one"
    ),
    Metric("train/dual_clipfrac", "fraction", "response tokens whose ratio counts as loss.dual_clip"),
    Metric("train/covariance_tokens", "fraction", "response tokens that loss.policy clip_cov or kl_cov has chosen"),
    Metric("train/ratio_max", "", "largest ratio of current to old probability"),
    Metric("train/reference_kl", "nats", "KL to the reference policy, estimator k3, where a reference is placed"),
    Metric("train/teacher_kl", "nats", "KL to the teacher, where one is placed: estimator k3, or over teacher.top_k"),
    Metric("train/teacher_loss", "nats", "the loss's part that comes of it, before teacher.coef, with where: loss"),
    Metric("train/mtp_loss", "nats", "cross-entropy of the token after next, before model.mtp.coef"),
    Metric("train/entropy", "nats", "mean entropy of the policy over response tokens"),
    Metric("train/train_rollout_logprob_abs_diff", "nats", "mean |actor - engine| log-prob before the first update"),
    Metric("train/train_rollout_logprob_abs_diff_max", "nats", "the largest such difference"),
    Metric("train/fresh_tokens", "fraction", "response tokens that the weights drew which the step began with"),
    Metric("train/fresh_logprob_abs_diff", "nats", "mean |actor - engine| log-prob of these; checks.max_logprob_diff"),
    Metric("train/fresh_kl", "nats", "KL of the actor from the engine on these, estimator k3; checks.max_kl"),
    Metric("train/grad_norm", "", "norm of the whole gradient before clipping"),
    Metric("train/lr", "", "learning rate"),
    Metric("train/skipped_updates", "", "optimizer steps left out because loss or gradient norm was not finite"),
    Metric("train/loss_scale", "", "of actor.optimizer.loss_scale after the step, with model.dtype float16"),
    Metric("train/overflowed_updates", "", "those of the skipped ones whose gradients a smaller loss scale may save"),
    Metric("train/long_rows", "rows", "of data.train, left out or cut by data.on_long_row"),
    Metric("train/tokens", "tokens", "tokens (prompt and response) that the step trained on"),
    Metric("train/reward_kl", "nats", "mean over responses of their KL per token, with loss.kl.where: reward"),
    Metric("train/kl_coef", "", "coefficient by which it was taken off the rewards"),
    Metric("train/overlong_penalty", "", "mean of advantages.overlong_penalty over the samples, at most 0"),
    Metric("train/overlong_samples", "samples", "samples that have some of it"),
    Metric("train/masked_truncated", "samples", "samples that advantages.mask_truncated left out of the loss"),
    Metric("train/tis_weight", "", "mean weight of response tokens in the policy loss, with loss.correction"),
    Metric("train/tis_weight_mean", "", "mean that loss.correction.normalize divided these weights by"),
    Metric("train/tis_clipped", "fraction", "response tokens whose ratio is outside loss.correction's low and high"),
    Metric("train/ess", "fraction", "effective sample size of these weights, of the number of response tokens"),
    Metric("train/rejected_tokens", "fraction", "response tokens that loss.correction leaves out or gives weight 0"),
    Metric("train/rejected_sequences", "fraction", "sequences of which that is so of all response tokens"),
    Metric("train/staleness_mean", "steps", "mean of step less policy version over the response tokens trained on"),
    Metric("train/staleness_max", "steps", "the largest of them"),
    Metric("train/stale_samples", "samples", "samples with a token staler than schedule.max_staleness"),
    Metric("train/stale_tokens", "tokens", "response tokens staler than schedule.max_staleness"),
    Metric(
        "perf/train_tokens_per_s",
        "tokens/s",
        "tokens (prompt and response) trained on per second, in every pass, all ranks together",
    ),
    Metric("perf/train_tokens_per_gpu_s", "tokens/s", "the same per rank of the actor"),
    Metric("train/replayed_choices", "fraction", "choices of experts that were given, with model.router_replay"),
    Metric(
        "train/replayed_choices_differing",
        "fraction",
        "of these, those that the actor's routers would not have made, before the first update",
    ),
    *(Metric(f"train/{name}", unit, meaning) for name, unit, meaning in (*OF_EXPERTS, *OF_PAIRS)),
)
SCORE_HELD_OUT = (
    Metric(
        "eval/loss",
        "",
        "the loss of held-out rows: of sft with the actor alone the mean over all response tokens, of algorithms that "
        "learn from pairs the mean over pairs",
    ),
    *(
        Metric(f"eval/{name}", unit, f"as train/{name}, of the held-out pairs")
        for name, unit, _ in OF_PAIRS
        if name != "truncated_ratio"  # which evaluations have that draw
    ),
)
UPDATE_CRITIC = (
    Metric("critic/loss", "", "half the squared error of the values, clipped, mean over response tokens"),
    Metric("critic/value_mean", "", "mean value of response tokens"),
    Metric("critic/value_clipfrac", "fraction", "response tokens whose value critic.value_clip holds back"),
    Metric("critic/return_mean", "", "mean return: what the values should have been"),
    Metric("critic/explained_variance", "", "1 - var(return - value) / var(return); null if all returns are equal"),
    Metric("critic/grad_norm", "", "norm of the critic's whole gradient before clipping"),
    Metric("critic/lr", "", "the critic's learning rate"),
    *(Metric(f"critic/{name}", "", f"as train/{name}, of the critic") for name in OF_SKIPPING),
    *(Metric(f"critic/{name}", unit, f"as train/{name}, of the critic") for name, unit, _ in OF_EXPERTS),
)
GENERATE = (
    Metric("rollout/response_tokens", "tokens", "response tokens of the step"),
    Metric("curriculum/unseen", "fraction", "training rows of which no sample was scored yet, with data.solved_rate"),
    Metric("curriculum/too_hard", "fraction", "those whose estimated share of solved samples is below its low"),
    Metric("curriculum/in_window", "fraction", "those where it is between low and high"),
    Metric("curriculum/too_easy", "fraction", "those where it is above high"),
    Metric("curriculum/retired", "prompts", "that were solved so often that they are not drawn any more"),
    Metric("curriculum/solved_rate_mean", "fraction", "mean estimate over rows of which samples were scored"),
    Metric(
        "rollout/preemptions",
        "samples",
        "samples that waited again for room for keys and values, on the reporting engine",
    ),
    Metric(
        "rollout/kv_cache_peak", "fraction", "most of rollout.kv_cache_gb that was used at once, on the same engine"
    ),
    Metric(
        "rollout/kv_reused_tokens",
        "tokens",
        "tokens of conversations that had a further turn and whose keys and values had been kept, on the same engine",
    ),
    Metric(
        "rollout/kv_evictions",
        "samples",
        "conversations whose keys and values were given up between two turns for want of room, on the same engine",
    ),
    Metric("rollout/servers", "servers", "that the reporting rank can ask now, with rollout.engine http"),
    Metric(
        "rollout/requests_sent_again",
        "requests",
        "of that rank's since the last step that a server did not end: it was lost, left, or had too much to do",
    ),
    Metric(
        "rollout/weight_files_bytes",
        "bytes",
        "of files that all ranks wrote for servers in the last update, with rollout.http.weights folder",
    ),
    Metric(
        "rollout/weight_files_are_full",
        "",
        "with weight_sync.delta beside that: 1 where they were a whole checkpoint, 0 where they were what changed",
    ),
    Metric("perf/decode_step_max_s", "s", "longest decode step: an in-flight weight sync waits for at most one"),
    Metric("perf/rollout_tokens_per_s", "tokens/s", "response tokens drawn per second, all engines together"),
    Metric("perf/rollout_tokens_per_gpu_s", "tokens/s", "the same per rank of the rollout"),
    Metric("perf/engine_waits_for_env_s", "s", "that engine had nothing to decode while samples waited for role env"),
    Metric("env/episodes", "episodes", "that ended in the step, on the reporting engine as all of env/*"),
    Metric("env/turns_mean", "turns", "of the model, per episode"),
    Metric("env/truncated_ratio", "fraction", "episodes that were cut by a limit on turns or tokens"),
    Metric("env/seconds_mean", "s", "that an episode's environment worked"),
    Metric("env/wait_s_mean", "s", "from a turn's end to its answer"),
    Metric("env/tool_calls", "calls", "of tools, in all episodes"),
    Metric("env/tool_call_s", "s", "of an environment's step with a call, on average"),
    Metric("env/observed_tokens", "tokens", "that environments gave"),
    Metric("env/failed", "episodes", "that failed and were not trained on"),
    Metric(
        "env/failed_<kind>",
        "episodes",
        "of these: error, step_time, episode_time, process (it ended), neighbour (its process was ended because of "
        "another episode)",
    ),
    Metric("env/began_anew", "episodes", "that could not go on from a checkpoint"),
    Metric("env/<info>", "", "mean over episodes of a number in their last step's info"),
)
MODEL_SCORES = (
    Metric("reward_model/text_tokens_mean", "tokens", "of its own tokens, that the reward model read per sample"),
    Metric(
        "reward_model/cut_ratio", "fraction", "texts longer than reward_model.max_tokens, of which the end was read"
    ),
)
VERDICTS = (
    Metric("judge/question_tokens_mean", "tokens", "of its own tokens, that the judge was asked per sample"),
    Metric("judge/answer_tokens_mean", "tokens", "that it answered"),
    Metric("judge/cut_ratio", "fraction", "answers cut at judge.sampling.max_response_tokens"),
)
SCORE = (
    Metric("rollout/reward_mean", "", "mean reward of the step's samples"),
    Metric("rollout/reward_std", "", "their standard deviation"),
    Metric(
        "rollout/reward_mean/<source>",
        "",
        "mean reward of the samples whose prompts are from one of data.train.sources",
    ),
    Metric("rollout/share/<source>", "fraction", "samples whose prompts are from it"),
    Metric(
        "rollout/flat_groups",
        "fraction",
        "prompts whose samples all have the same reward, with algorithms that compare them: they teach nothing",
    ),
    Metric("rollout/greedy_reward_mean", "", "mean reward of the samples drawn greedily, with algorithm remax"),
    Metric("rollout/response_length_mean", "tokens", "mean length of a response"),
    Metric("rollout/response_length_max", "tokens", "length of the longest response"),
    Metric("rollout/truncated_ratio", "fraction", "responses cut at rollout.sampling.max_response_tokens"),
    Metric(
        "rollout/reward_errors",
        "samples",
        "samples with reward 0 because the reward function raised or returned no number; of several functions, the sum",
    ),
    Metric("rollout/reward_timeouts", "samples", "samples with reward 0 because it ran past reward.timeout_s"),
    Metric("rollout/reward_unscored", "samples", "samples with reward 0 because every function returned None for them"),
    Metric(
        "rollout/reward_<name>",
        "",
        "mean of one of reward.functions, over the samples that it is for, or of what a model told the reward",
    ),
    Metric("rollout/reward_<name>_errors", "samples", "samples that this one failed on; _timeouts alike"),
    Metric("rollout/reward_<key>", "", "mean of a number beside the score; of reward.functions reward_<name>_<key>"),
    Metric("rollout/dynamic_filter/dropped", "groups", "drawn in the step and left out, with batch.dynamic_sampling"),
    Metric(
        "rollout/dynamic_filter/drop_<reason>",
        "groups",
        "of these: zero_std_<reward> (all samples have this one), failed (no reward function could tell), or what the "
        "filter said",
    ),
    Metric(
        "rollout/dynamic_filter/kept_at_limit",
        "groups",
        "that the filter would have dropped and that count, because of batch.dynamic_sampling.max_drawn",
    ),
)
OF_ALL_REWARDS = ("mean", "std", "errors", "timeouts", "unscored")
"""What none of reward.functions and of their numbers can be called: rollout/reward_<one of these> is of them all."""
SCORE_EVALUATION = (
    Metric("eval/score", "", "mean reward of the held-out prompts of data.eval, decoded greedily"),
    Metric("eval/score_stderr", "", "its standard error: that of the mean over prompts"),
    Metric("eval/prompts", "prompts", "that were answered"),
    Metric("eval/response_length_mean", "tokens", "mean length of their responses"),
    Metric("eval/truncated_ratio", "fraction", "responses cut at the limit on their tokens"),
    Metric("eval/reward_mean/<source>", "", "mean reward of the prompts from one of data.eval.sources"),
    Metric("eval/reward_<name>", "", "as rollout/reward_<name> and rollout/reward_<key>, of the held-out prompts"),
    Metric("eval/policy_version", "", "of the weights that drew them; were they several, the oldest"),
    Metric("eval/policy_version_max", "", "and the newest"),
    Metric("eval/<set>/<metric>", "", "any of these, of one of evaluation.sets by its name"),
    Metric("eval/<set>/mean@<n>", "", "mean reward of its n samples per prompt, n being evaluation.sets' number"),
    Metric(
        "eval/<set>/pass@<k>",
        "fraction",
        "prompts that at least one of k samples passes, estimated without bias from all of samples_per_prompt; a "
        "sample passes with a reward above evaluation.pass_threshold",
    ),
    Metric("eval/<set>/best@<k>", "", "largest reward of k samples, estimated alike"),
)
WEIGHT_SYNC = (
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
    Metric(
        "perf/weight_sync_verify_s",
        "s",
        "comparing checksums of both sides, with weight_sync.verify, weight_sync.delta or checks.replicas",
    ),
    Metric("perf/weight_sync_is_full", "", "with weight_sync.delta: 1 for a sync that sent everything, else 0"),
    Metric(
        "perf/weight_sync_changed_share",
        "fraction",
        "with weight_sync.delta: of the bytes that were compared with those sent last, those of elements that changed",
    ),
)
