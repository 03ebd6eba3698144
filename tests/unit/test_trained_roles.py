"""Actor and critic at work on the samples of a step."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.losses import LossOutput, sample_shares, token_weights
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config.schema import Batch, Checks, Loss
from rltrain.data.experience import Experience, assign_groups, mini_batch_of
from rltrain.errors import ConfigError, ParityError
from rltrain.models.flops import forward_flops, vision_flops
from rltrain.observability.reporter import RoleWork, of_whole_job
from rltrain.planning.hardware import known_gpu
from rltrain.planning.validation import check_config
from rltrain.roles.actor import ParityGate, StalenessCounts, measuring_parity, summarize_parity
from rltrain.roles.critic import CriticRole
from rltrain.roles.role import Operations
from rltrain.roles.trained import StepBatch, TrainedRole, find_odd_rank, summarize
from rltrain.schedule.shape import prompt_blocks_of
from rltrain.training.trainable import RATIO, SKIPPED, TOO_FAR
from tests.support.model_shards import tiny_architecture
from tests.support.packed_experience import packed_experience
from tests.support.schedule_configs import NO_EVALUATION, make_config
from tests.support.vision_checkpoints import tiny_vision

SHAPE = [(3, 5), (2, 0), (4, 9), (1, 7)]


def no_loss(experience: Experience, logprobs: Tensor, entropy: Tensor) -> LossOutput:
    return LossOutput(logprobs.sum(), entropy.sum(), token_sums={"entropy": entropy.sum()})


def measured(experience: Experience, logprobs: Tensor, step: int) -> dict[str, float]:
    """Returns the metrics of a step. They are means over all response tokens."""
    output = measuring_parity(no_loss, step)(experience, logprobs, logprobs)
    num_tokens = float(experience.response_mask.sum())
    return summarize_parity({name: float(value) / (num_tokens or 1) for name, value in output.token_sums.items()})


@pytest.mark.parametrize("step", range(6))
def test_only_tokens_of_the_steps_own_weights_count(step: int) -> None:
    experience = packed_experience(SHAPE, seed=step)
    logprobs = torch.where(experience.response_mask, -torch.rand(experience.num_tokens), torch.tensor(math.nan))
    fresh = experience.response_mask & (experience.policy_version == step)
    found = measured(experience, logprobs, step)
    drawn, trained = experience.rollout_logprobs[fresh].double(), logprobs[fresh].double()
    assert found["fresh_tokens"] == pytest.approx(float(fresh.sum() / experience.response_mask.sum()))
    assert found["fresh_logprob_abs_diff"] == pytest.approx(float((trained - drawn).abs().mean()), rel=1e-5)
    ratio = (trained - drawn).exp()
    assert found["fresh_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-4)
    assert "entropy" in found


def test_samples_with_images_are_measured_by_themselves() -> None:
    experience = packed_experience(SHAPE)
    keys = torch.zeros(experience.num_tokens, dtype=torch.int64)
    starts = experience.lengths.cumsum(0) - experience.lengths
    keys[starts[1]], keys[starts[2] + 1] = 7, 8
    experience = experience.with_fields(image_keys=keys)
    logprobs = torch.where(experience.response_mask, -torch.rand(experience.num_tokens), torch.tensor(math.nan))
    of_samples = torch.tensor([False, True, True, False]).repeat_interleave(experience.lengths)
    shown = experience.response_mask & (experience.policy_version == 0) & of_samples
    found = measured(experience, logprobs, step=0)
    expected = (logprobs - experience.rollout_logprobs)[shown].abs().mean()
    assert found["fresh_image_tokens"] == pytest.approx(float(shown.sum() / experience.response_mask.sum()))
    assert found["fresh_image_logprob_abs_diff"] == pytest.approx(float(expected), rel=1e-5)
    blind = measured(experience.with_fields(image_keys=torch.zeros_like(keys)), logprobs, step=0)
    assert blind["fresh_image_tokens"] == 0 and "fresh_image_logprob_abs_diff" not in blind
    assert blind["fresh_logprob_abs_diff"] == found["fresh_logprob_abs_diff"]


def test_without_such_tokens_nothing_is_said() -> None:
    experience = packed_experience(SHAPE)
    assert measured(experience, experience.actor_logprobs, step=7).keys() == {"fresh_tokens", "entropy"}
    empty = experience.select(torch.zeros(0, dtype=torch.int64))
    assert measured(empty, torch.zeros(0), step=0)["fresh_tokens"] == 0


def test_samples_count_for_as_much_as_in_the_loss_that_is_measured() -> None:
    """Losses of routers are divided by the same divisor."""
    experience = packed_experience(SHAPE)
    for normalization in ("token_mean", "sequence_mean", "dr_grpo"):
        loss = policy_loss(Loss(normalization=normalization), 9)
        found = sample_shares(measuring_parity(loss, 0), experience)
        assert found.tolist() == sample_shares(loss, experience).tolist()
        assert found.sum() == token_weights(experience, normalization, 9).divisor


def gate(**checks: Any) -> ParityGate:
    return ParityGate(Checks(**checks), speaks=True, pause=no_pause)


def no_pause(reason: str) -> None:
    raise AssertionError(f"paused: {reason}")


@pytest.mark.parametrize("value", [0.2, math.nan, math.inf])
@pytest.mark.parametrize(
    "key, metric",
    [
        ("max_logprob_diff", "fresh_logprob_abs_diff"),
        ("max_logprob_diff", "fresh_image_logprob_abs_diff"),
        ("max_kl", "fresh_kl"),
    ],
    ids=["difference", "difference with images", "kl"],
)
def test_beyond_a_limit_the_run_ends_with_step_value_limit_and_key(key: str, metric: str, value: float) -> None:
    with pytest.raises(
        ParityError, match=rf"^step 12: .*: train/{metric} is {value:.3g}, checks\.{key} 0\.1\..*tools/parity.py"
    ):
        gate(**{key: 0.1}).check(12, {metric: value})


def test_within_limits_and_without_fresh_tokens_it_goes_on() -> None:
    for metrics in ({"fresh_kl": 0.1, "fresh_logprob_abs_diff": 5.0}, {}):
        gate(max_kl=0.1).check(3, metrics)


def test_a_warning_comes_from_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    for speaks in (True, False):
        ParityGate(Checks(max_kl=0.1, action="warn"), speaks=speaks, pause=no_pause).check(4, {"fresh_kl": 0.3})
    (message,) = caplog.messages
    assert caplog.records[0].levelno == logging.WARNING
    assert message.startswith("step 4: ") and "train/fresh_kl is 0.3, checks.max_kl 0.1" in message


@pytest.mark.parametrize("speaks", [True, False])
def test_every_rank_of_the_actor_asks_for_the_pause(speaks: bool) -> None:
    """No rank reaches the end of the step before the request."""
    reasons: list[str] = []
    found = ParityGate(Checks(max_kl=0.1, action="pause"), speaks=speaks, pause=reasons.append)
    found.check(3, {"fresh_kl": 0.1})
    assert not reasons
    found.check(4, {"fresh_kl": 0.3})
    (reason,) = reasons
    assert reason.startswith("step 4: ") and "train/fresh_kl is 0.3, checks.max_kl 0.1 (checks.action pause)" in reason


def test_a_pause_needs_checkpoints() -> None:
    checks = {"max_kl": 0.1, "action": "pause"}
    with pytest.raises(ConfigError, match=r"checks\.action: got pause with checkpoint\.save_interval 0 and"):
        check_config(make_config(checks=checks))
    for key in ("save_interval", "save_every_s"):
        check_config(make_config(checks=checks, checkpoint={"save_every_s": 0, key: 10}))


def test_limits_on_what_no_engine_drew_are_refused() -> None:
    config = make_config(algorithm="sft", placement={"actor": 0}, **NO_EVALUATION, checks={"max_kl": 0.1})
    with pytest.raises(ConfigError, match=r"checks\.max_kl: got 0\.1 with algorithm sft, which trains on no samples"):
        check_config(config)


FIRST = {"stale_samples": 1, "stale_tokens": 5, "tokens": 20, "staleness_sum": 30, "staleness_max": 2}
SECOND = {"stale_samples": 2, "stale_tokens": 7, "tokens": 30, "staleness_sum": 20, "staleness_max": 4}


def test_chunks_add_up_and_the_oldest_counts():
    counts = StalenessCounts()
    counts.add(SECOND)
    counts.add(FIRST)
    assert counts.longest == 4
    assert StalenessCounts.metrics(counts.sums(), counts.longest) == pytest.approx(
        {"stale_samples": 3, "stale_tokens": 12, "staleness_mean": 1.0, "staleness_max": 4}
    )


def test_a_step_of_which_nothing_is_left_has_no_staleness():
    assert StalenessCounts.metrics(StalenessCounts().sums(), 0)["staleness_mean"] == 0


@pytest.mark.parametrize(("clip", "expected"), [(0.2, 0.32), (None, 0.08), (0.5, 0.125)])
def test_the_critics_clip_is_the_configs(monkeypatch: pytest.MonkeyPatch, clip: float | None, expected: float):
    """A value went from 0 to 0.6 towards a return of 1. The loss is (1 - v) ** 2 / 2, with v limited by the clip."""
    monkeypatch.setattr(TrainedRole, "__init__", lambda *_, **__: None)
    shape = SimpleNamespace(updates_per_step=1)
    critic = CriticRole(SimpleNamespace(config=make_config(critic={"value_clip": clip}), shape=shape))  # type: ignore[arg-type]
    experience = packed_experience([(1, 1)])
    old, returns = torch.zeros(2), torch.ones(2)
    loss = critic.loss_function(experience.with_fields(values=old, returns=returns), torch.full((2,), 0.6)).loss
    assert float(loss) == pytest.approx(expected)


def role_on(rank: int) -> TrainedRole:
    role = TrainedRole.__new__(TrainedRole)
    role.name = "critic"  # type: ignore[misc]
    role.config = make_config(on_divergence={"max_skipped": 7})
    role.job = SimpleNamespace(world=SimpleNamespace(rank=rank), leader_of=lambda name: 2)  # type: ignore[assignment]
    return role


def warnings_of(rank: int, skipped: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        role_on(rank).warn_of_skipped(4, [{SKIPPED: number} for number in skipped])
    return caplog.messages


def test_the_leader_warns_of_them_with_step_role_and_limit(caplog):
    (message,) = warnings_of(2, [0.0, 1.0, 1.0], caplog)
    assert message.startswith("step 4: 2 of the critic's 3 optimizer steps had a loss or a gradient norm that was not")
    assert "on_divergence.max_skipped 7" in message


def test_the_leader_warns_of_steps_too_far_from_the_policy_of_the_samples(caplog):
    far = {SKIPPED: 1.0, TOO_FAR: 1.0, RATIO: 6.5}
    role = role_on(2)
    role.config = make_config(on_divergence={"max_ratio": 5.0})
    with caplog.at_level(logging.WARNING):
        role.warn_of_skipped(4, [far, {SKIPPED: 0.0, TOO_FAR: 0.0, RATIO: 1.0}, far])
    assert caplog.messages == [
        "step 4: 2 of the critic's 3 optimizer steps had a mean ratio up to 6.5 and changed nothing "
        "(on_divergence.max_ratio 5)"
    ]


def test_nobody_else_does_nor_anybody_of_usual_steps(caplog):
    assert warnings_of(0, [1.0], caplog) == []
    assert warnings_of(2, [0.0, 0.0], caplog) == []


def chunk_of(groups: list[int], num_samples: int, first_id: int) -> Experience:
    """Returns samples of these groups of a chunk, with ids from `first_id`. Sample i has i + 1 response tokens."""
    total = len(groups) * num_samples
    experience = packed_experience([(1, 1 + i) for i in range(total)])
    return experience.with_fields(
        sample_ids=torch.arange(first_id, first_id + total),
        group_ids=torch.tensor(groups).repeat_interleave(num_samples),
    )


def step_batch(prompts: int = 8, samples: int = 2, mini_batches: int = 1, chunks: int = 2) -> StepBatch:
    return StepBatch(
        make_config(
            batch={"prompts_per_step": prompts, "samples_per_prompt": samples, "mini_batches": mini_batches},
            schedule={"mode": "pipelined", "chunks": chunks},
        )
    )


def test_chunks_follow_one_another():
    batch = step_batch(prompts=8, chunks=2)
    batch.add(0, chunk_of([0, 3], 2, first_id=10))
    batch.add(1, chunk_of([1, 2], 2, first_id=20))
    whole = batch.take()
    assert whole.sample_ids.tolist() == [10, 11, 12, 13, 20, 21, 22, 23]
    assert whole.lengths.tolist() == [2, 3, 4, 5] * 2
    assert whole.group_ids.tolist() == [0, 0, 3, 3, 5, 5, 6, 6], "groups of different chunks are different"


def test_a_chunk_may_be_used_before_the_others_are_there():
    batch = step_batch()
    batch.add(0, chunk_of([0, 1], 2, first_id=0))
    batch.add(1, chunk_of([0, 1], 2, first_id=50))
    assert batch.chunks[1].sample_ids.tolist() == [50, 51, 52, 53]


def test_each_step_begins_with_no_samples():
    batch = step_batch(chunks=1)
    batch.add(0, chunk_of([0], 2, first_id=0))
    batch.take()
    batch.add(0, chunk_of([0], 2, first_id=7))
    assert batch.take().sample_ids.tolist() == [7, 8]


def test_a_step_that_was_not_trained_on_leaves_nothing_to_the_next():
    """An example is a step of training only the critic."""
    batch = step_batch()
    for chunk in range(2):
        batch.add(chunk, chunk_of([0], 2, first_id=0))
    batch.add(0, chunk_of([1], 2, first_id=90))
    assert batch.take().sample_ids.tolist() == [90, 91]


@pytest.mark.parametrize(("samples", "mini_batches"), [(4, 1), (4, 2), (2, 4), (1, 8)])
def test_mini_batches_share_the_step_out(samples, mini_batches):
    batch = step_batch(prompts=8, samples=samples, mini_batches=mini_batches, chunks=2)
    for chunk in range(2):
        batch.add(chunk, chunk_of([0, 1, 2, 3], samples, first_id=100 * chunk))
    whole = batch.take()
    parts = batch.mini_batches(whole)
    assert sorted(torch.cat([part.sample_ids for part in parts]).tolist()) == whole.sample_ids.tolist()
    assert {part.num_samples for part in parts} == {8 * samples // mini_batches}
    blocks = batch.shape.prompt_blocks
    numbers = mini_batch_of(torch.arange(8).repeat_interleave(samples), 8, samples, mini_batches, blocks)
    for i, part in enumerate(parts):
        assert part.sample_ids.tolist() == whole.sample_ids[numbers == i].tolist()


def test_mini_batches_count_groups_through_the_step():
    batch = step_batch(prompts=8, samples=1, mini_batches=4, chunks=2)
    batch.add(0, chunk_of([0, 3], 1, first_id=10))
    batch.add(1, chunk_of([1, 2], 1, first_id=20))
    parts = batch.mini_batches(batch.take())
    assert [part.sample_ids.tolist() for part in parts] == [[10], [11], [20], [21]], (
        "four groups per chunk, some elsewhere"
    )


def test_a_step_without_chunks_is_one_chunk():
    batch = StepBatch(make_config(batch={"prompts_per_step": 4, "samples_per_prompt": 2}))
    batch.add(0, chunk_of([0, 1, 2, 3], 2, first_id=0))
    assert batch.take().group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_metrics_of_updates_are_averaged_but_for_maxima_and_what_only_the_first_can_tell():
    first = {"loss": 1.0, "kl_max": 2.0, "diff": 5.0, SKIPPED: 0.0}
    second = {"loss": 3.0, "kl_max": 1.0, "diff": 50.0, SKIPPED: 0.0}
    skipped = {"loss": math.nan, "kl_max": math.inf, "diff": 9.0, SKIPPED: 1.0}
    expected = {"loss": 2.0, "kl_max": 2.0, "diff": 5.0}
    assert summarize([first, second], frozenset({"diff"})) == expected | {SKIPPED: 0.0}
    assert summarize([skipped, first, second, skipped], frozenset({"diff"})) == expected | {SKIPPED: 2.0}


def test_a_step_whose_updates_were_all_skipped_says_so():
    skipped = {"loss": math.nan, "grad_norm": math.inf, SKIPPED: 1.0}
    found = summarize([skipped, skipped])
    assert math.isnan(found["loss"]) and found["grad_norm"] == math.inf and found[SKIPPED] == 2


NUMBERS = st.integers(1, 24)
WAYS = st.sampled_from(["samples", "prompts"])


def make_batch(prompts: int, samples: int, mini_batches: int, by: str = "samples", epochs: int = 1) -> Batch:
    return Batch.model_validate(
        {
            "prompts_per_step": prompts,
            "samples_per_prompt": samples,
            "mini_batches": mini_batches,
            "mini_batches_by": by,
            "epochs": epochs,
        }
    )


@st.composite
def legal_batches(draw: st.DrawFn) -> Batch:
    """Draws batches of at most 24 prompts with at most 6 samples each."""
    prompts, by, samples = draw(NUMBERS), draw(WAYS), draw(st.integers(1, 6))
    blocks = draw(st.sampled_from([n for n in range(1, prompts + 1) if prompts % n == 0]))
    parts = draw(st.sampled_from([n for n in range(1, samples + 1) if samples % n == 0])) if by == "samples" else 1
    return make_batch(prompts, samples, blocks * parts, by)


def cut(batch: Batch) -> Tensor:
    """Returns the mini-batch of each sample of a step, shape [prompts, samples]."""
    blocks = prompt_blocks_of(batch, batch.samples_per_prompt)
    assert blocks is not None
    groups = torch.arange(batch.prompts_per_step).repeat_interleave(batch.samples_per_prompt)
    found = mini_batch_of(groups, batch.prompts_per_step, batch.samples_per_prompt, batch.mini_batches, blocks)
    return found.view(batch.prompts_per_step, batch.samples_per_prompt)


@given(legal_batches())
def test_mini_batches_are_equal_parts_of_the_step(batch):
    sizes = cut(batch).flatten().bincount(minlength=batch.mini_batches).tolist()
    assert sizes == [batch.prompts_per_step * batch.samples_per_prompt // batch.mini_batches] * batch.mini_batches


@given(NUMBERS, st.integers(1, 6), NUMBERS)
def test_whole_prompts_by_any_divisor_of_their_number(prompts, samples, mini_batches):
    batch = make_batch(prompts, samples, mini_batches, "prompts")
    if prompts % mini_batches:
        assert prompt_blocks_of(batch, samples) is None
    else:
        whole = torch.arange(mini_batches).repeat_interleave(prompts // mini_batches)
        assert torch.equal(cut(batch), whole[:, None].expand(prompts, samples))


@given(NUMBERS, st.integers(1, 6), NUMBERS)
def test_by_samples_every_prompt_is_in_as_many_mini_batches_as_can_be(prompts, samples, mini_batches):
    batch = make_batch(prompts, samples, mini_batches)
    possible = [
        parts
        for parts in range(1, samples + 1)
        if samples % parts == 0 and mini_batches % parts == 0 and prompts % (mini_batches // parts) == 0
    ]
    if not possible:
        assert prompt_blocks_of(batch, samples) is None
    else:
        assert {len(of_prompt.unique()) for of_prompt in cut(batch)} == {max(possible)}


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_by_samples_the_cut_is_a_run_of_equal_places_where_the_numbers_divide(prompts, samples, factor, several_blocks):
    """All samples, ordered by place in the group and then by group, are cut into equal runs."""
    prompts, mini_batches = (prompts * factor, samples * factor) if several_blocks else (prompts, samples)
    if not several_blocks and factor <= samples and samples % factor == 0:
        mini_batches = factor
    places, groups = torch.arange(samples), torch.arange(prompts)[:, None]
    runs = (places * prompts + groups) * mini_batches // (prompts * samples)
    assert torch.equal(cut(make_batch(prompts, samples, mini_batches)), runs)


@given(legal_batches(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_replicas_share_mini_batches_out_whatever_the_chunks(batch, num_replicas, num_chunks, epochs, rng):
    """Every sample is in one mini-batch, independent of its replica. Each replica has a share of each mini-batch."""
    blocks = prompt_blocks_of(batch, batch.samples_per_prompt)
    assert blocks is not None
    num_chunks *= blocks if rng.random() < 0.5 and blocks <= 4 else 1  # one must be a multiple of the other
    prompts, samples = batch.prompts_per_step, batch.samples_per_prompt
    if prompts % num_chunks or (num_chunks % blocks and blocks % num_chunks):
        return
    settings = {**batch.model_dump(), "epochs": epochs}
    mode = {"mode": "pipelined", "chunks": num_chunks} if num_chunks > 1 else {}
    config = make_config(batch=settings, schedule=mode)
    per_chunk = prompts // num_chunks
    replicas = [StepBatch(config) for _ in range(num_replicas)]
    shape = replicas[0].shape
    for chunk in range(num_chunks):
        tokens = torch.tensor([rng.randint(1, 9) for _ in range(per_chunk)])
        assigned = assign_groups(tokens, num_replicas, shape.chunk_blocks)
        for number, replica in enumerate(replicas):
            mine = torch.nonzero(assigned == number).flatten()
            groups = mine.repeat_interleave(samples)
            places = torch.arange(samples).repeat(len(mine))
            experience = packed_experience([(1, 1)] * len(groups)).with_fields(
                group_ids=groups, sample_ids=(chunk * per_chunk + groups) * samples + places
            )
            replica.add(chunk, experience)
    expected = cut(batch).flatten()
    cuts = [replica.mini_batches(replica.take()) for replica in replicas]
    for parts in cuts:
        assert len(parts) == batch.mini_batches * epochs == shape.updates_per_step
        for index, part in enumerate(parts):
            assert (expected[part.sample_ids] == index % batch.mini_batches).all()
        if per_chunk // shape.chunk_blocks >= num_replicas:
            assert all(part.num_samples for part in parts)
    for index in range(shape.updates_per_step):
        everywhere = torch.cat([parts[index].sample_ids for parts in cuts])
        assert len(everywhere) == prompts * samples // batch.mini_batches == len(everywhere.unique())


NAMES = [["a", "b"]] * 3


def test_equal_replicas_of_different_parts_are_fine() -> None:
    assert find_odd_rank([0, 1, 2, 3], [7, 8, 7, 8], [["a"], ["a", "b"]] * 2, [[1, 0], [5, 6], [1, 9], [5, 6]]) is None
    assert find_odd_rank([0, 1], [0, 1], [["a"], ["a"]], [[1], [2]]) is None, "no replicas"


def test_the_one_among_several_is_named_with_its_parameter() -> None:
    odd = find_odd_rank([4, 5, 6], [0, 0, 0], NAMES, [[1, 2], [1, 3], [1, 2]])
    assert str(odd) == "rank 5 holds other values of b than ranks 4, 6, which agree"


def test_of_two_nobody_knows_who_is_right() -> None:
    odd = find_odd_rank([4, 5], [0, 0], NAMES, [[1, 2], [3, 2]])
    assert str(odd) == "rank 5 and rank 4 hold different values of a, and either may be wrong"


@given(st.integers(3, 9), st.integers(0, 100), st.data())
def test_one_wrong_rank_is_found_wherever_it_is(count: int, value: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, count - 1))
    sums = [[value + (rank == wrong)] for rank in range(count)]
    odd = find_odd_rank(range(count), [0] * count, [["a"]] * count, sums)
    assert odd is not None and (odd.rank, odd.is_alone) == (wrong, True)
    assert odd.others == tuple(rank for rank in range(count) if rank != wrong)


def test_a_role_is_idle_while_none_of_its_tasks_works() -> None:
    now = [100.0]
    work = RoleWork(clock=lambda: now[0])
    work.add({"actor"}, 3.0)
    work.add({"actor", "rollout"}, 2.0)
    now[0] += 10
    assert work.metrics({"actor": 1, "rollout": 1, "reward": 1}) == {"perf/actor_idle": 0.5, "perf/rollout_idle": 0.8}
    now[0] += 4
    work.add({"rollout"}, 1.0)
    assert work.metrics({"actor": 1, "rollout": 1}) == {"perf/actor_idle": 1.0, "perf/rollout_idle": 0.75}


def test_utilisation_is_of_the_tasks_that_compute() -> None:
    now = [0.0]
    work = RoleWork(peak=8e12, clock=lambda: now[0])
    work.add({"actor"}, 2.0, operations=4e12, tokens=500)
    work.add({"actor"}, 5.0)
    now[0] = 10.0
    assert work.metrics({"actor": 8}) == {
        "perf/actor_idle": pytest.approx(0.3),
        "perf/actor_tokens_per_gpu_s": pytest.approx(250),
        "perf/actor_pflop": pytest.approx(0.032),
        "perf/actor_tflops": pytest.approx(2.0),
        "perf/actor_mfu": pytest.approx(0.25),
    }


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L4", None),
    ],
)
def test_the_peak_of_devices_that_are_known(name: str, tflops: float | None) -> None:
    gpu = known_gpu(name)
    assert (gpu and gpu.flops("bfloat16") / 1e12) == tflops


def test_a_rank_counts_its_share_of_its_replica_s_operations() -> None:
    architecture, operations = tiny_architecture(), Operations()
    operations.add(architecture, [3, 5], 2, backward=True)
    operations.add(architecture, [4], 1, backward=False)
    cost = forward_flops(architecture)
    assert operations.take() == (3 * cost.forward([3, 5]) / 2 + cost.forward([4]), 8 / 2 + 4)
    assert operations.take() == (0, 0)
    vision, grids = tiny_vision("qwen3_vl"), [(1, 8, 8), (1, 4, 4)]
    operations.add_images(vision, grids, 2, backward=True)
    operations.add_images(vision, grids[:1], 1, backward=False)
    assert operations.take() == (3 * vision_flops(vision, grids) / 2 + vision_flops(vision, grids[:1]), 0)


def test_a_step_counts_what_all_roles_computed_over_all_ranks_and_the_whole_step() -> None:
    step = {"perf/step_time_s": 2.0, "perf/actor_pflop": 0.03, "perf/rollout_pflop": 0.01, "perf/actor_mfu": 0.5}
    found = of_whole_job(step, num_ranks=4, peak=20e12)
    assert found == {"perf/tflops_per_gpu": pytest.approx(5.0), "perf/mfu": pytest.approx(0.25)}
    assert of_whole_job(step, num_ranks=4, peak=None).keys() == {"perf/tflops_per_gpu"}
    assert of_whole_job({"perf/step_time_s": 2.0}, num_ranks=4, peak=20e12) == {}
