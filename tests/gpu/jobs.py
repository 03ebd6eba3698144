"""Jobs of one rank as data: test_one_gpu runs them, and tests/unit/test_gpu_check.py checks them without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.forked.popen import REPOSITORY
from tests.support.tolerances import EPS_OF_ACTOR, EPS_OF_CRITIC

WARMED_UP = REPOSITORY / "tests/warmed_up"
COMMON = ("steps=3", "data.eval=null", "checkpoint.save_hf=false", "checkpoint.save_every_s=0", EPS_OF_ACTOR)
ONE_RANK = "actor.parallel.tp=1"
ALL = "placement={'actor, reference, rollout, reward': 0}"


@dataclass(frozen=True)
class Job:
    """A config in the folder configs with overrides.

    In overrides {start} is the folder of models and rows to start from. {warmed_up} is a model that solves some of the
    additions.
    """

    config: str
    overrides: tuple[str, ...]
    rows: str = "additions/train.jsonl"
    tolerance: float = 1e-3
    """Allowed relative difference between numbers of a GPU and of a CPU."""

    def path(self) -> Path:
        return REPOSITORY / "configs" / self.config

    def arguments(self, start: Path) -> list[str]:
        """Returns all overrides except the output folder."""
        own = ("model.path={warmed_up}", f"data.train.path={{start}}/{self.rows}", *COMMON, *self.overrides)
        places: Mapping[str, Path] = {"{start}": start, "{warmed_up}": WARMED_UP}
        found = []
        for override in own:
            for place, path in places.items():
                override = override.replace(place, str(path))
            found.append(override)
        return found


PAIRS = "additions/train_pairs.jsonl"
GRPO = "quickstart.yaml"
JOBS = {
    "sft": Job("quickstart_sft.yaml", ("placement={actor: 0}", ONE_RANK, "evaluation.stop_at=null")),
    "grpo": Job(GRPO, (ALL, ONE_RANK)),
    "ppo": Job(
        "quickstart_ppo.yaml",
        ("placement={'actor, critic, rollout, reward': 0}", "critic.critic_warmup_steps=1", EPS_OF_CRITIC),
    ),
    "dpo": Job("quickstart_dpo.yaml", ("placement={'actor, reference': 0}", ONE_RANK), PAIRS),
    "rewards": Job(
        "quickstart_reward_model.yaml", ("placement={actor: 0}", ONE_RANK, "evaluation.stop_at=null"), PAIRS
    ),
    "distillation": Job(
        "quickstart_distillation.yaml",
        ("placement={'actor, teacher, rollout, reward': 0}", "teacher.path={start}/additions/model"),
    ),
    "experts": Job(
        "quickstart_moe.yaml",
        (
            "placement={'actor, rollout, reward': 0}",
            "model.path={start}/experts/model",
            "actor.parallel.ep=1",
            "rollout.parallel={}",
        ),
        "experts/train.jsonl",
    ),
    "experts_sft": Job(
        "quickstart_moe_sft.yaml",
        ("placement={actor: 0}", "model.path={start}/experts/model", "actor.parallel={}"),
        "experts/train.jsonl",
    ),
    "game": Job(
        "text_game.yaml", ("placement={'actor, rollout, env': 0}", "model.path={start}/game/model"), "game/train.jsonl"
    ),
    "offload": Job(GRPO, (ALL, ONE_RANK, *(f"{role}.offload=true" for role in ("actor", "rollout", "reference")))),
    "fsdp": Job(GRPO, (ALL, ONE_RANK, "actor.backend=fsdp")),
    "lora": Job(GRPO, (ALL, ONE_RANK, "model.lora.rank=8")),
    "apart": Job(GRPO, (ALL, ONE_RANK, "model.lora.rank=8", "weight_sync.adapters=apart")),
    "quantised": Job(GRPO, (ALL, ONE_RANK, "rollout.dtype=fp8", "loss.old_logprobs=actor")),
    "muon": Job(GRPO, (ALL, ONE_RANK, "actor.optimizer.name=muon"), tolerance=3e-2),
    "hosted": Job(GRPO, (ALL, ONE_RANK, "actor.optimizer.cpu_offload=true", "model.activation_offload=true")),
}


def broadcasts(model: Path, url: str) -> Job:
    """Returns a job that trains `model` and broadcasts its weights to a server at `url`."""
    own = (ALL, ONE_RANK, f"model.path={model}", "model.dtype=bfloat16", "rollout.max_context_tokens=56")
    reward = "reward={function: 'tests.support.peer_rewards:trl_by_ids', num_workers: 1}"  # lengths
    http = ("rollout.http.weights=group", "rollout.http.staging_mb=0.1", "rollout.http.token_env=ENGINES_TOKEN")
    return Job(GRPO, (*own, reward, "rollout.engine=http", f"rollout.urls=[{url}]", *http))
