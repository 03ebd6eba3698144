"""Tests of the estimated seconds of a step, and of the text of a dry run about sizes."""

import json
from pathlib import Path

import pytest
import torch

from rltrain.cli.quickstart import Size, qwen3_config
from rltrain.config.loader import load_config
from rltrain.errors import ConfigError, DataError
from rltrain.models import read_architecture
from rltrain.models.flops import positions_read
from rltrain.observability.run_logs import write_job
from rltrain.planning.description import describe_job, describe_sharing
from rltrain.planning.doubts import doubts_about_models
from rltrain.planning.hardware import GPUS
from rltrain.planning.memory import cache_bytes, rank_memories, sent_share
from rltrain.planning.options import SHIPPED, DryRunOptions, calibration_of, proposals
from rltrain.planning.planned import LEAST_SAVED, MIN_SHARED_TOKENS, Workload
from rltrain.planning.sizes import seconds, size, sizes
from rltrain.planning.step_time import Calibration, Clock
from rltrain.planning.sync_time import PlannedSync, least_sync_s
from rltrain.planning.task_time import (
    SHORT_TOKENS,
    SHORTEST_FRACTION,
    TrainingTime,
    decode_step,
    generation,
    weights_read,
)
from rltrain.training import packed_attention, prefix_tree
from rltrain.training.packing import Packing, make_micro_batches
from rltrain.training.prefix_tree import SortedSamples
from tests.support.packed_experience import plain_experience
from tests.unit.test_estimated_memory import anything, job_of
from tools.benchmarks.model_shapes import deepseek_v3, qwen3_8b, qwen3_30b_a3b

H100 = GPUS["h100"]
WORKLOAD = Workload(prompt=500, response=1000, longest_response=2000)
APART = {"actor": "0-7", "rollout, reward": "8-15"}
AHEAD = {"mode": "asynchronous", "max_staleness": 1}
LONG = {
    "batch": {"prompts_per_step": 64, "samples_per_prompt": 8},
    "rollout": {"max_context_tokens": 4096, "sampling": {"max_response_tokens": 2000}},
}


BATCHES = {**LONG["batch"], "mini_batches": 2}


def long_job(placement=APART, world_size=16, **sections):
    """Returns a job of Qwen3-8B with long responses."""
    return job_of(qwen3_8b(), placement, world_size, **(LONG | sections))


def step_of(placement=APART, world_size=16, **sections):
    return Clock(long_job(placement, world_size, **sections), H100, WORKLOAD).step()


UNFUSED = {"moved": 5.0, "layer_s": 2.8e-3, "decode_layer_s": 5e-5, "decode_step_s": 1e-3}
"""Costs without fused kernels and with a host that waits for each decode step, as in the run on an H100 of
docs/estimates.md."""
MEASURED_S = {"generate": (2.09, 2.04), "actor_logprobs": (0.44, 0.53), "update": (1.14, 1.58)}
"""Seconds of that run's tasks in two steps."""


def job_on_an_h100(micro_batch_tokens=8192):
    """Returns the job of that run: 64 samples of Qwen3-0.6B, colocated."""
    return job_of(
        read_architecture(SHIPPED / "Qwen3-0.6B"),
        {"actor, rollout, reward": 0},
        1,
        data={"train": {"path": "t"}, "max_prompt_tokens": 64},
        actor={"micro_batch_tokens": micro_batch_tokens, "share_prefixes": False},
        rollout={"max_running_requests": 64, "max_context_tokens": 576, "sampling": {"max_response_tokens": 512}},
        batch={"prompts_per_step": 8, "samples_per_prompt": 8},
        loss={"old_logprobs": "actor"},
    )


def test_estimates_are_close_to_a_run_on_an_h100():
    step = Clock(job_on_an_h100(), with_costs(**UNFUSED), Workload(64, 512, 512)).step()
    estimated = {task: seconds for (task, _), seconds in step.tasks.items()}
    for task, measured in MEASURED_S.items():
        assert estimated[task] == pytest.approx(sum(measured) / len(measured), rel=0.15), task


