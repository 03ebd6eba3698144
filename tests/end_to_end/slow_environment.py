"""An environment with slow steps."""

import asyncio
import random

from rltrain.environments.interface import Action, Row, StepResult


class SlowEnvironment:
    """Answers with digits for `turns` turns. A step takes `seconds` on average and at most twice as long.

    Environments of one process wait concurrently.
    """

    def __init__(self, seconds: float, turns: int) -> None:
        self.seconds, self.turns = seconds, turns

    async def reset(self, row: Row, seed: int) -> None:
        self.random, self.num_turns = random.Random(seed), 0

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self.random.uniform(0, 2 * self.seconds))
        self.num_turns += 1
        done = self.num_turns == self.turns
        return StepResult("+123=", float(len(action.text) % 2), done)
