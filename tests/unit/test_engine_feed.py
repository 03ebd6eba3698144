"""Turns on an engine, whatever the order in which they come, are given up, and are suspended."""

import asyncio
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rltrain.data.tokenizer import TextDecoder
from rltrain.endpoint.engine_feed import EngineBusy, EngineFeed, EngineGone, EngineMailbox
from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.groups import Mail, PendingTurn
from rltrain.rollout.sample import Sample, Status
from tests.talking_engine import CONTEXT_TOKENS, TalkingEngine, byte_tokenizer
from tests.through_json import through_json

SAMPLINGS = [SamplingParams(temperature, 1.0, 0, CONTEXT_TOKENS, (257,)) for temperature in (0.0, 0.5, 1.0)]
TEXT = "abcdefghijklmnopqrstuvwxyz"


def feed_of(say: Callable[[str], str] = lambda context: TEXT, slice_steps: int = 7) -> tuple[EngineFeed, TalkingEngine]:
    engine = TalkingEngine(byte_tokenizer(), say, num_slots=3)
    return EngineFeed(engine, TextDecoder(byte_tokenizer()), EngineMailbox(100), slice_steps), engine


async def let_run() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def step(feed: EngineFeed, *others: EngineFeed) -> None:
    """On the engine's first rank, and on `others` of its ranks, which are told what has come."""
    mail = feed.mail() or Mail()
    feed.begin_step(mail)
    for other in others:
        other.begin_step(through_json(mail))
    for one in (feed, *others):
        assert one.end_step(one.engine.step()) == []


turns = st.lists(
    st.tuples(
        st.integers(0, 30),  # the step at which it comes
        st.sampled_from(SAMPLINGS),
        st.one_of(st.none(), st.integers(1, 30)),  # its limit
        st.sampled_from([(), ("f",), ("zz",), ("xy", "mno")]),  # its stop strings
        st.one_of(st.none(), st.integers(1, 20)),  # given up so many steps later
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(turns=turns, suspended_at=st.sets(st.integers(0, 60), max_size=5))
def test_every_turn_is_drawn_to_its_end_or_given_up(turns: list, suspended_at: set[int]) -> None:
    async def run() -> None:
        feed, engine = feed_of()
        other_engine = TalkingEngine(byte_tokenizer(), engine.say, num_slots=3)
        other = EngineFeed(other_engine, TextDecoder(byte_tokenizer()), slice_steps=feed.slice_steps)
        tasks: dict[int, asyncio.Task[Sample]] = {}
        for now in range(1000):
            ask(feed.mailbox, turns, now, tasks)
            await let_run()
            if now in suspended_at:
                assert feed.take_back(engine.suspend()) == other.take_back(other_engine.suspend()) == []
            step(feed, other)
            assert engine.log == other_engine.log and engine.num_drawn_tokens == other_engine.num_drawn_tokens
            await let_run()
            if len(tasks) == len(turns) and all(task.done() for task in tasks.values()):
                break
        step(feed, other)
        assert feed.num_turns == other.num_turns == engine.num_unfinished == other_engine.num_unfinished == 0
        for number, (_, _, limit, stop, _) in enumerate(turns):
            if not tasks[number].cancelled():
                check(tasks[number].result(), limit, stop)

    asyncio.run(run())


def ask(mailbox: EngineMailbox, turns: list, now: int, tasks: dict[int, asyncio.Task[Sample]]) -> None:
    """Have the turns come, and be given up, that do at this step."""
    for number, (comes, sampling, limit, stop, stays) in enumerate(turns):
        if comes == now:
            sample = Sample(number, (1, 2), number, turn_limit=limit)
            turn = PendingTurn(sample, sampling, stop, is_watched=number % 2 == 0)
            tasks[number] = asyncio.ensure_future(mailbox.draw(turn, lambda sample: None))
        if stays is not None and comes + stays == now:
            tasks[number].cancel()


def check(sample: Sample, limit: int | None, stop: tuple[str, ...]) -> None:
    """It says the alphabet as far as its limit and its stop strings let it."""
    ends = [TEXT.index(string) + len(string) for string in stop if string in TEXT]
    stopped = min([*ends, len(TEXT) + 1])
    length = min(stopped, limit or stopped)
    assert byte_tokenizer().decode(sample.tokens, skip_special_tokens=True) == TEXT[: min(length, len(TEXT))]
    assert len(sample.tokens) == length and sample.turns == (length,)
    assert sample.status == (Status.STOPPED if length == stopped else Status.TRUNCATED)


def test_a_mailbox_has_room_for_so_many_and_tells_of_its_end() -> None:
    async def run() -> None:
        mailbox = EngineMailbox(1)
        first = asyncio.ensure_future(mailbox.draw(PendingTurn(Sample(0, (1,), 0), SAMPLINGS[0])))
        await let_run()
        with pytest.raises(ValueError, match="under way"):
            await mailbox.draw(PendingTurn(Sample(0, (1,), 0), SAMPLINGS[0]))
        with pytest.raises(EngineBusy):
            await mailbox.draw(PendingTurn(Sample(1, (1,), 0), SAMPLINGS[0]))
        mailbox.close("over")
        with pytest.raises(EngineGone, match="over"):
            await first
        with pytest.raises(EngineGone, match="over"):
            await mailbox.draw(PendingTurn(Sample(2, (1,), 0), SAMPLINGS[0]))

    asyncio.run(run())


def test_what_an_engine_refuses_fails_alone() -> None:
    async def run() -> None:
        feed, _ = feed_of()
        wrong = asyncio.ensure_future(feed.mailbox.draw(PendingTurn(Sample(0, (1,) * 5000, 0), SAMPLINGS[0])))
        right = asyncio.ensure_future(feed.mailbox.draw(PendingTurn(Sample(1, (1,), 0), SAMPLINGS[0])))
        await let_run()
        while not right.done():
            step(feed)
            await let_run()
        assert isinstance(wrong.exception(), Exception) and "5000 tokens" in str(wrong.exception())

    asyncio.run(run())


def test_mail_is_the_same_on_all_ranks() -> None:
    sampling = SamplingParams(1.0, 0.9, 5, 10, (257,), ("x",), GreedyPlaces(1, 4))
    sample = Sample(3, (1, 2), 7).drawn([4], [-0.5], [1], Status.STOPPED).observed([5], turn_limit=9)
    mail = Mail((PendingTurn(sample, sampling, ("y",), True),), frozenset({1}), frozenset({2, 8}))
    assert through_json(mail) == mail


def test_an_engine_is_told_which_conversations_are_over() -> None:
    feed, engine = feed_of()
    feed.mailbox.forget([3, 4])
    feed.begin_step(feed.mail() or Mail())
    assert engine.forgotten == {3, 4}


def test_what_others_draw_on_the_engine_stays_theirs() -> None:
    feed, engine = feed_of(lambda context: "x")
    engine.submit([Sample(77, (1,), 0)], SAMPLINGS[0])
    assert feed.take_back(engine.suspend()) == [Sample(77, (1,), 0)]
    engine.submit([Sample(78, (1,), 0)], SAMPLINGS[0])
    feed.begin_step(feed.mail() or Mail())
    engine.step()
    assert [sample.id for sample in feed.end_step(engine.step())] == [78]