def test_micro_batches_take_what_the_host_launches_or_the_device_computes():
    def update_s(tokens, **costs):
        return TrainingTime(job_on_an_h100(tokens), "actor", with_costs(**costs), Workload(64, 512, 512)).accumulating(
            1
        )

    few, all_at_once = 8192, 64 * 576
    assert update_s(few, layer_s=0.0, micro_batch_s=0.0) == pytest.approx(update_s(all_at_once), rel=0.1)
    assert update_s(few, layer_s=0.1) == pytest.approx(5 * 3 * 28 * 0.1, rel=0.01), "five micro-batches, 28 layers"
    assert update_s(few, layer_s=0.1, launches_ahead=False) > update_s(few, layer_s=0.1) + update_s(all_at_once) / 2
    assert update_s(all_at_once, moved=5.0) > 1.5 * update_s(all_at_once)


def test_a_step_by_step_run_takes_its_tasks_one_after_another():
    step = step_of()
    assert step.step_s == pytest.approx(sum(step.tasks.values()), rel=1e-6)
    together_s = sum(seconds for (_, roles), seconds in step.tasks.items() if len(roles) > 1)
    assert step.busy["actor"] + step.busy["rollout"] == pytest.approx(1 + together_s / step.step_s, rel=0.05)


def test_generation_ahead_is_hidden_behind_training_or_the_other_way():
    sequential, ahead = step_of(), step_of(schedule=AHEAD)
    generate = sequential.tasks["generate", ("rollout",)]
    update = sequential.tasks["update", ("actor",)]
    assert ahead.step_s == pytest.approx(sequential.step_s - min(generate, update), rel=0.05)
    assert ahead.tokens_per_s > sequential.tokens_per_s


def test_moved_memory_is_counted_where_roles_take_turns():
    together = step_of({"actor, rollout, reward": "0-7"}, 8)
    assert together.moves_s > 0 and step_of().moves_s == 0
    assert together.step_s == pytest.approx(sum(together.tasks.values()) + together.moves_s, rel=1e-6)


def test_twice_the_ranks_train_in_half_the_time():
    one = step_of({"actor": "0-7", "rollout, reward": "8-15"})
    two = step_of({"actor": "0-15", "rollout, reward": "16-23"}, 24)
    key = "update", ("actor",)
    assert two.tasks[key] == pytest.approx(one.tasks[key] / 2, rel=0.15)


def test_context_parallelism_costs_what_it_sends():
    def update_s(share_prefixes=False, **model):
        step = step_of(actor={"parallel": {"cp": 4}, "share_prefixes": share_prefixes}, model={"path": "m", **model})
        return step.tasks["update", ("actor",)]

    alone = step_of(actor={"share_prefixes": False}).tasks["update", ("actor",)]
    ring, by_heads = update_s(), update_s(cp_communication="all_to_all")
    gathered = update_s(transformer_impl="local")
    assert alone < ring < 1.1 * alone, "ranks compute as much, and keys and values travel at the same time"
    assert ring < gathered < 1.3 * alone and ring < by_heads < 1.3 * alone
    assert update_s("auto") == update_s("auto", transformer_impl="local"), "shared prefixes take no ring"


def test_decoding_reads_weights_until_products_take_longer():
    job = long_job()
    few, some, many = (decode_step(job, H100, WORKLOAD, running) for running in (1, 2, 4096))
    assert some < 1.05 * few and many > 10 * few
    seconds = generation(job, H100, WORKLOAD, cache_bytes(rank_memories(job, H100)))
    assert seconds > WORKLOAD.longest_response * few, "the longest response takes a step for each of its tokens"


def test_few_tokens_visit_few_experts():
    model = qwen3_30b_a3b()
    one, many = weights_read(model, 1, 1), weights_read(model, 1, 10_000)
    assert one == pytest.approx(3.0e9, rel=0.1), "3 billion are active"
    assert many == pytest.approx(30.2e9, rel=0.02)


