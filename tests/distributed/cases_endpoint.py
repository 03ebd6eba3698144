"""Turns of an endpoint on an engine of several ranks. Only the first rank has the mailbox."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.engine_feed import EngineFeed, EngineMailbox, Mail, PendingTurn
from rltrain.rollout.generation_loop import LeaderDecision, LeaderDecisions
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from rltrain.runtime.machine import JobThread
from tests.support.rollout_models import LetterTokenizer, load_engine
from tests.through_json import written

SAMPLINGS = (SamplingParams(1.0, 1.0, 0, 60, (3,)), SamplingParams(0.7, 0.9, 10, 60, (3,)))
NUM_CONVERSATIONS = 9
NUM_TURNS = 3
TURN_TOKENS = 12
OBSERVED = (7, 9, 11)
SUSPENDED_AT, UPDATED_AT = 15, 25


async def conversation(mailbox: EngineMailbox, number: int) -> list[Sample]:
    """Holds a conversation and returns its turns. Every third conversation requests each turn twice and drops the first
    request."""
    sample, said = Sample(number, (number, 2), number, turn_limit=TURN_TOKENS, goes_on=True), []
    stop = ("C", "]", "KK", "S", "m") if number % 2 else ()
    for _ in range(NUM_TURNS):
        turn = PendingTurn(sample, SAMPLINGS[number % len(SAMPLINGS)], stop, is_watched=number % 4 == 0)
        if number % 3 == 0:
            hasty = asyncio.ensure_future(mailbox.draw(turn))
            await asyncio.sleep(0.002)
            hasty.cancel()
            await asyncio.gather(hasty, return_exceptions=True)
        said.append(await mailbox.draw(turn, lambda sample: None))
        sample = said[-1].observed(OBSERVED, turn_limit=len(said[-1].tokens) + len(OBSERVED) + TURN_TOKENS)
    mailbox.forget([number])
    return said


def converse(path: str) -> dict[str, Any]:
    """Returns the conversations, on the rank with the mailbox, and the samples of this rank's engine."""
    rank, group = dist.get_rank(), dist.group.WORLD
    grid = Grid(tuple(range(dist.get_world_size())), tp=dist.get_world_size())
    engine, _ = load_engine(Path(path), grid=grid, rank=rank, tp_group=group, max_running_requests=4)
    decisions = LeaderDecisions(group)
    mailbox = EngineMailbox(64) if decisions.is_leader else None
    feed = EngineFeed(engine, LetterTokenizer(), mailbox, slice_steps=5)
    said: list[Sample] = []

    async def talk() -> None:
        assert mailbox is not None
        for turns in await asyncio.gather(*(conversation(mailbox, number) for number in range(NUM_CONVERSATIONS))):
            said.extend(turns)

    clients = JobThread(target=lambda: asyncio.run(talk()))
    if decisions.is_leader:
        clients.start()

    def decide() -> LeaderDecision:
        are_talking = clients.is_alive()
        mail = feed.mail()
        return LeaderDecision(mail=mail, done=not are_talking and mail is None)

    log, num_steps = [], 0
    while not (decision := decisions.share(decide() if decisions.is_leader else LeaderDecision())).done:
        if num_steps == SUSPENDED_AT:
            assert feed.take_back(engine.suspend()) == []
        feed.begin_step(decision.mail or Mail())
        if num_steps == UPDATED_AT:
            engine.begin_update()
            engine.end_update(1)
        num_steps += bool(engine.num_unfinished)
        drawn = engine.step()
        assert feed.end_step(drawn) == []
        log += [*map(written, drawn)]
    assert feed.num_turns == engine.num_unfinished == 0
    return {"said": [*map(written, said)], "log": log}


def drawn_alone(path: Path, said: Sequence[Sample]) -> list[Sample]:
    """Generates each last turn again on an engine of one rank."""
    engine, _ = load_engine(path)
    return [
        engine.generate([replace(before, turn_limit=len(sample.tokens))], SAMPLINGS[sample.id % len(SAMPLINGS)])[0]
        for sample in said
        for before in [sample.first(len(sample.tokens) - len(sample.last_turn))]
    ]
