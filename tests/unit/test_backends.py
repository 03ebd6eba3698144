"""What backend fsdp cannot do is refused with the key, the reason and what is expected; and what the dry run says."""

from dataclasses import replace
from typing import Any

import pytest

from rltrain.errors import ConfigError, PlacementError
from rltrain.models import ExpertLayers
from rltrain.models.architecture import Unlisted
from rltrain.models.flops import forward_flops
from rltrain.models.of_roles import reference_uses_actor_modules
from rltrain.models.table import CanonicalTensors
from rltrain.planning.memory import host_bytes, resident_bytes, working_bytes
from rltrain.planning.planned import PlannedJob
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.runtime.placement import role_grids
from tests.model_shards import tiny_architecture
from tests.unit.schedule_configs import make_config, place

FSDP: dict[str, Any] = {"backend": "fsdp"}


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check_config(make_config(**sections))
    return str(refused.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"actor": {**FSDP, "parallel": {"tp": 2}}}, ["actor.parallel.tp: got 2", "expected 1", "gathered whole"]),
        ({"actor": {**FSDP, "parallel": {"pp": 2}}}, ["actor.parallel.pp: got 2", "all layers"]),
        ({"actor": {**FSDP, "parallel": {"ep": 2}}}, ["actor.parallel.ep: got 2", "sharded as all parameters"]),
        ({"actor": {**FSDP, "parallel": {"etp": 1}}}, ["actor.parallel.etp: got 1", "expected null"]),
        ({"reference": {**FSDP, "parallel": {"tp": 2}}}, ["reference.parallel.tp", "for role reference"]),
        ({"reference": FSDP, "actor": {"parallel": {"tp": 2}}}, ["actor.parallel.tp: got 2", "for role reference"]),
        ({"actor": {**FSDP, "distributed_optimizer": False}}, ["actor.distributed_optimizer: got false", "true"]),
        ({"actor": {**FSDP, "overlap": False}}, ["actor.overlap: got false", "expected auto"]),
        ({"actor": {**FSDP, "gradient_bucket_mb": 2}}, ["actor.gradient_bucket_mb", "expected null"]),
        ({"actor": FSDP, "model": {"path": "m", "dtype": "float16"}}, ["model.dtype: got float16", "bfloat16"]),
        ({"actor": FSDP, "model": {"path": "m", "head_dtype": "float32"}}, ["model.head_dtype", "expected null"]),
        ({"actor": FSDP, "model": {"path": "m", "logits_chunk_tokens": 9}}, ["model.logits_chunk_tokens", "at once"]),
        ({"actor": FSDP, "model": {"path": "m", "recompute": "selective"}}, ["model.recompute", "none or full"]),
        ({"actor": FSDP, "model": {"path": "m", "moe": {"z_loss_coef": 0.1}}}, ["model.moe.z_loss_coef: got 0.1"]),
        ({"actor": {**FSDP, "optimizer": {"cpu_offload": 0.5}}}, ["actor.optimizer.cpu_offload: got 0.5", "or false"]),
        (
            {"actor": {**FSDP, "optimizer": {"cpu_offload": True}}, "model": {"path": "m", "lora": {}}},
            ["actor.optimizer.cpu_offload: got true", "model.lora", "expected false"],
        ),
        ({"actor": FSDP, "residency": {"communicators": "release"}}, ["residency.communicators", "expected keep"]),
        ({"actor": {"fsdp": {"replicas": 2}}}, ["actor.fsdp", "actor.backend: fsdp"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_is_refused(sections: dict[str, Any], words: list[str]) -> None:
    message = refusal(**sections)
    assert all(word in message for word in words), message


def test_what_can_be_is_accepted() -> None:
    model = {"path": "m", "dtype": "float32", "recompute": "full", "head_dtype": "float32"}
    check_config(make_config(actor={**FSDP, "fsdp": {"replicas": 2}, "parallel": {"cp": 2}}, model=model))
    check_config(make_config(actor={"parallel": {"tp": 2}}, reference={**FSDP, "parallel": {}}))


def planned(architecture: Any = None, **sections: Any) -> PlannedJob:
    config = make_config(placement={"actor,reference": "0-2", "rollout,reward": 3}, **sections)
    placement = place(config.placement)
    found = architecture or tiny_architecture("qwen3")
    roles = dict.fromkeys(("actor", "reference", "rollout"), found)
    return PlannedJob(config, placement, role_grids(config, placement), roles, 4)


def check_planned(job: PlannedJob) -> None:
    check_against_architecture(job.config, job.grids, job.architectures)


LENGTHS = {
    "data": {"train": {"path": "t"}, "max_prompt_tokens": 8},
    "rollout": {"sampling": {"max_response_tokens": 8}},
}


def test_copies_divide_the_ranks() -> None:
    with pytest.raises(PlacementError, match=r"actor has 3 ranks, which 2 copies .* multiple of 2"):
        planned(actor={**FSDP, "fsdp": {"replicas": 2}})
    grid = planned(actor={**FSDP, "fsdp": {"replicas": 3}}).grids["actor"]
    assert grid.sharded_array.tolist() == [[0], [1], [2]] and grid.dp == 3


def test_heads_are_dealt_out_by_context_parallelism() -> None:
    with pytest.raises(ConfigError, match=r"actor.parallel.cp: got 3 with backend fsdp.*4 attention heads"):
        check_planned(planned(actor={**FSDP, "parallel": {"cp": 3}}, **LENGTHS))


def test_ranks_that_have_whole_heads_know_windows_and_bent_scores() -> None:
    heads: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 3, "max_positions": 64}
    bent = tiny_architecture("gemma2", attention_softcap=50.0, **heads)
    for architecture in (tiny_architecture("gemma3_text", num_layers=4, **heads), bent):
        check_planned(planned(architecture, actor={**FSDP, "parallel": {"cp": 3}}, **LENGTHS))


def test_a_router_with_a_bias_needs_megatron() -> None:
    architecture = tiny_architecture("qwen3_moe")
    assert architecture.moe
    sigmoid = replace(architecture, moe=replace(architecture.moe, score="sigmoid"))
    with pytest.raises(ConfigError, match="actor.backend: got fsdp, but the model .* expected megatron"):
        check_planned(planned(sigmoid, actor=FSDP, **LENGTHS))
    check_planned(planned(architecture, actor=FSDP, **LENGTHS))
    assert isinstance(architecture.moe, ExpertLayers)


def test_a_family_that_no_engine_knows_is_refused_for_serving_alone() -> None:
    tensors = CanonicalTensors(("b.wte", "b.h.0.w", "b.h.1.w", "head"), ((7, 4), (4, 6), (4, 6), (7, 4)))
    unlisted = replace(tiny_architecture(), family="olmo2", unlisted=Unlisted(tensors, "b", ""))
    with pytest.raises(ConfigError, match="of family olmo2, which backend fsdp trains and no engine"):
        check_planned(planned(unlisted, actor=FSDP, **LENGTHS))
    flops = forward_flops(unlisted)
    assert (flops.layers, flops.head) == (2 * 48, 2 * unlisted.hidden_size * unlisted.vocab_size)


def test_a_reference_takes_the_actors_place_only_under_its_backend() -> None:
    for reference, expected in ((FSDP, True), ({"backend": "megatron"}, False)):
        job = planned(actor=FSDP, reference=reference)
        assert reference_uses_actor_modules(job.config, job.grids, job.architectures) == expected
    on_host = planned(actor={**FSDP, "optimizer": {"cpu_offload": True}}, reference=FSDP)
    assert not reference_uses_actor_modules(on_host.config, on_host.grids, on_host.architectures)


def test_the_dry_run_counts_shards() -> None:
    """Of which the first rank has the largest, and layers that are whole for a while."""
    one, shared = (planned(actor={**FSDP, "fsdp": {"replicas": n}}) for n in (3, 1))
    whole, shard = (resident_bytes(job, "actor", 0) for job in (one, shared))
    assert whole["weights"] / 3 <= shard["weights"] < whole["weights"] / 2
    assert shard["optimizer"] == 2 * shard["gradients"] == 2 * shard["weights"] and not shard["master_weights"]
    assert resident_bytes(shared, "reference", 0)["weights"] == shard["weights"] // 2, "bfloat16"
    on_host = planned(actor={**FSDP, "optimizer": {"cpu_offload": True}})
    assert not any(resident_bytes(on_host, "actor", 0).values())
    assert host_bytes(on_host, {"actor": 0}, frozenset())["optimizer"] == sum(shard.values())
    assert working_bytes(on_host, "weight_sync", {"actor": 0})["merged"] == shard["weights"]
    found = [working_bytes(job, "update", {"actor": 0})["gathered weights"] for job in (one, shared)]
    assert found[0] == found[1] > working_bytes(shared, "reference_logprobs", {"reference": 0})["gathered weights"] > 0