def test_a_greedy_response_to_each_prompt_takes_the_engines_time_and_none_of_the_actor_s():
    placement = {"actor, reference": "0-1", "rollout, reward": "2-3"}
    grpo, remax = (job_of(qwen3_30b_a3b(), placement, 4, **{**LONG, "algorithm": name}) for name in ("grpo", "remax"))
    assert [job.samples_per_replica("rollout") for job in (grpo, remax)] == [256, 288]
    assert [job.samples_per_replica("actor") for job in (grpo, remax)] == [256, 256]


def experts_job(parallel, *, micro_batch_tokens=4096, num_ranks=64):
    placement = {"actor": f"0-{num_ranks - 1}", "rollout, reward": f"{num_ranks}-{num_ranks + 7}"}
    batch = {"prompts_per_step": 64, "samples_per_prompt": 16}
    actor = {"parallel": parallel, "micro_batch_tokens": micro_batch_tokens}
    return job_of(qwen3_30b_a3b(), placement, num_ranks + 8, actor=actor, **{**LONG, "batch": batch})


def with_costs(**costs):
    """Returns an H100 with some of its costs changed."""
    return H100.model_copy(update={"efficiency": H100.efficiency.model_copy(update=costs)})


def passes_of(job, **costs):
    return TrainingTime(job, "actor", with_costs(**costs), WORKLOAD).accumulating(1.0)


def test_experts_on_several_nodes_wait_for_the_network():
    free = {"network_collective_s": 0.0, "collective_s": 0.0, "dispatch_s": 0.0, "layer_s": 0.0}
    node, nodes = (passes_of(experts_job({"ep": ep}, micro_batch_tokens=32768), **free) for ep in (8, 32))
    assert nodes > 1.5 * node


def test_the_rank_with_most_tokens_holds_up_the_others():
    even, uneven = (passes_of(experts_job({"ep": 8}), expert_imbalance=factor) for factor in (1.0, 2.0))
    alone = [passes_of(experts_job({"ep": 1}), expert_imbalance=factor) for factor in (1.0, 2.0)]
    assert 1.2 * even < uneven < 2 * even
    assert alone[0] == alone[1], "experts on one rank process all of its tokens"


def test_few_tokens_for_each_expert_fill_no_tile():
    times = {"layer_s": 0.0, "dispatch_s": 0.0}
    many, few = (passes_of(experts_job({}, micro_batch_tokens=tokens), **times) for tokens in (32768, 2500))
    assert few > 1.1 * many


def test_reduction_beside_backward_costs_its_last_bucket():
    def hidden_s(**sections):
        jobs = (long_job(actor={"overlap": overlap}, **sections) for overlap in (False, True))
        apart, beside = (Clock(job, H100, WORKLOAD).task("update", "actor") for job in jobs)
        return apart - beside

    assert 0 < 2 * hidden_s() < hidden_s(batch=BATCHES) < 3 * hidden_s()


@pytest.mark.parametrize("role", ["rollout", "inference"])
def test_the_plan_of_a_sync_takes_no_less_than_any_could(role):
    job = long_job({"actor": "0-7", "rollout, reward, inference": "8-15"}, actor={"parallel": {"tp": 4}})
    sync = PlannedSync(job, role)
    assert sync.prediction(H100).network >= sync.prediction(H100).network_bound
    assert least_sync_s(job, role, H100) <= sync.seconds(H100) * 1.01


def test_lengths_are_halves_of_the_limits_unless_given():
    config = long_job().config
    assert Workload.of(config) == Workload(512, 1000, 2000)
    assert Workload.of(config, 100, 300) == Workload(100, 300, 2000)
    with pytest.raises(ConfigError, match="--response-tokens.*2000"):
        Workload.of(config, None, 2001)


