"""Bytes of roles by formula, where the parts come and go, and what is said where they are too many."""

import itertools
import math
from dataclasses import replace

import pytest

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.models import canonical_tensors, quantizable_tensors
from rltrain.planning.activation_memory import Activations
from rltrain.planning.hardware import GB, GPUS, gpu_named
from rltrain.planning.memory import kv_bytes, largest, memory_checkpoint_bytes, rank_memories, resident_bytes
from rltrain.planning.planned import plan_job, served_bytes
from rltrain.planning.search import best_changes
from rltrain.runtime.placement import resolve_placement
from rltrain.tasks.roles import DECLARED
from tests.model_shards import tiny_architecture
from tools.benchmarks.model_shapes import deepseek_v3, qwen3_8b, qwen3_30b_a3b

H100 = GPUS["h100"]
PARAMETERS_8B = 8.19e9
"""Of Qwen3-8B, as its model card says."""


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


def test_a_trained_model_holds_what_mixed_precision_takes():
    apart = {"actor": "0-7", "rollout, reward": "8-15"}
    alone = resident_bytes(job_of(qwen3_8b(), {"actor": 0, "rollout, reward": 1}, 2), "actor", 0)
    assert alone["weights"] == pytest.approx(2 * PARAMETERS_8B, rel=0.01)
    assert alone["gradients"] == pytest.approx(4 * PARAMETERS_8B, rel=0.01)
    assert alone["optimizer"] == pytest.approx(8 * PARAMETERS_8B, rel=0.01)
    assert alone["master_weights"] == pytest.approx(4 * PARAMETERS_8B, rel=0.01)
    shared = resident_bytes(job_of(qwen3_8b(), apart, 16), "actor", 0)
    assert shared["gradients"] == pytest.approx(alone["gradients"], rel=0.001)
    assert shared["optimizer"] == pytest.approx(alone["optimizer"] / 8, rel=0.001)
    halved = resident_bytes(job_of(qwen3_8b(), apart, 16, actor={"parallel": {"tp": 2}}), "actor", 0)
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
    apart = {"actor": "0-7", "rollout, reward": "8-15"}
    few, many = (
        job_of(
            qwen3_30b_a3b(),
            apart,
            16,
            batch={"prompts_per_step": number},
            data={"train": {"path": "t"}, "max_prompt_tokens": 2048},
            rollout={"max_running_requests": 64},
        )
        for number in (64, 640)
    )
    read, more = (
        next(memory for memory in rank_memories(job, H100) if "rollout" in memory.kind.roles) for job in (few, many)
    )
    assert read.peak.bytes_of["activations"] == more.peak.bytes_of["activations"]


def test_engines_in_fp8_hold_about_half():
    apart = {"actor": "0-7", "rollout, reward": "8-15"}
    plain, in_fp8 = (
        resident_bytes(job_of(qwen3_8b(), apart, 16, rollout={"dtype": dtype}), "rollout", 0)["weights"]
        for dtype in ("auto", "fp8")
    )
    embeddings = 2 * 2 * 151936 * 4096
    assert in_fp8 == pytest.approx(embeddings + (plain - embeddings) / 2, rel=0.001)


def test_more_micro_batches_are_under_way_in_a_pipelines_first_stages():
    job = job_of(qwen3_8b(), {"actor": "0-3", "rollout, reward": "4-7"}, 8, actor={"parallel": {"pp": 4}})
    stages = [memory for memory in rank_memories(job, H100) if "actor" in memory.kind.roles]
    activations = [stage.peak.bytes_of["activations"] for stage in stages]
    assert activations == sorted(activations, reverse=True) and activations[0] > 3 * activations[-1]
    assert [stage.ranks for stage in stages] == [(0,), (1,), (2,), (3,)]
    assert "logits" in stages[-1].peak.bytes_of and "logits" not in stages[0].peak.bytes_of


