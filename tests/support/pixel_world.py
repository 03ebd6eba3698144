"""A small world for models that see: walk to the red cell of a grid. Its text twin shows letters instead of pixels."""

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rltrain.environments.image_urls import image_url

SIDE, CELL = 4, 14
"""Cells per side by default, and pixels per side of a cell."""
NAMES = ("left", "right", "up", "down")
LETTERS = "lrud"
"""Names of the same actions of one token."""
MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))
"""The change of (row, column) by each action."""
FLOOR, WALKER, GOAL = (230, 230, 230), (20, 60, 220), (220, 30, 30)
ID = "PixelWorld-v0"

Place = tuple[int, int]


def pixels(walker: Place, goal: Place, side: int = SIDE) -> NDArray[np.uint8]:
    """Returns the picture of the grid, by default [56, 56, 3]. The goal is red, and the walker blue."""
    cells = np.full((side, side, 3), FLOOR, dtype=np.uint8)
    cells[goal], cells[walker] = GOAL, WALKER
    return cells.repeat(CELL, axis=0).repeat(CELL, axis=1)


def letters(walker: Place, goal: Place, side: int = SIDE) -> str:
    """Returns the grid as text: a W for the walker, a G for the goal."""
    cells = [["."] * side for _ in range(side)]
    cells[goal[0]][goal[1]], cells[walker[0]][walker[1]] = "G", "W"
    return "\n".join("".join(row) for row in cells)


def way(walker: Place, goal: Place) -> list[int]:
    """Returns the actions of a shortest way: first along the row, then along the column."""
    across, along = goal[1] - walker[1], goal[0] - walker[0]
    return [int(across > 0)] * abs(across) + [2 + int(along > 0)] * abs(along)


def places(seed: int, side: int = SIDE) -> tuple[Place, Place]:
    """Returns the places of walker and goal at the beginning of an episode."""
    walker, goal = np.random.default_rng(seed).choice(side * side, 2, replace=False)
    return divmod(int(walker), side), divmod(int(goal), side)


class PixelWorld(gymnasium.Env[Any, int]):
    """An episode is won at the goal, and lost after `max_steps` steps. Steps into a wall change nothing.

    It begins at places of the seed, or at those of the options "walker" and "goal". Observations are pixels, or the
    text twin with `as_letters`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self, max_steps: int = 6, as_letters: bool = False, side: int = SIDE, render_mode: str | None = None
    ) -> None:
        self.max_steps, self.as_letters, self.side, self.render_mode = max_steps, as_letters, side, render_mode
        self.action_space = spaces.Discrete(len(NAMES))
        shape = (side * CELL, side * CELL, 3)
        text = spaces.Text(side * (side + 1), charset=".GW\n")
        self.observation_space = text if as_letters else spaces.Box(0, 255, shape, np.uint8)
        self.walker = self.goal = (0, 0)
        self.num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.walker, self.goal = places(seed or 0, self.side)
        if options:
            self.walker, self.goal = tuple(options["walker"]), tuple(options["goal"])
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row, column = (place + move for place, move in zip(self.walker, MOVES[action], strict=True))
        if 0 <= row < self.side and 0 <= column < self.side:
            self.walker = (row, column)
        self.num_steps += 1
        won = self.walker == self.goal
        return self._observation(), float(won), won, self.num_steps == self.max_steps, {}

    def render(self) -> NDArray[np.uint8]:
        return pixels(self.walker, self.goal, self.side)

    def _observation(self) -> Any:
        shown = letters if self.as_letters else pixels
        return shown(self.walker, self.goal, self.side)


# Rows for jobs. No beginning is both in the training rows and held out.


def beginnings(side: int = SIDE) -> list[tuple[Place, Place]]:
    """Returns all beginnings, in random order."""
    cells = [(row, column) for row in range(side) for column in range(side)]
    found = [*permutations(cells, 2)]
    random.Random(0).shuffle(found)
    return found


def moved(walker: Place, action: int) -> Place:
    return walker[0] + MOVES[action][0], walker[1] + MOVES[action][1]


def write_tasks(path: Path, chosen: list[tuple[Place, Place]]) -> Path:
    """Writes a row for each beginning, for episodes in the world."""
    rows = [{"prompt": "go", "reset_options": {"walker": walker, "goal": goal}} for walker, goal in chosen]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_demonstrations(
    path: Path,
    chosen: list[tuple[Place, Place]],
    side: int = SIDE,
    *,
    as_letters: bool = False,
    share_of_random: float = 0.0,
) -> Path:
    """Writes a conversation for each beginning: the world before each step of a shortest way, and the step.

    A share of the steps is told as a random one, so that a model that learns from them tries every step.
    """
    lines, choice = [], random.Random(0)
    for walker, goal in chosen:
        messages: list[dict[str, Any]] = []
        for action in way(walker, goal):
            told = "" if messages else "go"
            if as_letters:
                content: Any = "\n".join(part for part in (told, letters(walker, goal, side)) if part)
            else:
                shown = {"type": "image", "image": image_url(pixels(walker, goal, side))}
                content = [{"type": "text", "text": told}, shown] if told else [shown]
            step = choice.choice(LETTERS) if choice.random() < share_of_random else LETTERS[action]
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": step}]
            walker = moved(walker, action)
        lines.append(json.dumps({"prompt": messages}) + "\n")
    path.write_text("".join(lines))
    return path


gymnasium.register(ID, entry_point=PixelWorld)
