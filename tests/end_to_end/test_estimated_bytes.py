"""The dry run's estimate of every role's memory agrees with the memory in a real job."""

from pathlib import Path

import pytest

from rltrain.config.loader import load_config
from rltrain.models.of_roles import role_architectures
from rltrain.planning.memory import resident_bytes
from rltrain.planning.planned import plan_job
from rltrain.runtime.placement import resolve_placement
from tests.support.jobs import REPOSITORY, SHORT, train

GRPO, PPO = REPOSITORY / "configs/quickstart.yaml", REPOSITORY / "configs/quickstart_ppo.yaml"
COMMON = [
    *("steps=1", "evaluation.interval=0", *SHORT),
    "batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 1}",
    *("rollout.sampling.max_response_tokens=40", "rollout.max_context_tokens=56", "rollout.max_running_requests=16"),
]
LORA = "model.lora={rank: 8, alpha: 16}"
BF16, ALL = "model.dtype=bfloat16", "placement={'actor, rollout, reference, reward': all}"
JOBS = {
    "dp, engines in FP8": (GRPO, ["actor.parallel={tp: 1}", "rollout.dtype=fp8"]),
    "dp, whole optimizer": (GRPO, ["actor={parallel: {tp: 1}, distributed_optimizer: false}"]),
    "bf16": (GRPO, ["actor.parallel={tp: 1}", BF16]),
    "bf16, whole optimizer": (GRPO, ["actor={parallel: {tp: 2}, distributed_optimizer: false}", BF16]),
    "optimizer on the host": (GRPO, ["actor={parallel: {tp: 1}, optimizer: {cpu_offload: true}}", BF16]),
    "muon, moments in bf16": (
        GRPO,
        ["actor={parallel: {tp: 2}, optimizer: {name: muon, moments_dtype: bfloat16}}", BF16],
    ),
    "tp, pp, an engine of two ranks": (GRPO, [ALL, "actor.parallel={tp: 2, pp: 2}", "rollout.parallel.tp=2"]),
    "dp of four, bf16": (GRPO, [ALL, "actor.parallel={tp: 1}", BF16]),
    "adapters, dp, bf16": (GRPO, [LORA, "actor.parallel={tp: 1}", BF16]),
    "adapters, tp": (GRPO, [LORA, "actor.parallel={tp: 2}"]),
    "tp with sequences split": (GRPO, ["actor.parallel={tp: 2, sequence_parallel: true}"]),
    "a critic": (PPO, ["critic.critic_warmup_steps=0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_within_five_per_cent(name: str, quickstart_files: Path, tmp_path: Path) -> None:
    path, chosen = JOBS[name]
    files = [f"model.path={quickstart_files}/model", f"data.train.path={quickstart_files}/train.jsonl"]
    overrides = [*files, *COMMON, f"output_dir={tmp_path}", *chosen]
    (record,) = [record for record in train(path, *overrides) if "perf/step_time_s" in record]
    config = load_config(path, overrides)
    placement = resolve_placement(config.placement, 4, 4)
    job = plan_job(config, placement, role_architectures(config, placement.roles), 4)
    for role in {"actor", "rollout", "reference", "critic"} & set(placement.roles):
        held = record.get(f"memory/{role}_resident_bytes")
        parts = resident_bytes(job, role, job.grids[role].pp - 1)  # the reporting leader is on the last stage
        assert (not parts) == (held is None) == (role == "reference" and LORA in chosen), "it is the actor's base"
        assert sum(parts.values()) == pytest.approx(held or 0, rel=0.05), f"{role}: {parts}"