def test_recomputation_keeps_less():
    placement = {"actor": "0-7", "rollout, reward": "8-15"}
    kept = {
        recompute: rank_memories(job_of(qwen3_8b(), placement, 16, model={"path": "m", "recompute": recompute}), H100)[
            0
        ].peak.bytes_of["activations"]
        for recompute in ("none", "selective", "full")
    }
    assert kept["full"] < kept["selective"] / 5 < kept["none"] / 5
    some = {
        name: rank_memories(job_of(qwen3_8b(), placement, 16, model={"path": "m", "recompute": recompute}), H100)[
            0
        ].peak.bytes_of["activations"]
        for name, recompute in {
            "all": {"granularity": "full", "layers": 99},
            "half": {"granularity": "full", "layers": 18},
            "core": {"granularity": "selective"},
            "more": {"granularity": "selective", "modules": ["core_attn", "layernorm", "mlp"]},
        }.items()
    }
    assert (some["all"], some["core"]) == (kept["full"], kept["selective"])
    layer = (kept["none"] - some["half"]) / 18 + kept["full"] / 100
    assert some["half"] == pytest.approx((kept["none"] + kept["full"]) / 2, abs=layer)
    assert kept["full"] < some["more"] < kept["selective"] - kept["none"] / 3


def test_layers_that_are_recomputed_are_counted_by_chunk():
    """A stage's 18 layers, of which the first of each of three chunks are."""
    parallel = {"pp": 2, "vpp": 3}

    def activations(recompute):
        placement, model = {"actor": "0-7", "rollout, reward": "8-15"}, {"path": "m", "recompute": recompute}
        job = job_of(qwen3_8b(), placement, 16, model=model, actor={"parallel": parallel})
        return rank_memories(job, H100)[0].peak.bytes_of["activations"]

    none, full = activations("none"), activations("full")
    by_layers = [activations({"granularity": "full", "layers": layers}) for layers in range(1, 7)]
    assert by_layers[-1] == full
    saved = [fewer - more for fewer, more in itertools.pairwise(by_layers)]
    assert saved == pytest.approx([saved[0]] * 5, rel=1e-6) and saved[0] > 0
    one_layer = by_layers[0] - (none - saved[0])
    assert 0 < one_layer < none / 18, "which has all that it computes anew"


def test_a_residual_stream_and_logits_in_fp32_cost_their_bytes():
    placement, wide = (
        {"actor": "0-7", "rollout, reward": "8-15"},
        {"residual_dtype": "float32", "head_dtype": "float32"},
    )
    jobs = [job_of(qwen3_8b(), placement, 16, model={"path": "m", **types}) for types in ({}, wide)]
    plain, more = (rank_memories(job, H100)[0].peak.bytes_of for job in jobs)
    hidden = jobs[0].micro_batch_tokens("actor") * qwen3_8b().hidden_size
    assert more["activations"] - plain["activations"] == 2 * hidden * (2 * qwen3_8b().num_layers + 1)
    assert more["logits"] - plain["logits"] == 2 * 2 * jobs[0].micro_batch_tokens("actor") * qwen3_8b().vocab_size


def test_context_parallelism_shares_out_the_longest_sequence():
    lengths = {"data": {"train": {"path": "t"}, "max_prompt_tokens": 2048}, "model": {"path": "m", "recompute": "full"}}
    lengths["rollout"] = {"sampling": {"max_response_tokens": 30720}, "max_context_tokens": 32768}

    def working(**parallel):
        job = job_of(
            qwen3_8b(), {"actor": "0-7", "rollout, reward": "8-15"}, 16, actor={"parallel": parallel}, **lengths
        )
        return rank_memories(job, H100)[0].peak.bytes_of

    whole, shared = working(cp=1), working(cp=4)
    assert shared["activations"] == pytest.approx(whole["activations"] / 2, rel=0.01), (
        "16384 tokens are left for a rank"
    )
    assert shared["actor.optimizer"] == whole["actor.optimizer"], "optimizer states are shared out over all"


def test_roles_that_take_turns_do_not_add_up():
    together = {"actor, rollout, reward": "0-7"}
    turns = largest(rank_memories(job_of(qwen3_8b(), together, 8), H100))
    beside = job_of(qwen3_8b(), together, 8, actor={"offload": False}, rollout={"offload": False})
    both = largest(rank_memories(beside, H100))
    assert both.peak.total > turns.peak.total + resident_bytes(beside, "rollout", 0)["kv_cache"] / 2
    assert turns.host["offloaded"] >= resident_bytes(beside, "actor", 0)["optimizer"]


