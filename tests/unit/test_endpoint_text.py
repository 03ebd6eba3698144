"""Text that is given out while a turn is drawn, and messages that are the same though they are written otherwise."""

import hypothesis.strategies as st
from hypothesis import given, settings

from rltrain.data.assistant_turn import before_marks
from rltrain.endpoint.opening import PlaceOfTurn, SessionTrajectory, chat_keys, cut_at
from rltrain.rollout.sample import Sample, Status


@settings(max_examples=60, derandomize=True)
@given(
    text=st.text(alphabet="ab <[é\n", max_size=20),
    marks=st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=3),
)
def test_what_stands_before_marks_stays_the_beginning_of_the_whole(text: str, marks: list[str]) -> None:
    whole, _ = cut_at(text, marks)
    sent = ""
    for size in range(len(text) + 1):
        stands = before_marks(text[:size], marks)
        assert whole.startswith(stands) and stands.startswith(sent)
        sent = stands


def test_messages_that_clients_write_anew_are_the_same() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    anew = {"function": {"name": "f", "arguments": {"b": 2, "a": 1}}}
    one = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    two = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": " \n", "tool_calls": [anew], "refusal": None},
    ]
    assert chat_keys([], one) == chat_keys([], two)
    assert chat_keys([], one) != chat_keys([{"name": "f"}], one)
    assert chat_keys([], one)[1] != chat_keys([], [{"role": "system", "content": "x"}])[1]


def test_a_branch_begins_at_the_end_of_a_turn() -> None:
    first = Sample(1, (9,), 0).drawn([5, 6], [-0.1, -0.2], [0, 0], Status.STOPPED)
    second = first.observed([7]).drawn([8], [-0.3], [1], Status.STOPPED)
    trajectory = SessionTrajectory(second, rewards={1: 0.5})
    ends = [PlaceOfTurn(trajectory, turn) for turn in range(2)]
    assert [end.turn_tokens for end in ends] == [(5, 6), (8,)] and [end.is_tip for end in ends] == [False, True]
    assert ends[0].context == first.context and ends[0].sample().turns == (2,)
    recorded = trajectory.finished()
    assert recorded.sample.turn_rewards == (0.0, 0.5) and recorded.sample.loss_mask == (True, True, False, True)
    branch = SessionTrajectory(second, parent=1, num_shared_tokens=2)
    assert branch.finished().sample.loss_mask == (False, False, False, True) and branch.num_drawn_tokens == 1