def make_run(folder, **times):
    """Makes an output_dir with these times in its metrics."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(qwen3_config(Size(), 512, 0, 0)))
    job = job_of(qwen3_8b(), {"actor": 0, "rollout, reward": 1}, 2, model={"path": str(model)}, output_dir=str(folder))
    write_job(job.config, 2, 2)
    measure(folder, **times)


def measure(folder, **times):
    """Writes the metrics of a step with these times."""
    line = {"step": 3, "rollout/response_length_mean": 100, "rollout/response_length_max": 300}
    line |= {f"perf/{name}": seconds for name, seconds in times.items()}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_a_measured_run_gives_the_factor_of_every_task(tmp_path):
    make_run(tmp_path, step_time_s=1.0, update_s=0.0)
    assert calibration_of([tmp_path], H100).factors == {"update": 0.0}
    measure(tmp_path, step_time_s=1.0, generate_s=7.0)
    factor = calibration_of([tmp_path], H100).factors["generate"]
    measure(tmp_path, step_time_s=1.0, generate_s=14.0)
    assert calibration_of([tmp_path], H100).factors["generate"] == pytest.approx(2 * factor)


def test_what_a_measured_step_takes_beyond_its_tasks_is_added(tmp_path):
    make_run(tmp_path, step_time_s=30.0, update_s=2.0, generate_s=7.0, score_s=0.5, weight_sync_s=0.1)
    made = calibration_of([tmp_path], H100)
    job = job_of(qwen3_8b(), {"actor": "0", "rollout, reward": "1"}, 2)
    with_it, without = (Clock(job, H100, WORKLOAD, of).step().step_s for of in (made, Calibration(made.factors)))
    assert with_it - without == pytest.approx(made.between_s) and 20 < made.between_s < 21


def test_a_task_that_was_not_measured_takes_the_factor_of_those_alike():
    job = long_job(loss={"old_logprobs": "actor"})
    factors = {"reference_logprobs": 3.0, "update": 5.0}
    plain, slow = (Clock(job, H100, WORKLOAD, *made) for made in ((), (Calibration(factors),)))
    assert slow.task("actor_logprobs", "actor") == pytest.approx(3 * plain.task("actor_logprobs", "actor"))
    assert slow.task("generate", "rollout") == plain.task("generate", "rollout")


def test_a_folder_that_no_run_left_is_refused(tmp_path):
    with pytest.raises(DataError, match="--calibrate.*job.json"):
        calibration_of([tmp_path], H100)


def test_search_proposes_what_fits_fastest_first():
    job = long_job({"actor, rollout, reward": "0-7"}, 8)
    found = proposals(job, H100, WORKLOAD, Calibration(), anything)
    again = proposals(job, H100, WORKLOAD, Calibration(), anything)
    assert found and [made.keys for made in found] == [made.keys for made in again]
    steps = [made.step.step_s for made in found]
    assert steps == sorted(steps) and all(made.memory.fits(H100) for made in found)
    assert proposals(job, H100, WORKLOAD, Calibration(), lambda job: False) == []


def test_models_that_tell_the_reward_take_room_and_time():
    placement = {"actor": "0-7", "rollout, reward": "8-11", "reward_model, judge": "12-15"}
    judge = {"parallel": {"tp": 4}, "sampling": {"max_response_tokens": 400}}
    job = long_job(placement, judge=judge)
    clock = Clock(job, H100, WORKLOAD)
    scored, judged = clock.task("model_scores", "reward_model"), clock.task("verdicts", "judge")
    assert 0.1 < scored < judged, "reading is quick, and answering takes token after token"
    longer = long_job(placement, judge=judge | {"sampling": {"max_response_tokens": 800}})
    assert Clock(longer, H100, WORKLOAD).task("verdicts", "judge") > judged
    (shared,) = (memory for memory in rank_memories(job, H100) if "judge" in memory.kind.roles)
    assert shared.parts["judge", "weights"] == pytest.approx(16.4e9 / 4, rel=0.05)
    assert {"model_scores", "verdicts"} <= {task.task for task in shared.tasks}
    (asked,) = (task for task in shared.tasks if task.task == "verdicts")
    assert asked.bytes_of["judge.kv_cache"] > 1e9 and "reward_model.weights" not in asked.bytes_of, "they take turns"


def test_steps_and_micro_batches_cost_something_however_few_tokens_they_have():
    def seconds(gpu, ranks="0-7", **actor):
        job = long_job({"actor": ranks, "rollout, reward": "8-15"}, batch=BATCHES, actor=actor)
        time = TrainingTime(job, "actor", gpu, Workload(100, 400, 400))
        return time.accumulating(1.0), time.optimizer_steps()

    free, paid = (
        with_costs(micro_batch_s=each, update_s=once, launches_ahead=False) for each, once in ((0, 0), (1, 10))
    )
    passes, updates = (later - now for later, now in zip(seconds(paid), seconds(free), strict=True))
    assert updates == pytest.approx(2 * 10), "mini-batches"
    assert passes == pytest.approx(2 * 2 * round(passes / 4)) and round(passes) >= 4, "forward and backward of each"
    slow = with_costs(collective_s=1, update_s=0)
    alone, among = (seconds(slow, ranks)[1] - seconds(free, ranks)[1] for ranks in ("0", "0-7"))
    assert alone == 0 and among >= 2 * 8


def test_cores_of_a_cpu_crowd_each_other():
    crowded = with_costs(crowding=1.5)
    for placement, factor in ((APART, 1.5), ({"actor": "0", "rollout, reward": "8"}, 1.0)):
        job = long_job(placement)
        alone, beside = (Clock(job, gpu, WORKLOAD).task("generate", "rollout") for gpu in (H100, crowded))
        assert beside - 0.02 == pytest.approx(factor * (alone - 0.02))


def test_attention_in_float32_is_paid_for_with_padding():
    assert (SHORT_TOKENS, SHORTEST_FRACTION) == (packed_attention.SHORT_TOKENS, packed_attention.SHORTEST_FRACTION)

    def seconds(dtype, longest):
        job = long_job(model={"path": "m", "dtype": dtype})
        workload = Workload(prompt=8, response=16, longest_response=longest)
        return TrainingTime(job, "actor", H100, workload).accumulating(1.0)

    assert seconds("bfloat16", 100) == seconds("bfloat16", 40), "one kernel takes sequences without padding"
    assert seconds("float32", 100) > seconds("float32", 40) > 0
    assert seconds("float32", 4000) == seconds("float32", 1000), (
        "long sequences are batched with others of similar length"
    )


def test_gradients_of_frozen_matrices_are_not_paid_for():
    """In a large dense model, nearly all time goes into matrix products and attention."""

    def seconds(lora):
        job = long_job(model={"path": "m", "lora": lora}, actor={"share_prefixes": False})
        return TrainingTime(job, "actor", H100, Workload(100, 400, 400)).accumulating(1.0)

    assert seconds({"rank": 16}) / seconds(None) == pytest.approx(2 / 3, abs=0.03)


FSDP = {"backend": "fsdp"}


def packed_samples(prompt, response, num_samples, how, *, limit, pairs=False):
    """Returns the micro-batches of 32 groups of samples with lengths around these means."""
    generator = torch.Generator().manual_seed(0)

    def text(mean, low):
        length = int(mean * (low + 2 * (1 - low) * float(torch.rand((), generator=generator))))
        return torch.randint(1000, (length,), generator=generator)

    texts = []
    for _ in range(32):
        beginning = text(prompt, 0.5)
        texts += [torch.cat([beginning, text(response, 0.3)]) for _ in range(num_samples)]
    samples = plain_experience([len(one) for one in texts], torch.cat(texts))
    samples = samples.with_fields(group_ids=torch.arange(32).repeat_interleave(num_samples))
    if pairs:
        samples = samples.with_fields(chosen=torch.tensor([True, False]).repeat(32))
    return make_micro_batches(samples, limit, Packing(torch.device("cpu"), prefixes=how))


@pytest.mark.parametrize("how", ["auto", True, False])
@pytest.mark.parametrize(
    ("prompt", "response", "num_samples", "limit"),
    [
        (100, 400, 8, 16384),
        (512, 64, 16, 8192),
        (800, 100, 8, 2048),
        (100, 900, 4, 16384),
        (1000, 900, 8, 4096),
        (12, 100, 8, 4096),
        (300, 300, 1, 4096),
    ],
)
def test_computed_tokens_are_those_of_the_packing(prompt, response, num_samples, limit, how):
    batch = {"prompts_per_step": 32, "samples_per_prompt": num_samples}
    actor = FSDP | {"share_prefixes": how, "micro_batch_tokens": limit}
    job = long_job({"actor": 0, "rollout, reward": 1}, 2, batch=batch, actor=actor)
    batches = packed_samples(prompt, response, num_samples, how, limit=limit)
    num_tokens = sum(batch.num_tokens for batch in batches)
    num_computed = sum(batch.num_computed_tokens for batch in batches)
    computed = job.computed("actor", prompt, response, trains=True)
    assert computed.share == pytest.approx(num_computed / num_tokens, rel=0.04)
    read = sum(positions_read(lengths) - positions_read(before) for lengths, before in (b.computed for b in batches))
    assert computed.context == pytest.approx(read / num_computed, rel=0.15), "texts of unequal lengths read more"
    time = TrainingTime(job, "actor", H100, Workload(prompt, response, 2 * response))
    assert time.num_micro_batches(num_computed, computed) == pytest.approx(len(batches), rel=0.2)


def test_the_responses_of_a_pair_share_their_prompt():
    batches = packed_samples(600, 200, 2, "auto", limit=4096, pairs=True)
    job = job_of(
        qwen3_8b(), {"actor, reference": "0"}, 1, algorithm="dpo", actor=FSDP, batch={"prompts_per_step": 32}, loss={}
    )
    for role in ("actor", "reference"):
        computed = job.computed(role, 600, 200, trains=role == "actor")
        found = sum(batch.num_computed_tokens for batch in batches) / sum(batch.num_tokens for batch in batches)
        assert computed.share == pytest.approx(found, rel=0.03)


def test_all_layers_of_all_models_share():
    def shares(architecture, trains=True, **sections):
        job = job_of(architecture, {"actor": "0-1", "rollout, reward": "2-3"}, 4, **(LONG | sections))
        return job.computed("actor", 1000, 1000, trains=trains).share < 1

    over_two = {"parallel": {"cp": 2}}
    assert shares(qwen3_8b())
    assert shares(qwen3_8b(), actor=over_two)
    assert shares(qwen3_8b(), actor=over_two | FSDP)
    assert shares(deepseek_v3(), actor=over_two)
    predicting = {"path": "m", "mtp": {}}
    assert all(shares(qwen3_8b(), trains, model=predicting) for trains in (True, False))


def test_a_prompt_has_one_row_less_if_rows_get_the_next_token_too():
    texts = torch.arange(40).repeat(4, 1)
    texts[:, 20:] += 100 * torch.arange(4)[:, None]
    samples = SortedSamples.of(plain_experience([40] * 4, texts.flatten()), looks_ahead=True)
    sections = {"batch": {"samples_per_prompt": 4, "prompts_per_step": 2}, "model": {"path": "m", "mtp": {}}}
    job = job_of(qwen3_8b(), {"actor": "0", "rollout, reward": "1"}, 2, **(LONG | sections))
    computed = [job.computed("actor", 20, 20, trains=trains).share for trains in (True, False)]
    assert computed == pytest.approx([samples.num_rows(0, 4) / 160, (20 + 4 * 20) / 160])


def test_what_is_shared_takes_no_time():
    """In a large dense model nearly all time goes into what is computed of each token."""

    def job(how, **batch):
        actor = FSDP | {"share_prefixes": how}
        return long_job(actor=actor, batch={"prompts_per_step": 64, "samples_per_prompt": 8, **batch})

    workload = Workload(prompt=1000, response=200, longest_response=400)
    alone, shared = (TrainingTime(job(how), "actor", H100, workload) for how in (False, "auto"))
    kept = (1000 + 8 * 200) / (8 * 1200)
    assert shared.evaluating(1.0) / alone.evaluating(1.0) == pytest.approx(kept, rel=0.1)
    assert shared.accumulating(1.0) / alone.accumulating(1.0) == pytest.approx(kept, rel=0.1)
    fewer = TrainingTime(job("auto", mini_batches=4), "actor", H100, workload)
    assert fewer.computed(backward=True).share == pytest.approx((1000 + 2 * 200) / (2 * 1200))
    assert fewer.computed(backward=False).share == shared.computed(backward=False).share
    by_prompts = job("auto", mini_batches=4, mini_batches_by="prompts")
    assert by_prompts.computed("actor", 1000, 200, trains=True).share == pytest.approx(kept)


def test_the_numbers_of_sharing_are_those_of_training():
    assert (MIN_SHARED_TOKENS, LEAST_SAVED) == (prefix_tree.MIN_SHARED_TOKENS, prefix_tree.LEAST_SAVED)


def test_the_description_tells_what_is_shared():
    job = long_job(actor=FSDP, loss={"old_logprobs": "actor"})
    few, many = (Workload(prompt, 1000, 2000) for prompt in (50, 1000))
    assert describe_sharing(job, ["update"], few) == []
    (line,) = describe_sharing(job, ["update", "actor_logprobs"], many)
    assert line.endswith("44% of actor_logprobs and update")
    agent = {"agent": {"function": "my_agent:answer"}}
    with_agent = long_job({"actor": "0-7", "rollout, reward, env": "8-15"}, actor=FSDP, env=agent)
    assert describe_sharing(with_agent, ["update"], many) == [], "contexts of agents are unknown"


def test_a_sync_of_what_changed_is_told_by_the_bytes_that_it_sends():
    jobs = (job_of(qwen3_8b(), APART, 16, weight_sync={"delta": made}) for made in (None, {"full_every": 50}))
    full, delta = map(PlannedSync, jobs)
    assert sent_share(full.job) == 1 and sent_share(delta.job) < 0.1
    assert full.seconds(H100) - delta.seconds(H100) > 0.9 * full.prediction(H100).network
    together = job_of(qwen3_8b(), {"actor, rollout, reward": "0-7"}, 8, weight_sync={"delta": {}})
    assert sent_share(together) == 1, "engines leave their GPUs"


CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MOST_LINES = 135
HALVES_APART = "placement={'actor, reference': 0-2047, 'rollout, reward': 2048-4095}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns folders with the config.json of a model with 0.6 and of one with 8 billion parameters."""
    folder = tmp_path_factory.mktemp("models")
    small = Size(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, max_positions=40960)
    large = Size(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288, max_positions=40960)
    for name, shape in {"small": small, "large": large}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(qwen3_config(shape, 151936, 0, 0)))
    return folder


