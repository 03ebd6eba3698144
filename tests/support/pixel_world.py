"""A small world for models that see: walk to the red cell of a grid. Its text twin shows letters instead of pixels."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SIDE, CELL = 4, 14
"""Cells per side, and pixels per side of a cell."""
NAMES = ("left", "right", "up", "down")
MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))
"""The change of (row, column) by each action."""
FLOOR, WALKER, GOAL = (230, 230, 230), (20, 60, 220), (220, 30, 30)
ID = "PixelWorld-v0"

Place = tuple[int, int]


def pixels(walker: Place, goal: Place) -> NDArray[np.uint8]:
    """Returns the picture of the grid, [56, 56, 3]. The goal is red, and the walker blue."""
    cells = np.full((SIDE, SIDE, 3), FLOOR, dtype=np.uint8)
    cells[goal], cells[walker] = GOAL, WALKER
    return cells.repeat(CELL, axis=0).repeat(CELL, axis=1)


def letters(walker: Place, goal: Place) -> str:
    """Returns the grid as text: a W for the walker, a G for the goal."""
    cells = [["."] * SIDE for _ in range(SIDE)]
    cells[goal[0]][goal[1]], cells[walker[0]][walker[1]] = "G", "W"
    return "\n".join("".join(row) for row in cells)


def way(walker: Place, goal: Place) -> list[int]:
    """Returns the actions of a shortest way: first along the row, then along the column."""
    across, along = goal[1] - walker[1], goal[0] - walker[0]
    return [int(across > 0)] * abs(across) + [2 + int(along > 0)] * abs(along)


def places(seed: int) -> tuple[Place, Place]:
    """Returns the places of walker and goal at the beginning of an episode."""
    walker, goal = np.random.default_rng(seed).choice(SIDE * SIDE, 2, replace=False)
    return divmod(int(walker), SIDE), divmod(int(goal), SIDE)


class PixelWorld(gymnasium.Env[Any, int]):
    """An episode is won at the goal, and lost after `max_steps` steps. Steps into a wall change nothing.

    Observations are pixels, or the text twin with `as_letters`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, max_steps: int = 6, as_letters: bool = False, render_mode: str | None = None) -> None:
        self.max_steps, self.as_letters, self.render_mode = max_steps, as_letters, render_mode
        self.action_space = spaces.Discrete(len(NAMES))
        shape = (SIDE * CELL, SIDE * CELL, 3)
        text = spaces.Text(SIDE * (SIDE + 1), charset=".GW\n")
        self.observation_space = text if as_letters else spaces.Box(0, 255, shape, np.uint8)
        self.walker = self.goal = (0, 0)
        self.num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.walker, self.goal = places(seed or 0)
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row, column = (place + move for place, move in zip(self.walker, MOVES[action], strict=True))
        if 0 <= row < SIDE and 0 <= column < SIDE:
            self.walker = (row, column)
        self.num_steps += 1
        won = self.walker == self.goal
        return self._observation(), float(won), won, self.num_steps == self.max_steps, {}

    def render(self) -> NDArray[np.uint8]:
        return pixels(self.walker, self.goal)

    def _observation(self) -> Any:
        shown = letters if self.as_letters else pixels
        return shown(self.walker, self.goal)


gymnasium.register(ID, entry_point=PixelWorld)
