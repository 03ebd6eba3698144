"""Scored samples for people to read."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rltrain.data.experience import Experience
from rltrain.rewards.scorer import Part
from rltrain.roles.scorables import Scorables


def sample_records(source: Scorables, scored: Experience, step: int, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """What JSON can write of each of the samples, which were drawn for the prompts of `source`; of several `parts` of
    the reward, what each gave. `rendered_prompt` is what the model was shown before it first drew, where that is not
    the row's prompt."""
    versions = scored.policy_version.split(scored.lengths.tolist())
    masks = scored.response_mask.split(scored.lengths.tolist())
    samples = zip(source.of(scored, step), scored.rewards.tolist(), versions, masks, strict=True)
    for number, (sample, reward, version, mask) in enumerate(samples):
        record = {
            "step": step,
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "reward": reward,
            "length": int(mask.sum()),
            "policy_version_min": min(version[mask].tolist(), default=None),
            "policy_version_max": max(version[mask].tolist(), default=None),
        }
        rendered = source.rendered_prompt(scored, number)
        if rendered not in (None, sample.prompt):
            record["rendered_prompt"] = rendered
        if len(parts) > 1:
            given = zip(parts, scored.reward_parts[number].tolist(), strict=True)
            record["rewards"] = {part.title: None if math.isnan(value) else value for part, value in given}
        if len(source.dataset.sources) > 1:
            record["source"] = source.dataset.source_of(int(scored.prompt_ids[number]))
        if turns := source.conversation(scored, number):
            record["turns"] = turns
        yield record
