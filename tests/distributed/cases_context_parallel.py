"""The ranks of test_context_parallel: models of every objective with sequences cut among ranks, and the same on one
rank."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rltrain.algorithms.losses import LossFunction, direct_preference_loss, of_states, ranking_loss, value_loss
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import Architecture, LongRopeScaling
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from tests.support.model_shards import tiny_architecture
from tests.support.packed_experience import packed_experience
from tests.support.trained_models import groups_on, in_training, megatron_model

ALL = (0, 1, 2, 3)
GRIDS = {
    "cp2": Grid((0, 1), cp=2),
    "cp4": Grid(ALL, cp=4),
    "tp2_cp2": Grid(ALL, tp=2, cp=2),
    "pp2_cp2": Grid(ALL, pp=2, cp=2),
    "cp2_dp2": Grid(ALL, cp=2),
    "cp4_ep4": Grid(ALL, cp=4, ep=4),
    "cp2_dp2_ep4": Grid(ALL, cp=2, ep=4),
    **{f"rank{rank}": Grid((rank,)) for rank in ALL},
}
POLICY = tiny_architecture("qwen3", hidden_size=32, head_dim=8, num_heads=8, ffn_hidden_size=48, vocab_size=61)
SCORER = POLICY.value_model()
LATENT_EXPERTS = tiny_architecture("deepseek_v3", hidden_size=32, vocab_size=61)
LATENT = replace(LATENT_EXPERTS, moe=None)
EXPERTS = tiny_architecture("qwen3_moe", hidden_size=32, num_heads=8, vocab_size=61)
LONG = LongRopeScaling((1.0, 1.5), 1.2)
ROTATED = replace(tiny_architecture("phi3", hidden_size=32, vocab_size=61), rotary_dim=4, head_dim=8, rope_scaling=LONG)
"""A model with partly rotated and enlarged heads."""
SHAPE = [(5, 20), (3, 1), (9, 31), (1, 2), (2, 17), (6, 24), (1, 8), (4, 11)]
"""Prompt and response tokens of the samples. Some samples have fewer tokens than four ranks have slices."""
MAX_TOKENS, NUM_STEPS, TEMPERATURE, TOP_K = 50, 2, 0.8, 3

BALANCED = schema.MoE(aux_loss_coef=0.05, z_loss_coef=0.01, bias_update_rate=0.01)
KL_IN_LOSS = schema.Kl(coef=0.1, where="loss")
BY_SEQUENCE = schema.Correction(method="tis", level="sequence", high=2.0)
TEACHER = schema.Teacher(where="loss", top_k=TOP_K)
OBJECTIVES: dict[str, tuple[Architecture, LossFunction]] = {
    "grpo": (POLICY, policy_loss(schema.Loss(kl=KL_IN_LOSS, entropy_coef=0.02), 40)),
    "gspo": (POLICY, policy_loss(schema.Loss(policy="gspo", correction=BY_SEQUENCE), 40)),
    "geometric_mean": (POLICY, policy_loss(schema.Loss(policy="geometric_mean", normalization="sequence_mean"), 40)),
    "distillation": (POLICY, policy_loss(schema.Loss(), 40, TEACHER)),
    "dpo": (POLICY, direct_preference_loss(schema.Preference(sft_coef=0.1))),
    "critic": (SCORER, of_states(value_loss(0.2))),
    "reward_model": (SCORER, ranking_loss(schema.Preference())),
    "latent": (LATENT, policy_loss(schema.Loss(), 40)),
    "experts_gspo": (EXPERTS, policy_loss(schema.Loss(policy="gspo", correction=BY_SEQUENCE), 40)),
    "experts_dpo": (LATENT_EXPERTS, direct_preference_loss(schema.Preference(sft_coef=0.1))),
    "experts_critic": (LATENT_EXPERTS.value_model(), of_states(value_loss(0.2))),
    "rotated": (ROTATED, policy_loss(schema.Loss(), 40)),
}
Layouts = dict[str, dict[str, dict[str, Any]]]
"""Settings of the model or of its training, by objective and layout."""

SEQUENCE_PARALLEL, BY_HEADS = {"sequence_parallel": True}, {"cp_communication": "all_to_all"}
FEW: Layouts = {
    "grpo": {"pp2_cp2": {"recompute": "selective"}},
    "gspo": {"cp4": BY_HEADS},
    "critic": {"tp2_cp2": SEQUENCE_PARALLEL},
}
OTHERS: Layouts = {
    "grpo": {"tp2_cp2": {**SEQUENCE_PARALLEL, "recompute": "full"}, "cp2_dp2": {}},
    "gspo": {"cp2_dp2": {"overlap": True}},
    "geometric_mean": {"tp2_cp2": BY_HEADS},
    "distillation": {"tp2_cp2": SEQUENCE_PARALLEL},
    "dpo": {"cp2_dp2": {"distributed_optimizer": False}},
    "critic": {"pp2_cp2": {}},
    "reward_model": {"cp4": {}},
    "latent": {"cp2": {}, "tp2_cp2": {**SEQUENCE_PARALLEL, **BY_HEADS}},
    "experts_gspo": {"cp4_ep4": BY_HEADS, "cp2_dp2_ep4": {"dispatcher": "allgather"}},
    "experts_dpo": {"cp2_dp2_ep4": {}, "tp2_cp2": {}},
    "experts_critic": {"cp4_ep4": {}, "pp2_cp2": {"recompute": "full"}},
    "rotated": {"cp2": {}, "tp2_cp2": {**SEQUENCE_PARALLEL, **BY_HEADS}},
}


def all_cases(folder: str, objectives: Layouts) -> dict[str, Any]:
    """Returns the results of this rank's models by "objective/layout". The layout of one rank is ""."""
    groups, results = groups_on(GRIDS.values()), {}
    for number, (name, layouts) in enumerate(objectives.items()):
        architecture = OBJECTIVES[name][0]
        path = Path(folder, f"{name}{dist.get_rank()}")
        write_weights(architecture, path)
        for layout, settings in {f"rank{number % 4}": {}, **layouts}.items():
            if dist.get_rank() in GRIDS[layout].ranks:
                key = f"{name}/{'' if layout.startswith('rank') else layout}"
                results[key] = _train(name, path, layout, groups, **settings)
    return results