def describe(model, *overrides, **options):
    options = DryRunOptions(**{"world_size": 8, **options})
    return describe_job(CONFIGS / "gsm8k_qwen3_0.6b.yaml", [f"model.path={model}", *overrides], options)


def test_bytes_seconds_and_throughput_are_told(models):
    text = describe(models / "small")
    assert "ranks 0-7: peak " in text and "of 84.9 GB at update: activations" in text
    assert "tokens/s/GPU" in text and "waiting share: actor" in text
    assert "of 150 GB" in describe(models / "small", gpu="h200")


def test_a_host_that_cannot_keep_what_leaves_is_told_of(models, tmp_path):
    small_host = tmp_path / "mine.yaml"
    small_host.write_text(GPUS["h100"].model_copy(update={"host_memory_gb": 1.0}).model_dump_json())
    assert "a node would pin" in describe(models / "small", gpu=str(small_host))
    assert "a node would pin" not in describe(models / "small")


def test_longer_responses_take_longer(models):
    def step_s(response_tokens):
        text = describe(models / "small", response_tokens=response_tokens)
        return float(text.partition("a step: ")[2].split()[0])

    assert step_s(1000) > step_s(500)


def test_what_does_not_fit_is_refused_with_what_would_help(models):
    with pytest.raises(ConfigError) as refused:
        describe(models / "large")
    first, heading, *changes = str(refused.value).splitlines()
    assert first.startswith("ranks 0-7 (actor, reference, rollout) would hold ") and "--gpu h100" in first
    assert heading.endswith("each alone:") and len(changes) == 3
    text, _, verdict = changes[0].strip().rpartition(": ")
    assert verdict.endswith("fits")
    key, _, value = text.partition(": ")
    told = describe(models / "large", f"{key}={value}")
    assert f"peak {verdict.split(' at ')[0]} of" in told, "the dry run confirms the promised peak"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            [HALVES_APART, "actor.parallel={tp: 4, pp: 4}", "schedule={mode: pipelined}", "batch.mini_batches=1"],
            marks=pytest.mark.slow,
            id="pipelined with stages",
        ),
        pytest.param(["rollout.parallel={tp: 8}"], id="colocated"),
    ],
)
def test_thousands_of_ranks_are_told_of_in_a_page(models, overrides):
    text = describe(models / "small", *overrides, "batch.prompts_per_step=16384", world_size=4096)
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= 130
    assert "ranks 0-2047" in text or "ranks 0-4095" in text


