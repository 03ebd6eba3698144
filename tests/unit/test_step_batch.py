"""A step's samples on one replica: put together from chunks, cut into mini-batches; what is reported of the updates."""

import math

import pytest
import torch

from rltrain.data.experience import Experience, mini_batch_of
from rltrain.roles.trained import StepBatch, summarize
from rltrain.training.trainable import SKIPPED
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import make_config


def chunk_of(groups: list[int], num_samples: int, first_id: int) -> Experience:
    """Samples of these groups of a chunk, with ids from `first_id` on and as many tokens as their place says."""
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
    assert whole.group_ids.tolist() == [0, 0, 3, 3, 5, 5, 6, 6], "a group of each chunk for itself"


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
    """As in a step in which only the critic learns."""
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
    assert [part.sample_ids.tolist() for part in parts] == [[10], [11], [20], [21]], "four groups a chunk, not all here"


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