def write_weights(architecture: Architecture, folder: Path) -> None:
    """Writes a checkpoint of random weights, the same on every rank."""
    folder.mkdir()
    tensors, generator = megatron_layout(architecture, Grid((0,))).tensors, torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(tuple(shape), generator=generator) * (0.15 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in zip(tensors.names, tensors.shapes, strict=True)
    }
    save_file(weights, folder / "model.safetensors")


def _train(
    name: str,
    path: Path,
    layout: str,
    groups: ProcessGroups,
    *,
    dispatcher: str = "alltoall",
    distributed_optimizer: bool = True,
    overlap: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    (architecture, loss), grid = OBJECTIVES[name], GRIDS[layout]
    moe = BALANCED.model_copy(update={"dispatcher": dispatcher})
    trainable = in_training(
        megatron_model(path, grid, groups, architecture=architecture, moe=moe, **settings),
        updates=NUM_STEPS,
        max_tokens=MAX_TOKENS,
        optimizer={"lr": 1e-3, "weight_decay": 0.1},
        distributed_optimizer=distributed_optimizer,
        overlap=overlap,
    )
    samples = experience(name)
    at = grid.coordinates(dist.get_rank())
    samples = samples.select(torch.nonzero(samples.group_ids % grid.dp == at.dp).flatten())
    steps = [trainable.train_batch(samples, loss, temperature=TEMPERATURE) for _ in range(NUM_STEPS)]
    told = [trainable.evaluate(experience(name), max_tokens=MAX_TOKENS, temperature=TEMPERATURE)]
    if architecture.head == "vocabulary":
        told += trainable.distributions(experience(name), count=2, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
    return {"steps": steps, "told": [values.tolist() for values in told]}


def experience(name: str, shape: Sequence[tuple[int, int]] = SHAPE) -> Experience:
    """Returns samples with the objective's fields, two to a group."""
    samples, generator = packed_experience(shape), torch.Generator().manual_seed(7)
    num_tokens, vocab_size = samples.num_tokens, POLICY.vocab_size
    likely = -3.5 - torch.rand(num_tokens, generator=generator)  # for an almost untrained model
    fields = {
        "tokens": torch.randint(vocab_size, (num_tokens,), generator=generator),
        "advantages": torch.randn(num_tokens, generator=generator),
        "reference_logprobs": likely + 0.5 * torch.randn(num_tokens, generator=generator),
        "actor_logprobs": likely,
        "rollout_logprobs": likely + 0.1 * torch.randn(num_tokens, generator=generator),
    }
    if name == "distillation":
        ids = torch.stack([torch.randperm(vocab_size, generator=generator)[:TOP_K] for _ in range(num_tokens)])
        logprobs = torch.log(torch.rand(num_tokens, TOP_K, generator=generator) / TOP_K)
        fields |= {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs, "teacher_logprobs": logprobs[:, 0]}
    if name in ("dpo", "experts_dpo", "reward_model"):
        fields["chosen"] = torch.arange(samples.num_samples) % 2 == 0
    return samples.with_fields(**fields)