def test_every_rank_and_pair_on_request(models):
    split = "placement={'actor, reference': 0-3, 'rollout, reward': 4-7}"
    short, long = (describe(models / "small", split, every_rank=every) for every in (False, True))
    assert len(long.splitlines()) > len(short.splitlines()) + 8
    assert "dp3" in long and "dp3" not in short
    assert any(line.split()[:2] == ["0", "4"] and line.endswith("node") for line in long.splitlines())


def test_search_says_what_to_write(models):
    text = describe(models / "large", search=True)
    assert "does not fit" in text
    _, header, first, *_ = text.partition("Fastest placements")[2].splitlines()
    assert header.split() == ["a", "step", "tokens/s/GPU", "peak", "keys"]
    keys = [part for part in first.split() if part.startswith(("actor.parallel", "rollout.parallel"))]
    assert len(keys) == 3
    assert describe(models / "large", *keys).count("peak") >= 1, "it fits"


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0 B"), (999, "999 B"), (1.5e3, "1.50 kB"), (12e6, "12.0 MB"), (4.2e12, "4200 GB")]
)
def test_bytes_have_three_digits(num_bytes, words):
    assert size(num_bytes) == words


def test_what_is_equal_is_told_of_by_name():
    assert sizes({"weights": 1, "gradients": 1, "logits": 2, "nothing": 0}) == "logits 2 B, gradients 1 B, weights 1 B"


