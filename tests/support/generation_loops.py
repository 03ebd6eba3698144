"""Generation loops of several engines without models."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch.distributed as dist

from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.generation_loop import (
    CompletionLog,
    Finished,
    GenerationLoop,
    LeaderDecisions,
    PromptAssignment,
    SharedAssignment,
    StaticAssignment,
    StreamRules,
)
from rltrain.rollout.groups import PromptGroups, Selection
from rltrain.rollout.rollout_state import EngineStart
from rltrain.rollout.sample import Sample, SampleGroup
from tests.support.scripted_engine import ScriptedEngine
from tests.support.shared_store import ShortPatience, on_ranks

NUM_SAMPLES = 2
Chunk = tuple[list[Finished], list[SampleGroup]]
FRESH = EngineStart()
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=99, stop_token_ids=())


def prompt_groups(length_of: Callable[[int], int], num_samples: int = 2, num_slots: int = 4) -> PromptGroups:
    """Returns groups at stream positions: the prompt has position + 1 tokens, its row is 100 + position."""

    def group_at(position: int) -> SampleGroup:
        ids = range(position * num_samples, (position + 1) * num_samples)
        prompt = tuple(range(position + 1))
        return SampleGroup(position, 100 + position, tuple(Sample(number, prompt, seed=number) for number in ids))

    return PromptGroups(ScriptedEngine(length_of, num_slots), SAMPLING, group_at, num_samples)


def lengths_in_waves(number: int) -> int:
    """Returns the length of sample `number`: long-tailed, 1 to 40 tokens."""
    return 40 if number % 14 == 0 else 1 + number * 7 % 11


@dataclass(kw_only=True)
class Setting:
    """The settings shared by all engines of a test. Each step takes `per_step` groups of the stream."""

    per_step: int = 6
    num_chunks: int = 1
    num_engines: int = 1
    partial: bool = False
    length_of: Callable[[int], int] = lengths_in_waves
    step_s: Callable[[int], float] = lambda engine: 0.0
    shared: bool = True
    num_slots: int = 4
    versions: list[int] = field(default_factory=list)
    """Policy versions, taken by `sync` one after the other as soon as they exist."""

    num_steps: int = 1
    ahead: int = 0
    """Number of groups of later steps that may be started."""
    max_staleness: int | None = None
    shares_prefixes: bool = False

    @property
    def rules(self) -> StreamRules:
        return StreamRules(
            self.num_steps * self.per_step,
            self.per_step,
            self.num_chunks,
            "run" if self.partial else None,
            num_ahead=self.ahead,
            max_staleness=self.max_staleness,
        )

    def loop(
        self, engine: int, store: dist.Store, start: EngineStart = FRESH, selection: Selection | None = None
    ) -> GenerationLoop:
        groups = prompt_groups(self.length_of, NUM_SAMPLES, self.num_slots)
        assignment: PromptAssignment = StaticAssignment(engine, self.num_engines, start.next_position, start.returned)
        if self.shared:
            assignment = SharedAssignment(store, start.next_position, start.returned)

        def sync() -> None:
            groups.engine.policy_version = self.versions.pop(0)

        rules = replace(self.rules, done=start.state.consumed)
        loop = GenerationLoop(
            groups,
            assignment,
            CompletionLog(store, rules.per_chunk, self.num_engines, rules.chunks_per_log),
            LeaderDecisions(None),
            ShortPatience(),
            SimpleNamespace(advance=lambda: time.sleep(self.step_s(engine))),
            rules,
            engine=engine,
            ranks=[other for other in range(self.num_engines) if other != engine],
            in_flight=SimpleNamespace(is_due=lambda: bool(self.versions), join=sync),
            selection=selection,
            shares_prefixes=self.shares_prefixes,
        )
        loop.resume(start.state)
        return loop

    def run(self, store: dist.TCPStore) -> list[list[Chunk]]:
        """Returns, by engine, its part of every chunk of every step."""

        def engine(rank: int, own: dist.Store) -> list[Chunk]:
            loop = self.loop(rank, own)
            return [loop.run(step, chunk) for step in range(self.num_steps) for chunk in range(self.num_chunks)]

        return on_ranks(store, engine, self.num_engines)


def positions(groups: Iterable[Finished | SampleGroup]) -> list[int]:
    return [group.position for group in groups]
