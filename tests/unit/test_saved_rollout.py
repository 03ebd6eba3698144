"""What crosses a checkpoint of the rollout: it survives its file, and engines of any number share it out."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.checkpoint.run_files import Contents, read_contents, write_files
from rltrain.errors import CheckpointError
from rltrain.rollout.rollout_state import Consumed, EngineStart, RolloutState, share_out
from rltrain.rollout.sample import RecordedRouting, Sample, SampleGroup, Status

integers = st.integers(0, 2**63 - 1)
prompts = st.lists(st.integers(0, 200_000), min_size=1, max_size=5).map(tuple)


@st.composite
def samples(draw: st.DrawFn, number: int, prompt: tuple[int, ...], status: Status) -> Sample:
    """Tokens that the model drew and tokens that it did not draw are mixed."""
    length = draw(st.integers(status != Status.PENDING, 5))

    def per_token(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    turns = tuple(sorted(draw(st.sets(st.integers(1, length)) if length else st.just(set()))))
    return Sample(
        number,
        prompt,
        draw(integers),
        per_token(st.integers(0, 200_000)),
        per_token(st.floats(-1e3, 0)),
        per_token(st.integers(0, 9)),
        per_token(st.booleans()),
        status,
        turns,
        tuple(draw(st.lists(st.floats(-10, 10), max_size=len(turns)))),
        draw(st.none() | st.integers(0, 99)),
        draw(st.booleans()),
        routing=routing_of(number, draw(st.integers(0, len(prompt) + length))),
    )


def routing_of(number: int, num_tokens: int) -> RecordedRouting | None:
    """In two layers, of three experts each."""
    experts = np.arange(number, number + num_tokens * 6).reshape(-1, 2, 3) % 128
    return RecordedRouting(experts.astype(np.int8)) if num_tokens else None


@st.composite
def groups(draw: st.DrawFn, position: int) -> SampleGroup:
    prompt, row = draw(prompts), draw(st.integers(0, 99))
    statuses = draw(st.lists(st.sampled_from(Status), min_size=1, max_size=3))
    return SampleGroup(
        position, row, tuple(draw(samples(position * 3 + i, prompt, status)) for i, status in enumerate(statuses))
    )


@st.composite
def cuts(draw: st.DrawFn) -> list[RolloutState]:
    """What the engines of a run leave: each position has been handed over, is at one engine, or is free."""
    below = draw(st.integers(0, 20))
    fates = draw(st.lists(st.sampled_from(["handed over", "dropped", "free", 0, 1, 2, "dropped by 1"]), max_size=8))
    dropped = [below + i for i, fate in enumerate(fates) if fate == "dropped"]
    consumed = Consumed(below).after((below + i for i, fate in enumerate(fates) if fate == "handed over"), dropped)
    handed_over = [position for position in range(below + len(fates)) if position in consumed.without(dropped)]
    steps = range(len(handed_over) // 2)
    ahead = {step: tuple(handed_over[2 * step : 2 * step + 2]) for step in steps[-draw(st.integers(1, 3)) :]}
    held = [[draw(groups(below + i)) for i, fate in enumerate(fates) if fate == engine] for engine in range(3)]
    unseen = tuple(below + i for i, fate in enumerate(fates) if fate == "dropped by 1")
    return [
        RolloutState(
            consumed,
            ahead,
            tuple(group for group in of_engine if not group.is_finished),
            tuple(group for group in of_engine if group.is_finished),
            {
                group.position: draw(st.text(max_size=3))
                for group in of_engine
                if group.is_finished and draw(st.booleans())
            },
            unseen if engine == 1 else (),
        )
        for engine, of_engine in enumerate(held)
    ]


@given(st.sets(st.integers(0, 30)), st.data())
def test_positions_that_are_open_are_numbered(taken, data):
    consumed = Consumed().after(taken)
    still_open = [position for position in range(60) if position not in taken]
    for number, position in enumerate(still_open[:25]):
        assert consumed.open_position(number) == position
        assert consumed.num_open_before(position) == number
    again = data.draw(st.sets(st.sampled_from(sorted(taken)))) if taken else set()
    assert consumed.without(again) == Consumed().after(taken - again)


def positions(state: RolloutState) -> list[int]:
    return [group.position for group in state.begun + state.drawn]


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
    for state in saved:
        contents = state.contents()
        assert all(
            values.dtype in (torch.int64, torch.float64, torch.bool, torch.uint8, torch.int8)
            for values in contents.tensors.values()
        )
        assert RolloutState.from_contents(contents) == state


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_a_file_holds_it_on_the_disk_too(tmp_path: Path, dtype: type[np.signedinteger]):
    sample = Sample(7, (5,), seed=2**63 - 1).drawn((1,), (-0.1,), (4,)).routed(np.full((1, 3, 2), 99, dtype))
    group = SampleGroup(7, 3, (sample,))
    for name, state in {
        "empty": RolloutState(),
        "full": RolloutState(Consumed(4, frozenset({6})), {2: (3, 6)}, (group,)),
    }.items():
        write_files(tmp_path, {name: state.contents()})
        assert RolloutState.from_contents(read_contents(tmp_path / name)) == state


@given(cuts(), st.integers(1, 4))
def test_every_position_goes_to_one_engine_whatever_their_number(saved, num_engines):
    starts = share_out(saved, num_engines)
    (next_position,) = {start.next_position for start in starts}
    (consumed,) = {start.state.consumed for start in starts}
    unseen = [position for state in saved for position in state.unseen]
    assert consumed == saved[0].consumed.after((), unseen)
    assert consumed.num_handed_over == saved[0].consumed.num_handed_over
    given_out = Counter(p for start in starts for p in (*positions(start.state), *start.returned))
    assert given_out == Counter(position for position in range(next_position) if position not in consumed)
    assert not any(position >= next_position for position in consumed.beyond)
    before = {p: group for state in saved for p, group in zip(positions(state), state.begun + state.drawn, strict=True)}
    after = {
        p: group
        for start in starts
        for p, group in zip(positions(start.state), start.state.begun + start.state.drawn, strict=True)
    }
    assert after == before, "whole, and nothing that was begun is begun anew"
    records = {p: record for start in starts for p, record in start.state.records.items()}
    assert records == {p: record for state in saved for p, record in state.records.items()}
    assert all(start.state.records.keys() <= {*positions(start.state)} for start in starts)
    assert all(start.returned == tuple(sorted(start.returned)) for start in starts), "earlier ones first"


@given(cuts(), st.integers(1, 4))
def test_saving_what_was_dealt_out_changes_nothing(saved, num_engines):
    starts = share_out(saved, num_engines)
    again = share_out([start.state for start in starts], num_engines)
    assert [start.state for start in again] == [start.state for start in starts]


@given(cuts(), st.integers(1, 4), st.integers(0, 12))
def test_a_run_that_draws_steps_again_finds_open_what_they_took(saved, num_engines, step):
    """And what was begun or drawn for later ones; what was dropped stays so."""
    starts = share_out([state.trained_before(step) for state in saved], num_engines)
    again = {position for of, positions in saved[0].ahead.items() if of >= step for position in positions}
    consumed = share_out(saved, 1)[0].state.consumed
    assert all(start.state == RolloutState(consumed.without(again)) for start in starts)
    returned = [position for start in starts for position in start.returned]
    expected = [position for position in range(starts[0].next_position) if position not in starts[0].state.consumed]
    assert sorted(returned) == expected


def test_where_all_has_been_handed_over_the_stream_goes_on_from_there():
    assert share_out([RolloutState(Consumed(12))] * 2, 3) == [EngineStart.at(12)] * 3


def test_files_of_different_checkpoints_are_refused():
    with pytest.raises(CheckpointError, match="do not agree"):
        share_out([RolloutState(Consumed(4)), RolloutState(Consumed(8))], 2)
    with pytest.raises(CheckpointError, match="0 engines"):
        share_out([], 2)
    group = SampleGroup(5, 0, (Sample(5, (1,), 0).drawn((1,), (-0.5,), (0,), Status.STOPPED),))
    state = RolloutState(Consumed(4), drawn=(group,))
    with pytest.raises(CheckpointError, match=r"more than once the groups at positions \[5\]"):
        share_out([state, state], 2)
    with pytest.raises(CheckpointError, match=r"more than once the groups at positions \[5\]"):
        share_out([replace(state, consumed=Consumed(6))], 1)


def test_another_format_is_refused():
    contents = RolloutState().contents()
    with pytest.raises(CheckpointError, match="format 'rollout 2'; expected 'rollout 6'"):
        RolloutState.from_contents(Contents(contents.tensors, {"format": "rollout 2"}))
