"""Which of the conversations that wait for a slot goes on first."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.rollout.groups import ReadySamples
from rltrain.rollout.sample import Sample


def after_turns(number: int, num_turns: int) -> Sample:
    return replace(Sample(number, (1,), seed=0), turns=tuple(range(1, num_turns + 1)))


def test_those_with_the_fewest_turns_made_come_first_and_of_these_who_waits_longest():
    ready = ReadySamples()
    ready.add([after_turns(number, turns) for number, turns in enumerate([2, 0, 1, 0, 2, 1])], spread=6)
    assert [sample.id for sample in ready.take(4)] == [1, 3, 2, 5]
    ready.add([after_turns(9, 0)], spread=6)
    assert len(ready) == 3
    assert [sample.id for sample in ready.take(9)] == [9, 0, 4]
    assert not ready and ready.take(1) == []


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=6)), max_size=30),
    st.data(),
)
def test_nobody_is_overtaken_by_more_than_its_turns_allow(
    arrivals: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """However many still come: each round some do, with any number of turns made, and some are taken."""
    ready, waiting, number = ReadySamples(), dict[int, list[int]](), 0
    for spread, turns in arrivals:
        samples = [after_turns(number + place, made) for place, made in enumerate(turns)]
        number += len(samples)
        ready.add(samples, spread)
        waiting |= {sample.id: [] for sample in samples}
        for sample in ready.take(data.draw(st.integers(0, 4))):
            del waiting[sample.id]
            for other, overtaking in waiting.items():
                if other < sample.id:
                    overtaking.append(sample.id)
    bounds = [spread * made for spread, turns in arrivals for made in turns]
    assert all(len(overtaking) <= bounds[sample_id] for sample_id, overtaking in waiting.items())
