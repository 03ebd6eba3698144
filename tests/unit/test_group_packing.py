"""Finished groups as experience, token by token."""

from dataclasses import replace

import torch

from rltrain.data.experience import FIELDS
from rltrain.rollout.sample import Sample, SampleGroup, Status, pack_groups

LONG = Sample(8, (1, 2), 0).drawn((5, 6, 7), (-0.5, -0.25, -1.0), (2, 2, 3), Status.TRUNCATED)
SHORT = Sample(9, (1, 2), 0).drawn((6,), (-2.0,), (3,), Status.STOPPED)
OTHER = Sample(2, (3,), 0).drawn((4, 4), (-3.0, -4.0), (1, 1), Status.STOPPED)
GROUPS = [SampleGroup(4, 17, (LONG, SHORT)), SampleGroup(1, 30, (OTHER,))]


def test_samples_follow_each_other_with_their_prompts():
    experience = pack_groups(GROUPS, [1, 2, 4])
    assert experience.tokens.tolist() == [1, 2, 5, 6, 7, 1, 2, 6, 3, 4, 4]
    assert experience.response_mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1]
    assert experience.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, -1.0, 0, 0, -2.0, 0, -3.0, -4.0]
    assert experience.policy_version.tolist() == [0, 0, 2, 2, 3, 0, 0, 3, 0, 1, 1], "of each token"
    assert experience.lengths.tolist() == [5, 3, 3]


def test_only_what_the_model_drew_is_trained_on():
    """Tokens of a tool, say, stand between those of the model."""
    mixed = replace(LONG, loss_mask=(True, False, True))
    experience = pack_groups([SampleGroup(4, 17, (mixed, SHORT))], [4])
    assert experience.tokens.tolist() == [1, 2, 5, 6, 7, 1, 2, 6]
    assert experience.response_mask.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1]


def test_samples_are_known_by_id_group_row_and_end():
    experience = pack_groups(GROUPS, [1, 2, 4])
    assert experience.sample_ids.tolist() == [8, 9, 2]
    assert experience.group_ids.tolist() == [2, 2, 0]
    assert experience.prompt_ids.tolist() == [17, 17, 30]
    assert experience.truncated.tolist() == [True, False, False]


def test_no_groups_are_experience_too():
    """An engine that finished nothing of a chunk has the same fields to send as the others."""
    nothing, something = pack_groups([], []), pack_groups(GROUPS, [1, 4])
    assert (nothing.num_samples, nothing.num_tokens) == (0, 0)
    assert nothing.present() == something.present()
    for experience in (nothing, something):
        for name, values in experience.columns().items():
            assert values.dtype is FIELDS[name][0], name
            assert values.shape == torch.Size(
                [experience.num_samples if FIELDS[name][1] == "sample" else len(experience.tokens)]
            )
