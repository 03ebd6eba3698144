"""How a step's samples are cut into mini-batches: every legal number of them, in chunks and over replicas."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.config.schema import Batch
from rltrain.data.experience import assign_groups, mini_batch_of
from rltrain.roles.trained import StepBatch
from rltrain.schedule.shape import prompt_blocks_of
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import make_config

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
    """Of at most 24 prompts with at most 6 samples each."""
    prompts, by, samples = draw(NUMBERS), draw(WAYS), draw(st.integers(1, 6))
    blocks = draw(st.sampled_from([n for n in range(1, prompts + 1) if prompts % n == 0]))
    parts = draw(st.sampled_from([n for n in range(1, samples + 1) if samples % n == 0])) if by == "samples" else 1
    return make_batch(prompts, samples, blocks * parts, by)


def cut(batch: Batch) -> Tensor:
    """[prompts, samples] the mini-batch of each sample of a step."""
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
    """All samples ordered by their place in the group, then by group, are cut into equal runs."""
    prompts, mini_batches = (prompts * factor, samples * factor) if several_blocks else (prompts, samples)
    if not several_blocks and factor <= samples and samples % factor == 0:
        mini_batches = factor
    places, groups = torch.arange(samples), torch.arange(prompts)[:, None]
    runs = (places * prompts + groups) * mini_batches // (prompts * samples)
    assert torch.equal(cut(make_batch(prompts, samples, mini_batches)), runs)


@given(legal_batches(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_replicas_share_mini_batches_out_whatever_the_chunks(batch, num_replicas, num_chunks, epochs, rng):
    """Every sample is in one mini-batch, the same wherever it is; each replica has a share of each."""
    blocks = prompt_blocks_of(batch, batch.samples_per_prompt)
    assert blocks is not None
    num_chunks *= blocks if rng.random() < 0.5 and blocks <= 4 else 1  # chunks and blocks have to fit in one another
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
