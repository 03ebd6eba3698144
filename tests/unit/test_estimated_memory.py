"""Tests of the estimated bytes of a job."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, PlacementError
from rltrain.models import canonical_tensors, quantizable_tensors, read_architecture
from rltrain.models.architecture import Unlisted
from rltrain.models.flops import forward_flops
from rltrain.models.of_roles import reference_uses_actor_modules
from rltrain.models.table import CanonicalTensors
from rltrain.planning.activation_memory import Activations
from rltrain.planning.hardware import GB, GPUS, gpu_named
from rltrain.planning.memory import (
    LOGPROB_CHUNK_ELEMENTS,
    cache_on_gpu,
    host_bytes,
    kv_bytes,
    largest,
    memory_checkpoint_bytes,
    rank_memories,
    resident_bytes,
    working_bytes,
)
from rltrain.planning.optimizer_memory import STAGING_BYTES, orthogonalizing_s
from rltrain.planning.options import STEP_OF_TOKENS, best_changes, sizes_of_micro_batches, with_keys
from rltrain.planning.planned import PlannedJob, Workload, plan_job, served_bytes
from rltrain.planning.task_time import TrainingTime
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.rollout.embedded.engine import budget_within
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.workspace import workspace
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import resolve_placement, role_grids
from rltrain.tasks.roles import DECLARED
from rltrain.training.packing import pack
from rltrain.training.prefix_tree import SortedSamples
from tests.support.live_bytes import LiveBytes
from tests.support.model_shards import tiny_architecture
from tests.support.packed_experience import plain_experience
from tests.support.rollout_models import load_engine, write_checkpoint
from tests.support.schedule_configs import make_config, place
from tools.benchmarks.model_shapes import deepseek_v3, qwen3_8b, qwen3_30b_a3b

H100 = GPUS["h100"]
PARAMETERS_8B = 8.19e9
"""Parameters of Qwen3-8B, from its model card."""
APART = {"actor": "0-7", "rollout, reward": "8-15"}


def anything(job):
    return True


def job_of(architecture, placement, world_size, *, ranks_per_node=8, **sections):
    values = {
        "steps": 10,
        "placement": placement,
        "model": {"path": "m"},
        "data": {"train": {"path": "t"}},
        "loss": {"old_logprobs": "rollout"},
    }
    config = Config.model_validate(values | sections)
    placed = resolve_placement(config.placement, world_size, ranks_per_node)
    architectures = {
        role: architecture.value_model() if DECLARED[role].head == "value" else architecture
        for role in ("actor", *placed.roles)
    }
    return plan_job(config, placed, architectures, ranks_per_node)


def apart(architecture=None, **sections):
    """Returns a job of Qwen3-8B or another model. It trains on one node and generates on a second one."""
    return job_of(architecture or qwen3_8b(), APART, 16, **sections)


def activations(job):
    """Returns the bytes of activations of the first ranks."""
    return rank_memories(job, H100)[0].peak.bytes_of["activations"]


def test_a_trained_model_holds_what_mixed_precision_takes():
    alone = resident_bytes(job_of(qwen3_8b(), {"actor": 0, "rollout, reward": 1}, 2), "actor", 0)
    assert alone["weights"] == pytest.approx(2 * PARAMETERS_8B, rel=0.01)
    assert alone["gradients"] == pytest.approx(4 * PARAMETERS_8B, rel=0.01)
    assert alone["optimizer"] == pytest.approx(8 * PARAMETERS_8B, rel=0.01)
    assert alone["master_weights"] == pytest.approx(4 * PARAMETERS_8B, rel=0.01)
    shared = resident_bytes(apart(), "actor", 0)
    assert shared["gradients"] == pytest.approx(alone["gradients"], rel=0.001)
    assert shared["optimizer"] == pytest.approx(alone["optimizer"] / 8, rel=0.001)
    halved = resident_bytes(apart(actor={"parallel": {"tp": 2}}), "actor", 0)
    assert halved["weights"] == pytest.approx(shared["weights"] / 2, rel=0.001)


def test_experts_are_shared_out_apart_from_the_rest():
    placement = {"actor": "0-63", "rollout, reward": "64-71"}
    job = job_of(qwen3_30b_a3b(), placement, 72, actor={"parallel": {"ep": 8}})
    held = resident_bytes(job, "actor", 0)["weights"]
    dense, experts = 1.54e9, 29.0e9
    assert held == pytest.approx(2 * (dense + experts / 8), rel=0.02)


def test_keys_and_values_are_those_that_a_rank_holds():
    per_token = kv_bytes(qwen3_8b(), 1)
    assert per_token == 36 * 2 * 8 * 128 * 2
    assert kv_bytes(qwen3_8b(), 10, tp=4) == 10 * per_token / 4
    assert kv_bytes(qwen3_8b(), 1, tp=16) == per_token / 8, "a rank holds at least one head"
    assert kv_bytes(deepseek_v3(), 1, tp=8) == 61 * (512 + 64) * 2, "the latent is whole on every rank"


def test_experts_that_are_dealt_out_take_what_experts_that_are_cut_do():
    cut, dealt = (served_bytes(qwen3_30b_a3b(), 16, "bfloat16", False, ep) for ep in (1, 16))
    assert cut == dealt
    assert served_bytes(deepseek_v3(), 64, "bfloat16", False, 64) < 2 * 671e9 / 64 * 1.2


def test_prompts_are_read_so_many_tokens_at_a_time():
    data, rollout = {"train": {"path": "t"}, "max_prompt_tokens": 2048}, {"max_running_requests": 64}
    few, many = (
        apart(qwen3_30b_a3b(), batch={"prompts_per_step": number}, data=data, rollout=rollout) for number in (64, 640)
    )
    read, more = (
        next(memory for memory in rank_memories(job, H100) if "rollout" in memory.kind.roles) for job in (few, many)
    )
    assert read.peak.bytes_of["activations"] == more.peak.bytes_of["activations"]


def test_engines_in_fp8_hold_about_half():
    plain, in_fp8 = (
        resident_bytes(apart(rollout={"dtype": dtype}), "rollout", 0)["weights"] for dtype in ("auto", "fp8")
    )
    embeddings = 2 * 2 * 151936 * 4096
    assert in_fp8 == pytest.approx(embeddings + (plain - embeddings) / 2, rel=0.001)


def test_more_micro_batches_are_under_way_in_a_pipelines_first_stages():
    job = job_of(qwen3_8b(), {"actor": "0-3", "rollout, reward": "4-7"}, 8, actor={"parallel": {"pp": 4}})
    stages = [memory for memory in rank_memories(job, H100) if "actor" in memory.kind.roles]
    kept = [stage.peak.bytes_of["activations"] for stage in stages]
    assert kept == sorted(kept, reverse=True) and kept[0] > 3 * kept[-1]
    assert [stage.ranks for stage in stages] == [(0,), (1,), (2,), (3,)]
    assert "logits" in stages[-1].peak.bytes_of and "logits" not in stages[0].peak.bytes_of


def test_recomputation_keeps_less():
    def kept(recompute):
        return activations(apart(model={"path": "m", "recompute": recompute}))

    none, selective, full = (kept(recompute) for recompute in ("none", "selective", "full"))
    assert full < selective / 5 < none / 5
    assert kept({"granularity": "full", "layers": 99}) == full and kept({"granularity": "selective"}) == selective
    half = kept({"granularity": "full", "layers": 18})
    assert half == pytest.approx((none + full) / 2, abs=(none - half) / 18 + full / 100)
    some = kept({"granularity": "selective", "modules": ["core_attn", "layernorm", "mlp"]})
    assert full < some < selective - none / 3


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_cheap_outputs_are_made_again_in_little_time(backend):
    def job(recompute):
        model = {"path": "m", "transformer_impl": "local", "recompute": recompute}
        return apart(model=model, actor={"backend": backend, "micro_batch_tokens": 8192})

    none, selective, full = map(job, ("none", "selective", "full"))
    kept = [Activations(one, "actor", 0).training(8192) for one in (none, selective, full)]
    assert kept[2] < kept[1] < (0.66 if backend == "megatron" else 0.74) * kept[0]
    workload = Workload(512, 512, 1024)
    seconds = [TrainingTime(one, "actor", H100, workload).accumulating(1) for one in (none, selective, full)]
    assert seconds[0] < seconds[1] < 1.05 * seconds[0] < seconds[2]


def test_layers_that_are_recomputed_are_counted_by_chunk():
    """The stage has 18 layers in three chunks. The first layers of each chunk are recomputed."""

    def kept(recompute):
        return activations(apart(model={"path": "m", "recompute": recompute}, actor={"parallel": {"pp": 2, "vpp": 3}}))

    none, full = kept("none"), kept("full")
    by_layers = [kept({"granularity": "full", "layers": layers}) for layers in range(1, 7)]
    assert by_layers[-1] == full
    saved = [fewer - more for fewer, more in itertools.pairwise(by_layers)]
    assert saved == pytest.approx([saved[0]] * 5, rel=1e-6) and saved[0] > 0
    one_layer = by_layers[0] - (none - saved[0])
    assert 0 < one_layer < none / 18, "the activations of one recomputed layer"


def test_a_residual_stream_and_logits_in_fp32_cost_their_bytes():
    wide = {"residual_dtype": "float32", "head_dtype": "float32"}
    tied = replace(qwen3_8b(), tied_embeddings=True)
    jobs = [apart(tied, model={"path": "m", **types}) for types in ({}, wide)]
    plain, more = (rank_memories(job, H100)[0].peak.bytes_of for job in jobs)
    hidden = jobs[0].micro_batch_tokens("actor") * qwen3_8b().hidden_size
    assert more["activations"] - plain["activations"] == 2 * hidden * (2 * qwen3_8b().num_layers + 1)
    assert more["logits"] - plain["logits"] == 2 * 2 * LOGPROB_CHUNK_ELEMENTS


def test_what_stands_in_for_the_gradient_of_a_vocabulary_follows_the_logits():
    untied, tied = (
        rank_memories(apart(replace(qwen3_8b(), tied_embeddings=is_tied)), H100)[0].peak.bytes_of["logits"]
        for is_tied in (False, True)
    )
    assert untied - tied == 2 * 151936 * 4096 - 2 * 2 * LOGPROB_CHUNK_ELEMENTS


def test_context_parallelism_shares_out_the_longest_sequence():
    lengths = {"data": {"train": {"path": "t"}, "max_prompt_tokens": 2048}, "model": {"path": "m", "recompute": "full"}}
    lengths["rollout"] = {"sampling": {"max_response_tokens": 30720}, "max_context_tokens": 32768}

    def working(**parallel):
        return rank_memories(apart(actor={"parallel": parallel}, **lengths), H100)[0].peak.bytes_of

    whole, shared = working(cp=1), working(cp=4)
    left = pytest.approx(whole["activations"] / 2, rel=0.01)
    assert shared["activations"] == left, "16384 tokens are left for a rank"
    assert shared["actor.optimizer"] == whole["actor.optimizer"], "optimizer states are shared out over all"


def test_a_prompt_that_samples_share_has_activations_once():
    def job(how, micro_batch_tokens=100_000, **sections):
        batch = {"prompts_per_step": 16, "samples_per_prompt": 4}
        rollout = {"sampling": {"max_response_tokens": 512}}
        data = {"train": {"path": "t"}, "max_prompt_tokens": 1024}
        actor = {"backend": "fsdp", "micro_batch_tokens": micro_batch_tokens, "share_prefixes": how}
        return apart(batch=batch, rollout=rollout, data=data, actor=actor, **sections)

    longest = plain_experience([1536] * 8, (torch.arange(1024 + 512).repeat(8)))  # two prompts on each replica
    own = torch.arange(8).repeat_interleave(1536) * (torch.arange(1536) >= 1024).repeat(8)
    of_prompt = torch.tensor([0, 1]).repeat_interleave(4 * 1536)
    samples = longest.with_fields(tokens=longest.tokens + 10_000 * own + 1_000_000 * of_prompt)
    (batch,) = pack(samples, 100_000, device=torch.device("cpu"), prefixes=SortedSamples.of(samples))
    assert job("auto").micro_batch_tokens("actor") == batch.num_computed_tokens
    assert job(False).micro_batch_tokens("actor") == batch.num_tokens
    alone, shared = (working_bytes(job(how), "update", {"actor": 0}) for how in (False, "auto"))
    computed = batch.num_computed_tokens / batch.num_tokens
    assert shared["activations"] / alone["activations"] == pytest.approx(computed, rel=0.01)
    assert shared["logits"] < alone["logits"]
    of_further_token = shared["fields"] / (batch.num_tokens - batch.num_computed_tokens)
    assert alone["fields"] == 0 and 40 < of_further_token < 200
    full, also_full = (working_bytes(job(how, 2048), "update", {"actor": 0}) for how in (False, "auto"))
    assert full["activations"] == also_full["activations"], "micro_batch_tokens counts computed tokens"


def test_states_of_shared_tokens_are_computed_for_each_sample():
    """A gated delta net has a state for each sample, so between its projections nothing is shared."""

    def between(how):
        actor = {"backend": "fsdp", "share_prefixes": how, "micro_batch_tokens": 8192}
        job = apart(tiny_architecture("qwen3_next"), actor=actor, model={"path": "m", "recompute": "full"})
        return Activations(job, "actor", 0).evaluating(8192)

    assert between(True) > between(False)


def test_roles_that_take_turns_do_not_add_up():
    together = {"actor, rollout, reward": "0-7"}
    turns = largest(rank_memories(job_of(qwen3_8b(), together, 8), H100))
    beside = job_of(qwen3_8b(), together, 8, actor={"offload": False}, rollout={"offload": False})
    both = largest(rank_memories(beside, H100))
    assert both.peak.total > turns.peak.total + resident_bytes(beside, "rollout", 0)["kv_cache"] / 2
    assert turns.host["offloaded"] >= resident_bytes(beside, "actor", 0)["optimizer"]


def test_changes_are_named_with_the_peak_that_they_make():
    job = apart()
    assert not largest(rank_memories(job, H100)).fits(H100)
    changes = best_changes(job, H100, anything)
    peaks = [change.memory.peak.total for change in changes]
    assert len(changes) == 3 and peaks == sorted(peaks)
    assert peaks[0] < largest(rank_memories(job, H100)).peak.total
    assert best_changes(job, H100, lambda job: False) == []


def test_experts_may_be_dealt_out_to_more_ranks():
    job = job_of(qwen3_30b_a3b(), {"actor": "0-15"}, 16, algorithm="sft")
    changes = {change.text: change.memory.peak.total for change in best_changes(job, H100, anything)}
    dealt_out = job_of(qwen3_30b_a3b(), {"actor": "0-15"}, 16, algorithm="sft", actor={"parallel": {"ep": 8}})
    assert changes["actor.parallel.ep: 8"] == largest(rank_memories(dealt_out, H100)).peak.total
    gradients = [resident_bytes(of, "actor", 0)["gradients"] for of in (dealt_out, job)]
    assert 1 / 8 < gradients[0] / gradients[1] < 1.5 / 8


def test_balance_losses_and_whole_routers_count_among_activations():
    def of_layer(**moe):
        model = {"path": "m", "moe": moe}
        job = job_of(qwen3_30b_a3b(), {"actor": "0-15"}, 16, algorithm="sft", model=model)
        return Activations(job, "actor", 0).layer(sparse=True)

    plain = of_layer()
    assert of_layer(aux_loss_coef=1e-3) - plain == 2 * 128 * 4
    assert of_layer(z_loss_coef=1e-3) - plain == 128 * 4


def test_a_devices_figures_may_come_from_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(H100.model_copy(update={"memory_gb": 40.0}).model_dump_json())
    assert gpu_named(str(path)).usable_bytes == 40 * GB * 0.95
    path.write_text("{memory_gb: big}")
    with pytest.raises(ConfigError, match="memory_gb.*expected one of a100"):
        gpu_named(str(path))
    with pytest.raises(ConfigError, match="--gpu: h1000"):
        gpu_named("h1000")


def test_ranks_that_are_alike_are_told_of_once():
    job = job_of(replace(qwen3_8b(), num_layers=4), {"actor": "0-2047", "rollout, reward": "2048-4095"}, 4096)
    assert [len(memory.ranks) for memory in rank_memories(job, H100)] == [2048, 2048]


def test_engines_take_no_more_than_they_are_left():
    rollout = {"max_running_requests": 1024, "max_context_tokens": 8192, "sampling": {"max_response_tokens": 7000}}
    batch = {"prompts_per_step": 4096, "samples_per_prompt": 8}
    peaks = {}
    for engine in ("embedded", "sglang"):
        job = apart(rollout={**rollout, "engine": engine}, batch=batch)
        peaks[engine] = rank_memories(job, H100)[-1]
    assert peaks["embedded"].fits(H100) and peaks["sglang"].fits(H100)
    assert sum(peaks["sglang"].parts.values()) == pytest.approx(0.85 * 84.9 * GB, rel=0.001)


def beside_a_judge(served):
    """Returns the memory of a rank shared by the engines of the rollout and of a judge."""
    placement = {"actor": "0-7", "rollout, reward, judge": "8-15"}
    return rank_memories(job_of(qwen3_8b(), placement, 16, rollout=served, judge=served), H100)[-1]


def test_servers_of_a_node_keep_one_copy_of_their_weights_on_the_host():
    """Covers eight, four and two engines of the rollout and as many of a judge."""
    kept = {}
    for tp in (1, 2, 4):
        one = beside_a_judge({"engine": "sglang", "parallel": {"tp": tp}, "offload": False})
        assert one.parts["rollout", "weights"] == pytest.approx(16.4 * GB / tp, rel=0.02)
        kept[tp] = 8 * one.host["engine"] / (16.4 * GB)
    assert kept == pytest.approx({1: 2.0, 2: 2.0, 4: 2.0}, rel=0.02)


@pytest.mark.parametrize(("engine", "kept"), [("embedded", "offloaded"), ("sglang", "engine")])
def test_a_judge_that_leaves_is_on_the_host_once(engine, kept):
    """For a server, only the weights of `keep_weights` count."""
    one = beside_a_judge({"engine": engine, "parallel": {"tp": 8}})
    judges = 1 if engine == "embedded" else 2
    assert one.host == {kept: judges * one.parts["judge", "weights"]}


@pytest.mark.parametrize(("ranks", "copies"), [("0-3", 1), ("0-7", 2)])
def test_checkpoints_in_memory_are_four_and_over_several_nodes_as_many_copies(ranks, copies):
    """A node has four ranks. Each of two nodes has the files of both."""
    job = job_of(qwen3_8b(), {"actor, rollout, reward": ranks}, 8, checkpoint={"memory": {"interval": 1}})
    job = replace(job, ranks_per_node=4)
    one = rank_memories(job, H100)[0]
    assert one.host["checkpoints in memory, not pinned"] == 4 * copies * one.host["checkpoint"] > 0
    assert memory_checkpoint_bytes(job, 0) == 4 * copies * one.host["checkpoint"]
    assert memory_checkpoint_bytes(job, 1) == (4 * copies * one.host["checkpoint"] if copies == 2 else 0)


def test_weights_in_fp8_are_foretold_with_their_scales() -> None:
    architecture = tiny_architecture(hidden_size=256, ffn_hidden_size=512, vocab_size=128)
    tensors, in_fp8 = canonical_tensors(architecture), quantizable_tensors(architecture)
    elements = [math.prod(shape) for shape in tensors.shapes]
    scales = [math.prod(-(-size // 128) for size in shape) for shape in tensors.shapes]
    expected = sum(
        size + 4 * blocks if quantised else 2 * size
        for size, blocks, quantised in zip(elements, scales, in_fp8, strict=True)
    )
    assert served_bytes(architecture, 1, "bfloat16", fp8=True) == expected
    assert served_bytes(architecture, 1, "bfloat16", fp8=False) == 2 * sum(elements)


@pytest.mark.parametrize(("keep_on", "change"), [("device", (1, 0)), ("host", (0, 1))])
def test_what_was_sent_last_is_kept_by_ranks_that_send(keep_on, change):
    placement, delta = {"actor": "0-3", "rollout, reward": "4-7"}, {"weight_sync": {"delta": {"keep_on": keep_on}}}
    jobs = (job_of(qwen3_8b(), placement, 8, **sections) for sections in ({}, delta))
    before, after = (largest(rank_memories(job, H100)) for job in jobs)
    found = after.peak.total - before.peak.total, sum(after.host.values()) - sum(before.host.values())
    # One copy of the model enters the node's engines, from four ranks.
    assert found == tuple(pytest.approx(part * 2 * PARAMETERS_8B / 4, rel=0.01, abs=1) for part in change)


def test_scores_that_no_kernel_has_count_by_the_block():
    placement, model = {"actor": 0, "rollout, reward": 1}, {"path": "m", "transformer_impl": "local"}
    jobs = [
        job_of(replace(qwen3_8b(), **own), placement, 2, model=model)
        for own in ({}, {"attention_sinks": True}, {"attention_softcap": 50.0})
    ]
    plain, *others = (Activations(job, "actor", 0) for job in jobs)
    heads, kv_heads, layers = 32, 8, 36
    padded = 2 * 128 * (heads + 2 * kv_heads + 2 * heads)  # queries, keys, values and outputs, which a product copies
    for found in others:
        assert found.training(8192) - plain.training(8192) == 6 * 4 * 2**25 + 8192 * layers * padded
        assert found.evaluating(8192) - plain.evaluating(8192) == 6 * 4 * 2**25 + 8192 * padded
        assert found.training(100) - plain.training(100) == 6 * 4 * heads * 100**2 + 100 * layers * padded


def eight_b(**optimizer: Any) -> PlannedJob:
    return apart(actor={"optimizer": optimizer})


def held(job: PlannedJob) -> tuple[dict[str, int], int]:
    """Returns the bytes on the device by part, and the bytes of the optimizer on the host."""
    return resident_bytes(job, "actor", 0), host_bytes(job, {"actor": 0}, frozenset()).get("optimizer", 0)


def test_moments_in_bf16_take_half() -> None:
    (plain, _), (small, on_host) = held(eight_b()), held(eight_b(moments_dtype="bfloat16"))
    assert small["optimizer"] == plain["optimizer"] // 2
    assert {k: v for k, v in small.items() if k != "optimizer"} == {k: v for k, v in plain.items() if k != "optimizer"}
    assert on_host == 0


@pytest.mark.parametrize(("given", "share"), [(True, 1.0), (0.25, 0.25)])
def test_what_is_offloaded_is_on_the_host(given: float, share: float) -> None:
    (plain, _), (left, on_host) = held(eight_b()), held(eight_b(cpu_offload=given))
    moved = sum(plain[part] - left[part] for part in ("master_weights", "optimizer"))
    assert moved == pytest.approx(share * (plain["master_weights"] + plain["optimizer"]))
    assert on_host == pytest.approx(moved + STAGING_BYTES)
    assert left["weights"] == plain["weights"] and left["gradients"] == plain["gradients"]


def test_muon_keeps_one_momentum_of_every_matrix() -> None:
    (plain, _), (muon, _) = held(eight_b()), held(eight_b(name="muon"))
    vocabulary = 2 * 151936 * 4096
    matrices = 8.19e9 - vocabulary
    assert muon["optimizer"] == pytest.approx((matrices + 2 * vocabulary) * 4 / 8, rel=0.01)
    assert muon["master_weights"] == plain["master_weights"]
    assert working_bytes(eight_b(name="muon"), "update", {"actor": 0})["orthogonalizing"] > 0
    assert "orthogonalizing" not in working_bytes(eight_b(), "update", {"actor": 0})


def test_matrices_are_made_orthogonal_once_for_all_ranks() -> None:
    cut = apart(actor={"optimizer": {"name": "muon"}, "parallel": {"tp": 4}})
    whole = orthogonalizing_s(eight_b(name="muon"), "actor", 0, H100)
    assert orthogonalizing_s(cut, "actor", 0, H100) == pytest.approx(whole, rel=1e-3) and whole > 0
    experts = (apart(qwen3_30b_a3b(), actor={"optimizer": {"name": "muon"}, "parallel": {"ep": ep}}) for ep in (1, 8))
    alone, spread = (orthogonalizing_s(job, "actor", 0, H100) for job in experts)
    assert alone == pytest.approx(spread, rel=1e-3)


def test_steps_take_longer_on_the_host_and_with_muon() -> None:
    plain, offloaded, muon = (
        TrainingTime(eight_b(**settings), "actor", H100, Workload(500, 1000, 2000)).optimizer_steps()
        for settings in ({}, {"cpu_offload": True}, {"name": "muon"})
    )
    assert offloaded > 3 * plain and muon > plain


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_on_the_host_leave_some_layers_of_them(recompute: str) -> None:
    def of(**model: Any) -> tuple[int, int]:
        job = apart(model={"path": "m", "recompute": recompute, **model})
        on_device = working_bytes(job, "update", {"actor": 0})["activations"]
        return on_device, host_bytes(job, {"actor": 0}, frozenset()).get("activations", 0)

    (plain, nothing), (left, moved) = of(), of(activation_offload=True)
    assert nothing == 0
    assert left < plain / 2 and moved > plain - left


NUM_RUNNING, PROMPT_TOKENS = 32, 128
LONG = {"max_running_requests": 1024, "max_context_tokens": 16384, "sampling": {"max_response_tokens": 8192}}


@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_moe", "deepseek_v3"])
def test_no_more_is_live_in_an_engine_than_its_workspace(tmp_path: Path, family: str) -> None:
    """The prompts fill half a pass, then all samples generate. Most of the workspace is in use."""
    checkpoint = write_checkpoint(tmp_path, family)
    engine, _ = load_engine(checkpoint, max_running_requests=NUM_RUNNING)
    samples = [
        Sample(number, tuple(1 + (number + place) % 40 for place in range(PROMPT_TOKENS)), seed=number)
        for number in range(NUM_RUNNING)
    ]
    sampling = SamplingParams(1.0, 1.0, 0, 2, ())
    engine.generate(samples, sampling)  # allocates its cache
    with LiveBytes() as live:
        engine.generate([Sample(9 + one.id, one.prompt, seed=7) for one in samples], sampling)
    sizes = {"num_running": NUM_RUNNING, "prefill_tokens": NUM_RUNNING * PROMPT_TOKENS, "item_bytes": 4}
    needed = workspace(read_architecture(checkpoint), Grid((0,)), **sizes)
    assert 0.75 * needed.generating < live.most < needed.generating


@pytest.mark.parametrize("role", ["rollout", "evaluation"])
def test_engine_and_estimate_leave_the_same_to_it(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    free, total = 50 * GB, H100.memory_gb * GB
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), int(total)))
    placement = {"actor": 0, "rollout, reward": 1, "evaluation": 2}
    evaluated = {"data": {"train": {"path": "t"}, "eval": {"path": "e"}}}
    job = job_of(qwen3_8b(), placement, 3, rollout=LONG, **evaluated)
    site = SimpleNamespace(
        config=job.config,
        **{"architecture": qwen3_8b(), "grid": job.grids[role], "others": (), "leaves": False},
        world=SimpleNamespace(device=torch.device("cuda")),
    )
    budget = budget_within(site, "auto", role)  # type: ignore[arg-type]
    assert budget.num_bytes() == cache_on_gpu(job, role, H100, int(total - free))
    assert budget.num_bytes() < 0.95 * free - working_bytes(job, "generate", {"rollout": 0})["activations"]


@pytest.mark.parametrize(("model", "tp"), [(qwen3_8b, 1), (qwen3_30b_a3b, 2), (deepseek_v3, 32)])
def test_whatever_engines_take_by_themselves_fits(model: Any, tp: int) -> None:
    """With more responses than fit, the device is nearly full, but never over its limit."""
    placement = {"actor": f"0-{2 * tp - 1}", "rollout, reward": f"{2 * tp}-{3 * tp - 1}"}
    rollout = {**LONG, "parallel": {"tp": tp, "ep": tp if model is deepseek_v3 else 1}}
    batch = {"prompts_per_step": 4096, "samples_per_prompt": 8}
    job = job_of(model(), placement, 3 * tp, rollout=rollout, batch=batch)
    engine = largest([memory for memory in rank_memories(job, H100) if "rollout" in memory.kind.roles])
    assert engine.fits(H100)
    assert engine.peak.total > 0.9 * H100.usable_bytes


FSDP: dict[str, Any] = {"backend": "fsdp"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"actor": {**FSDP, "parallel": {"tp": 2}}}, ["actor.parallel.tp: got 2", "expected 1", "gathers whole"]),
        ({"actor": {**FSDP, "parallel": {"pp": 2}}}, ["actor.parallel.pp: got 2", "all layers"]),
        ({"actor": {**FSDP, "parallel": {"ep": 2}}}, ["actor.parallel.ep: got 2", "sharded like all parameters"]),
        ({"actor": {**FSDP, "parallel": {"etp": 1}}}, ["actor.parallel.etp: got 1", "expected null"]),
        ({"reference": {**FSDP, "parallel": {"tp": 2}}}, ["reference.parallel.tp", "for role reference"]),
        ({"reference": FSDP, "actor": {"parallel": {"tp": 2}}}, ["actor.parallel.tp: got 2", "for role reference"]),
        ({"actor": {**FSDP, "distributed_optimizer": False}}, ["actor.distributed_optimizer: got false", "true"]),
        ({"actor": {**FSDP, "overlap": False}}, ["actor.overlap: got false", "expected auto"]),
        ({"actor": {**FSDP, "gradient_bucket_mb": 2}}, ["actor.gradient_bucket_mb", "expected null"]),
        ({"actor": FSDP, "model": {"path": "m", "dtype": "float16"}}, ["model.dtype: got float16", "bfloat16"]),
        (
            {"actor": FSDP, "model": {"path": "m", "recompute": {"granularity": "selective", "modules": ["mlp"]}}},
            ["model.recompute.modules: got mlp", "expected activation and layernorm"],
        ),
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
    with pytest.raises(ConfigError) as refused:
        check_config(make_config(**sections))
    assert all(word in str(refused.value) for word in words), refused.value


def test_what_can_be_is_accepted() -> None:
    model = {"path": "m", "dtype": "float32", "recompute": "full", "head_dtype": "float32"}
    check_config(make_config(actor={**FSDP, "fsdp": {"replicas": 2}, "parallel": {"cp": 2}}, model=model))
    check_config(make_config(actor={"parallel": {"tp": 2}}, reference={**FSDP, "parallel": {}}))
    check_config(make_config(actor=FSDP, model={"path": "m", "dtype": "bfloat16", "head_dtype": "float32"}))


def planned(architecture: Any = None, **sections: Any) -> PlannedJob:
    config = make_config(placement={"actor,reference": "0-2", "rollout,reward": 3}, **sections)
    placement = place(config.placement)
    roles = dict.fromkeys(("actor", "reference", "rollout"), architecture or tiny_architecture("qwen3"))
    return PlannedJob(config, placement, role_grids(config, placement), roles, 4)


def check_planned(job: PlannedJob) -> None:
    check_against_architecture(job.config, job.grids, job.architectures)


LENGTHS = {
    "data": {"train": {"path": "t"}, "max_prompt_tokens": 8},
    "rollout": {"sampling": {"max_response_tokens": 8}},
}


def test_copies_divide_the_ranks() -> None:
    with pytest.raises(PlacementError, match=r"actor has 3 ranks, but .* 2 copies .* multiple of 2"):
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
    sigmoid = replace(architecture, moe=replace(architecture.moe, score="sigmoid"))
    with pytest.raises(ConfigError, match="actor.backend: got fsdp, but the model .* expected megatron"):
        check_planned(planned(sigmoid, actor=FSDP, **LENGTHS))
    check_planned(planned(architecture, actor=FSDP, **LENGTHS))


def test_a_family_that_no_engine_knows_is_refused_for_serving_alone() -> None:
    tensors = CanonicalTensors(("b.wte", "b.h.0.w", "b.h.1.w", "head"), ((7, 4), (4, 6), (4, 6), (7, 4)))
    unlisted = replace(tiny_architecture(), family="olmo2", unlisted=Unlisted(tensors, "b", ""))
    with pytest.raises(ConfigError, match="of family olmo2, which no engine of rltrain serves"):
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
    """The first rank has the largest shard. Layers are whole for a while."""
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


# Micro-batches as large as the memory allows.


def auto_job(world_size=8, **sections):
    config = {
        "actor": {"micro_batch_tokens": "auto", "parallel": {"tp": 2}},
        "reference": {"micro_batch_tokens": "auto"},
    }
    placement = {"actor, reference, rollout, reward": "all"}
    return job_of(qwen3_8b(), placement, world_size, loss={"kl": {"coef": 0.1}}, **{**config, **sections})


def peak_with(job, sizes, task):
    sized = plan_job(with_keys(job.config, sizes), job.placement, job.architectures, job.ranks_per_node)
    return max(found.total for memory in rank_memories(sized, H100) for found in memory.tasks if found.task == task)


def test_automatic_micro_batches_fill_the_memory_but_for_some_room():
    job = auto_job(batch={"prompts_per_step": 512, "samples_per_prompt": 16})
    sizes = sizes_of_micro_batches(job, H100)
    assert sizes.keys() == {"actor.micro_batch_tokens", "reference.micro_batch_tokens"}
    tasks = {"actor.micro_batch_tokens": "update", "reference.micro_batch_tokens": "reference_logprobs"}
    for key, task in tasks.items():
        assert peak_with(job, sizes, task) <= 0.9 * H100.usable_bytes
        assert peak_with(job, sizes | {key: sizes[key] + STEP_OF_TOKENS}, task) > 0.9 * H100.usable_bytes


def test_automatic_micro_batches_are_no_larger_than_all_samples_of_a_replica():
    sizes = sizes_of_micro_batches(auto_job(batch={"prompts_per_step": 4, "samples_per_prompt": 2}), H100)
    longest = auto_job().longest_tokens
    assert set(sizes.values()) == {math.ceil(2 * longest / STEP_OF_TOKENS) * STEP_OF_TOKENS}


def test_automatic_micro_batches_are_smallest_where_nothing_fits():
    tight = H100.model_copy(update={"memory_gb": 10.0})
    assert set(sizes_of_micro_batches(auto_job(), tight).values()) == {STEP_OF_TOKENS}


def test_only_roles_with_auto_get_another_size():
    job = auto_job(actor={"micro_batch_tokens": 4096, "parallel": {"tp": 2}})
    assert sizes_of_micro_batches(job, H100).keys() == {"reference.micro_batch_tokens"}
    assert job.micro_batch_limit("actor") == 4096
    assert job.micro_batch_limit("reference") == 16384, "the default until the job has chosen"
