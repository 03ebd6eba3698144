"""Prompt groups on one engine: a group is finished when all of its samples are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rltrain.rollout.engine import Completion, Engine, Request, SamplingParams


@dataclass(frozen=True)
class FinishedGroup:
    """All samples of one prompt. `position` is its place in the stream of prompts, `row` that in the prompt file."""

    position: int
    row: int
    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        """Of prompts and responses."""
        return len(self.prompt) * len(self.completions) + self.num_response_tokens

    @property
    def num_response_tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)


@dataclass(frozen=True)
class Prompt:
    """What a group starts from: a request per sample, numbered position * num_samples + sample."""

    position: int
    row: int
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class RunningGroup:
    """A group with samples still to draw. `completions` are those that are drawn, by id."""

    prompt: Prompt
    completions: dict[int, Completion]


class PromptGroups:
    """What an engine has begun of the groups that `prompt_at` describes, and what it has finished of them.

    Ranks of one engine make equal calls in one order.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingParams, prompt_at: Callable[[int], Prompt], num_samples: int
    ) -> None:
        self.engine, self.sampling, self.prompt_at, self.num_samples = engine, sampling, prompt_at, num_samples
        self.begun: dict[int, RunningGroup] = {}
        """By position."""
        self.suspended: list[Request] = []

    @property
    def num_wanted(self) -> int:
        """Groups that could start at once."""
        return self.engine.num_free_slots // self.num_samples or int(self.engine.num_unfinished == 0)

    def start(self, positions: Sequence[int]) -> None:
        """Begin these groups, after those that were suspended."""
        requests, self.suspended = self.suspended, []
        for position in positions:
            prompt = self.prompt_at(position)
            self.begun[position] = RunningGroup(prompt, {})
            requests += prompt.requests
        if requests:
            self.engine.submit(requests, self.sampling)

    def step(self) -> list[FinishedGroup]:
        """One decode step; the groups that it finished."""
        finished = []
        for completion in self.engine.step():
            position = completion.id // self.num_samples
            group = self.begun[position]
            group.completions[completion.id] = completion
            if len(group.completions) == self.num_samples:
                del self.begun[position]
                requests = group.prompt.requests
                in_order = tuple(group.completions[request.id] for request in requests)
                finished.append(FinishedGroup(position, group.prompt.row, requests[0].prompt, in_order))
        return finished

    def suspend(self) -> None:
        """Leave the engine; the next `start` goes on with what is unfinished."""
        self.suspended += self.engine.suspend()

    def carried(self) -> tuple[RunningGroup, ...]:
        """Leave the engine as `suspend` does; what is begun, each request with what it has drawn so far."""
        self.suspend()
        unfinished = {request.id: request for request in self.suspended}
        return tuple(
            RunningGroup(
                replace(
                    group.prompt,
                    requests=tuple(unfinished.get(request.id, request) for request in group.prompt.requests),
                ),
                dict(group.completions),
            )
            for group in self.begun.values()
        )

    def resume(self, carried: Sequence[RunningGroup]) -> None:
        """Go on with groups that were begun elsewhere: the next `start` submits what of them is unfinished."""
        for group in carried:
            self.begun[group.prompt.position] = RunningGroup(group.prompt, dict(group.completions))
            self.suspended += [request for request in group.prompt.requests if request.id not in group.completions]
