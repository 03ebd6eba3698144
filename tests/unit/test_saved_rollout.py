"""What crosses a checkpoint of the rollout: it survives its file, and engines of any number share it out."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.checkpoint.run.files import Contents, read_contents, write_files
from rltrain.errors import CheckpointError
from rltrain.rollout.engine import Completion, PartialResponse, Request
from rltrain.rollout.stream.groups import FinishedGroup, Prompt, RunningGroup
from rltrain.rollout.stream.rollout_state import Consumed, Hand, RolloutState, deal

integers = st.integers(0, 2**63 - 1)
prompts = st.lists(st.integers(0, 200_000), min_size=1, max_size=5).map(tuple)


@st.composite
def drawn_tokens(draw: st.DrawFn) -> PartialResponse:
    length = draw(st.integers(1, 5))
    return PartialResponse(
        tuple(draw(st.lists(st.integers(0, 200_000), min_size=length, max_size=length))),
        tuple(draw(st.lists(st.floats(-1e3, 0), min_size=length, max_size=length))),
        tuple(draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))),
    )


def completion(draw: st.DrawFn, number: int) -> Completion:
    reason = draw(st.sampled_from(["stop", "length"]))
    return Completion(number, **vars(draw(drawn_tokens())), finish_reason=reason)


@st.composite
def groups(draw: st.DrawFn, position: int) -> RunningGroup | FinishedGroup:
    prompt, row = draw(prompts), draw(st.integers(0, 99))
    ids = range(position * 3, position * 3 + draw(st.integers(1, 3)))
    if draw(st.booleans()):
        return FinishedGroup(position, row, prompt, tuple(completion(draw, number) for number in ids))
    finished = draw(st.sets(st.sampled_from(ids), max_size=len(ids) - 1))
    requests = tuple(
        Request(number, prompt, draw(integers), None if number in finished else draw(st.none() | drawn_tokens()))
        for number in ids
    )
    return RunningGroup(
        Prompt(position, row, requests), {number: completion(draw, number) for number in sorted(finished)}
    )


@st.composite
def cuts(draw: st.DrawFn) -> list[RolloutState]:
    """What the engines of a run leave: each position has been handed over, is at one engine, or is free."""
    below = draw(st.integers(0, 20))
    fates = draw(st.lists(st.sampled_from(["handed over", "free", 0, 1, 2]), max_size=8))
    consumed = Consumed(below).after(below + i for i, fate in enumerate(fates) if fate == "handed over")
    held = [[draw(groups(below + i)) for i, fate in enumerate(fates) if fate == engine] for engine in range(3)]
    return [
        RolloutState(
            consumed,
            tuple(group for group in of_engine if isinstance(group, RunningGroup)),
            tuple(group for group in of_engine if isinstance(group, FinishedGroup)),
        )
        for of_engine in held
    ]


def positions(carried: RolloutState) -> list[int]:
    return [group.prompt.position for group in carried.begun] + [group.position for group in carried.drawn]


@given(st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=5))
def test_what_was_handed_over_is_a_set_of_positions(chunks):
    consumed, expected = Consumed(), set()
    for chunk in chunks:
        consumed, expected = consumed.after(chunk), expected.union(chunk)
        assert len(consumed) == len(expected)
        assert {position for position in range(20) if position in consumed} == expected
        assert consumed.below not in consumed and all(p > consumed.below for p in consumed.beyond)


@given(cuts())
def test_a_file_holds_all_of_it(saved):
    for carried in saved:
        contents = carried.contents()
        assert all(values.dtype in (torch.int64, torch.float64) for values in contents.tensors.values())
        assert RolloutState.from_contents(contents) == carried


def test_a_file_holds_it_on_the_disk_too(tmp_path: Path):
    group = RunningGroup(
        Prompt(7, 3, (Request(7, (5,), seed=2**63 - 1, drawn=PartialResponse((1,), (-0.1,), (4,))),)), {}
    )
    for name, carried in {"empty": RolloutState(), "full": RolloutState(Consumed(4, frozenset({6})), (group,))}.items():
        write_files(tmp_path, {name: carried.contents()})
        assert RolloutState.from_contents(read_contents(tmp_path / name)) == carried


@given(cuts(), st.integers(1, 4))
def test_every_position_goes_to_one_engine_whatever_their_number(saved, num_engines):
    hands = deal(saved, num_engines)
    (next_position,) = {hand.next_position for hand in hands}
    (consumed,) = {hand.carried.consumed for hand in hands}
    assert consumed == saved[0].consumed
    given_out = Counter(p for hand in hands for p in (*positions(hand.carried), *hand.returned))
    assert given_out == Counter(position for position in range(next_position) if position not in consumed)
    assert not any(position >= next_position for position in consumed.beyond)
    before = {
        p: group
        for carried in saved
        for p, group in zip(positions(carried), carried.begun + carried.drawn, strict=True)
    }
    after = {
        p: group
        for hand in hands
        for p, group in zip(positions(hand.carried), hand.carried.begun + hand.carried.drawn, strict=True)
    }
    assert after == before, "whole, and nothing that was begun is begun anew"
    assert all(hand.returned == tuple(sorted(hand.returned)) for hand in hands), "earlier ones first"


@given(cuts(), st.integers(1, 4))
def test_saving_what_was_dealt_out_changes_nothing(saved, num_engines):
    hands = deal(saved, num_engines)
    again = deal([hand.carried for hand in hands], num_engines)
    assert [hand.carried for hand in again] == [hand.carried for hand in hands]


def test_where_all_has_been_handed_over_the_stream_goes_on_from_there():
    assert deal([RolloutState(Consumed(12))] * 2, 3) == [Hand.at(12)] * 3


def test_files_of_different_checkpoints_are_refused():
    with pytest.raises(CheckpointError, match="do not agree"):
        deal([RolloutState(Consumed(4)), RolloutState(Consumed(8))], 2)
    with pytest.raises(CheckpointError, match="0 engines"):
        deal([], 2)
    group = FinishedGroup(5, 0, (1,), (Completion(5, (1,), (-0.5,), (0,), "stop"),))
    carried = RolloutState(Consumed(4), drawn=(group,))
    with pytest.raises(CheckpointError, match=r"more than once the groups at positions \[5\]"):
        deal([carried, carried], 2)
    with pytest.raises(CheckpointError, match=r"more than once the groups at positions \[5\]"):
        deal([replace(carried, consumed=Consumed(6))], 1)


def test_another_format_is_refused():
    contents = RolloutState().contents()
    with pytest.raises(CheckpointError, match="format 'rollout 0'; expected 'rollout 1'"):
        RolloutState.from_contents(Contents(contents.tensors, {"format": "rollout 0"}))