def test_changes_are_named_with_the_peak_that_they_make():
    job = job_of(qwen3_8b(), {"actor": "0-7", "rollout, reward": "8-15"}, 16)
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
    def activations(**moe):
        model = {"path": "m", "moe": moe}
        job = job_of(qwen3_30b_a3b(), {"actor": "0-15"}, 16, algorithm="sft", model=model)
        return Activations(job, "actor", 0).layer(sparse=True)

    plain = activations()
    assert activations(aux_loss_coef=1e-3) - plain == 2 * 128 * 4
    assert activations(z_loss_coef=1e-3) - plain == 128 * 4


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
    apart = {"actor": "0-7", "rollout, reward": "8-15"}
    rollout = {"max_running_requests": 1024, "max_context_tokens": 8192, "sampling": {"max_response_tokens": 7000}}
    batch = {"prompts_per_step": 4096, "samples_per_prompt": 8}
    peaks = {}
    for engine in ("embedded", "sglang"):
        job = job_of(qwen3_8b(), apart, 16, rollout={**rollout, "engine": engine}, batch=batch)
        peaks[engine] = rank_memories(job, H100)[-1]
    assert peaks["embedded"].fits(H100) and peaks["sglang"].fits(H100)
    assert sum(peaks["sglang"].parts.values()) == pytest.approx(0.85 * 84.9 * GB, rel=0.001)


def test_servers_of_a_node_keep_one_copy_of_their_weights_on_the_host():
    """Of eight, four or two engines; a judge's beside the rollout's."""
    kept = {}
    for tp in (1, 2, 4):
        served = {"engine": "sglang", "parallel": {"tp": tp}, "offload": False}
        job = job_of(qwen3_8b(), {"actor": "0-7", "rollout, reward, judge": "8-15"}, 16, rollout=served, judge=served)
        one = rank_memories(job, H100)[-1]
        assert one.parts["rollout", "weights"] == pytest.approx(16.4 * GB / tp, rel=0.02)
        kept[tp] = 8 * one.host["engine"] / (16.4 * GB)
    assert kept == pytest.approx({1: 2.0, 2: 2.0, 4: 2.0}, rel=0.02)


@pytest.mark.parametrize(("engine", "kept"), [("embedded", "offloaded"), ("sglang", "engine")])
def test_a_judge_that_leaves_is_on_the_host_once(engine, kept):
    """Of a server what `keep_weights` keeps, and nothing besides."""
    served = {"engine": engine, "parallel": {"tp": 8}}
    job = job_of(qwen3_8b(), {"actor": "0-7", "rollout, reward, judge": "8-15"}, 16, rollout=served, judge=served)
    one = rank_memories(job, H100)[-1]
    judges = 1 if engine == "embedded" else 2
    assert one.host == {kept: judges * one.parts["judge", "weights"]}


@pytest.mark.parametrize(("ranks", "copies"), [("0-3", 1), ("0-7", 2)])
def test_checkpoints_in_memory_are_four_and_over_several_nodes_as_many_copies(ranks, copies):
    """Of a node with four ranks: of two nodes each has the files of both."""
    placement = {"actor, rollout, reward": ranks}
    job = job_of(qwen3_8b(), placement, 8, checkpoint={"memory": {"interval": 1}})
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
    apart = {"actor": "0-3", "rollout, reward": "4-7"}
    delta = {"weight_sync": {"delta": {"keep_on": keep_on}}}
    before, after = (largest(rank_memories(job_of(qwen3_8b(), apart, 8, **sections), H100)) for sections in ({}, delta))
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
    for found in others:
        assert found.training(8192) - plain.training(8192) == 6 * 4 * 2**25
        assert found.evaluating(8192) - plain.evaluating(8192) == 6 * 4 * 2**25
        assert found.training(100) - plain.training(100) == 6 * 4 * 32 * 100**2
