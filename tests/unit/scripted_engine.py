"""An engine without a model: every request draws as many tokens as a script says, one per step."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rltrain.errors import SyncError
from rltrain.rollout.engine import Completion, PartialResponse, Request, SamplingParams

NOTHING = PartialResponse((), (), ())


class ScriptedEngine:
    """`length_of(request id)` is the length of its response. Token t of a request is 1000 * id + t."""

    def __init__(self, length_of: Callable[[int], int], num_slots: int = 4) -> None:
        self.length_of, self.num_slots = length_of, num_slots
        self.policy_version: int | None = 0
        self.unfinished: list[Request] = []
        self.num_steps = 0
        self.started: list[int] = []
        """Ids of the requests submitted, again whenever they come back."""

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished)

    @property
    def num_free_slots(self) -> int:
        return max(self.num_slots - len(self.unfinished), 0)

    def begin_update(self) -> None:
        self.policy_version = None

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        ids = [request.id for request in (*self.unfinished, *requests)]
        assert len(set(ids)) == len(ids), f"submitted twice: {ids}"
        self.started += [request.id for request in requests]
        self.unfinished += requests

    def step(self) -> list[Completion]:
        if self.policy_version is None:
            raise SyncError("the weights are incomplete")
        self.num_steps += 1
        running = [self._draw(request) for request in self.unfinished[: self.num_slots]]
        self.unfinished[: self.num_slots] = running
        done = [request for request in running if len(request.drawn.tokens) == self.length_of(request.id)]
        self.unfinished = [request for request in self.unfinished if request not in done]
        return [Completion(request.id, **vars(request.drawn), finish_reason="stop") for request in done]

    def suspend(self) -> list[Request]:
        suspended, self.unfinished = self.unfinished, []
        return suspended

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        raise NotImplementedError("nothing under test calls it")

    def release_cache(self) -> None:
        assert not self.unfinished

    def _draw(self, request: Request) -> Request:
        drawn = request.drawn or NOTHING
        token = 1000 * request.id + len(drawn.tokens)
        assert self.policy_version is not None
        grown = PartialResponse(
            (*drawn.tokens, token), (*drawn.logprobs, -0.5), (*drawn.policy_versions, self.policy_version)
        )
        return replace(request, drawn=grown)
