"""Trajectories that an environment gives for its episode, in the place of what was drawn turn by turn."""

from collections.abc import Sequence
from dataclasses import replace

from rltrain.data.experience import SIBLINGS_APART
from rltrain.environments.interface import Trajectory
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.stream.episodes import CURRENT_VERSION, Answer, Unusable

STATUS = {
    "completed": Status.STOPPED,
    "truncated": Status.TRUNCATED,
    "aborted": Status.ABORTED,
    "failed": Status.FAILED,
}


def told_trajectories(sample: Sample, known: Sequence[Sample], told: Sequence[Trajectory]) -> Answer:
    """The end of the episode of `sample`, of which the engine has drawn the `known` trajectories.

    Raises Unusable for one that is neither known nor comes with log-probs.
    """
    samples = []
    for number, trajectory in enumerate(told):
        recorded = next((one for one in known if one.context == trajectory.ids), None)
        if recorded is None and trajectory.logprobs is None:
            raise Unusable(f"trajectory {number} of its environment was not drawn here, and comes without log-probs")
        made = _recorded(recorded, trajectory) if recorded else _as_told(sample, trajectory)
        samples.append(replace(made, id=sample.episode + number * SIBLINGS_APART))
    return Answer(sample.id, samples[0].status, trajectories=tuple(samples))


def _recorded(sample: Sample, trajectory: Trajectory) -> Sample:
    """`sample` with what the environment says of it, from where the response begins for that."""
    count = trajectory.num_response_tokens
    first = max(len(sample.tokens) - count, 0)
    mask = sample.loss_mask[first:] if trajectory.loss_mask is None else trajectory.loss_mask
    return replace(
        sample,
        prompt=sample.prompt + sample.tokens[:first],
        tokens=sample.tokens[first:],
        logprobs=sample.logprobs[first:],
        policy_versions=sample.policy_versions[first:],
        loss_mask=_masked(mask, len(sample.tokens) - first, trajectory.trained_on),
        status=STATUS[trajectory.status],
        turns=(len(sample.tokens) - first,),
        turn_rewards=(trajectory.reward or 0.0,),
        turn_limit=None,
        goes_on=False,
    )


def _as_told(sample: Sample, trajectory: Trajectory) -> Sample:
    count = trajectory.num_response_tokens
    assert trajectory.logprobs is not None
    mask = (True,) * count if trajectory.loss_mask is None else trajectory.loss_mask
    return Sample(
        sample.id,
        trajectory.ids[: len(trajectory.ids) - count],
        sample.seed,
        tokens=trajectory.ids[len(trajectory.ids) - count :],
        logprobs=tuple(trajectory.logprobs),
        policy_versions=(CURRENT_VERSION,) * count,
        loss_mask=_masked(mask, count, trajectory.trained_on),
        status=STATUS[trajectory.status],
        turns=(count,),
        turn_rewards=(trajectory.reward or 0.0,),
    )


def _masked(mask: Sequence[bool], count: int, trained_on: bool) -> tuple[bool, ...]:
    """The last `count` of it, or nothing."""
    return tuple(mask[len(mask) - count :]) if trained_on else (False,) * count
