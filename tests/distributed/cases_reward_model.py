"""The ranks of test_reward_model: role reward_model scores samples of a policy with another vocabulary."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rltrain.config.schema import Config
from rltrain.data.experience import Experience
from rltrain.exchange.exchange import Shipment
from rltrain.models.of_roles import role_architectures
from rltrain.roles.inputs import JobRows
from rltrain.roles.role import Job
from rltrain.roles.scoring_models import RewardModelRole
from rltrain.runtime.placement import group_lists, resolve_placement, role_grids
from rltrain.runtime.process_groups import ProcessGroups
from tests.support.jobs import REPOSITORY
from tests.support.packed_experience import plain_experience

POLICY = REPOSITORY / "tests/warmed_up"
PROMPTS = ("1+1=", "20+301=")
RESPONSES = ("2", "0+1=1,321", "9" * 70, "12+", "")
"""All letters of the policy's vocabulary. Their ids differ from the reward model's."""


def all_cases(folder: str, families: list[str]) -> dict[str, list[float]]:
    """Returns by case the scores of this rank's replica, for all samples of `drawn` or for every second one."""
    return {
        f"{family}/{layout}": scores(make_job(Path(folder), family, layout), half=layout == "dp2")
        for family in families
        for layout in ("tp2", "dp2")
    }


def make_job(folder: Path, family: str, layout: str) -> Any:
    """Returns the parts of a job used by the role."""
    placement = {"actor, rollout, reward": 0, "reward_model": "0-1"}
    config = Config.model_validate(
        {
            "steps": 1,
            "placement": placement,
            "model": {"path": str(POLICY), "dtype": "float32"},
            "data": {"train": {"path": str(folder / "prompts.jsonl"), "label_key": None}, "max_prompt_tokens": 16},
            "reward_model": {
                "path": str(folder / family),
                "micro_batch_tokens": 50,
                "parallel": {"tp": 2 if layout == "tp2" else 1},
            },
        }
    )
    placed = resolve_placement(placement, 2, 2)
    grids = role_grids(config, placed)
    architectures = role_architectures(config, placed.roles)
    return Job(
        config=config,
        world=SimpleNamespace(rank=dist.get_rank(), device=torch.device("cpu"), ranks_per_node=2),
        placement=placed,
        grids=grids,
        groups=ProcessGroups(group_lists(grids), backend="gloo", timeout_s=60),
        architectures=architectures,
        job_store=SimpleNamespace(heartbeat=SimpleNamespace(advance=lambda: None)),
        waiter=SimpleNamespace(meanwhile=lambda: None),
        rows=JobRows(config, None, architectures["actor"]),
        pause=lambda reason: None,
    )


def scores(job: Job, *, half: bool) -> list[float]:
    role = RewardModelRole(job)
    samples = drawn(job)
    if half:
        samples = samples.select(torch.arange(role.dp, samples.num_samples, 2))
    role.shipments["samples", 0, 0] = Shipment(samples, samples.lengths, torch.zeros_like(samples.lengths))
    role.model_scores(0, 0)
    experience = role.shipments["model_scores", 0, 0].experience
    return [float(score) for score in experience.model_scores]


def drawn(job: Job) -> Experience:
    """Returns a group with all responses for each prompt."""
    encoder = job.rows.prompts.train.encoder
    texts = [(row, response) for row in range(len(PROMPTS)) for response in RESPONSES]
    ids = [(job.rows.prompts.train.prompt_tokens(row), *encoder.encode_responses([said])) for row, said in texts]
    tokens = torch.tensor([token for prompt, response in ids for token in (*prompt, *response)])
    mask = torch.tensor([drawn for p, r in ids for drawn in (*[False] * len(p), *[True] * len(r))])
    samples = plain_experience([len(p) + len(r) for p, r in ids], tokens, mask, turn_rewards=torch.zeros(len(tokens)))
    rows = torch.tensor([row for row, _ in texts])
    return samples.with_fields(group_ids=rows, prompt_ids=rows)