def test_seconds_have_three_digits():
    assert [seconds(value) for value in (0, 0.02, 1.5, 61.25, 600)] == ["0 s", "20 ms", "1.50 s", "61.2 s", "600 s"]


def test_experts_that_are_trained_without_the_engines_choice_are_doubted() -> None:
    model = SHIPPED / "Qwen3-30B-A3B"
    architectures, path = {"actor": read_architecture(model)}, f"model.path={model}"

    def doubts(*settings: str) -> list[str]:
        config = load_config(CONFIGS / "qwen3_30b_a3b.yaml", [path, "model.router_replay=off", *settings])
        return [*doubts_about_models(config, architectures)]

    (doubt,) = doubts()
    assert doubt.startswith("model.router_replay: got off with experts and model.dtype bfloat16")
    assert doubt.endswith("expected rollout: the actor then uses the engine's choices, for 384 bytes per token")
    (doubt,) = doubts("model.dtype=float32", "rollout.dtype=fp8")
    assert "with experts and rollout.dtype fp8" in doubt
    for beyond_doubt in ("model.dtype=float32", "actor.backend=fsdp", "model.router_replay=recompute"):
        assert doubts(beyond_doubt) == []
    options = DryRunOptions(8, 8)
    assert doubts()[0] in describe_job(CONFIGS / "qwen3_30b_a3b.yaml", [path, "model.router_replay=off"], options)
