"""A real agent framework, unchanged, against the endpoint."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from rltrain.rollout.engine import SamplingParams
from tests.talking_engine import endpoint

NUM_AGENTS = 64
CONTEXT = 16384


def say(context: str) -> str:
    """Asks its tool, then gives what that said as its answer."""
    observed = re.findall(r"Observation:\n(\d+)", context)
    asked = int(re.findall(r"What is twice (\d+)", context)[0])
    name, arguments = ("final_answer", {"answer": observed[-1]}) if observed else ("double", {"number": asked})
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.slow
def test_smolagents_solves_its_tasks_through_sessions() -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: Any.
        """
        return 2 * number

    own = SamplingParams(1.0, 1.0, 0, CONTEXT, (257,))
    with endpoint(say, policy="override", sampling=own, context_tokens=CONTEXT) as served:
        is_together = Barrier(NUM_AGENTS)

        def solve(number: int) -> str:
            opened = served.server.open_session({"number": number})
            model = OpenAIModel("policy", api_base=f"{served.url}/sessions/{opened.id}/v1", api_key=opened.token)
            agent = ToolCallingAgent([double], model, max_steps=4, verbosity_level=0)
            is_together.wait(60)
            assert agent.run(f"What is twice {number}?") == str(2 * number)
            return opened.id

        with ThreadPoolExecutor(NUM_AGENTS) as agents:
            ids = [*agents.map(solve, range(NUM_AGENTS))]
        sessions = [served.record(number, reward=1.0) for number in ids]
        for session in sessions:
            turns = sum(len(trajectory.sample.turns) for trajectory in session.trajectories)
            drawn = sum(sum(trajectory.sample.loss_mask) for trajectory in session.trajectories)
            assert turns == 2 and drawn > 0
        recorded = [trajectory.sample for session in sessions for trajectory in session.trajectories]
        assert sum(sum(sample.loss_mask) for sample in recorded) == served.engine.num_drawn_tokens
        logged = {(entry.context, entry.logprobs) for entry in served.engine.log}
        assert {(sample.context, sample.logprobs) for sample in recorded} <= logged
