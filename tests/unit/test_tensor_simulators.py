"""Simulators that step a batch of episodes on a device, as ManiSkill does: images, beginnings, ends, and copies."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from PIL import Image

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.host import EnvironmentHost
from rltrain.environments.interface import Action, StepResult
from rltrain.environments.worker import load_environment
from rltrain.errors import ConfigError
from rltrain.runtime.world import World
from tests.support.tensor_simulator import ID, STRIDE, Counted, beginning, picture

WALKERS = f"gymnasium:tests.support.tensor_simulator:{ID}"
LOOKING = {"vectorization": "vector_entry_point", "entries": ["sensor_data.camera.rgb"], "make": {"obs_mode": "rgb"}}
STILL = Action("0 0")


@pytest.fixture(autouse=True)
def _clear() -> None:
    Counted.clear()


def environment(function: str = WALKERS, *, batch_size: int = 4, **options: Any) -> Any:
    options = options if "vectorization" in options else {**LOOKING, **options}
    return load_environment(EnvironmentFactory(function, options, batch_size=batch_size))()


def pictures(shown: Any) -> list[NDArray[np.uint8]]:
    encoded = [part["image"] for part in shown[0]["content"] if part["type"] == "image"]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in encoded]


def text(shown: Any) -> str:
    return str([part["text"] for part in shown[0]["content"] if part["type"] == "text"][-1])


def to_goal(seed: int) -> list[str]:
    """Returns the actions from the beginning of this seed to its goal."""
    walker, goal = (np.array(place) for place in beginning(seed))
    num_steps = int(np.ceil(np.abs(goal - walker).max() / STRIDE))
    move = (goal - walker) / STRIDE / num_steps
    return [f"{move[0]:.4f} {move[1]:.4f}"] * num_steps


def play(simulator: Any, actions: Sequence[Sequence[str]]) -> list[list[StepResult | None]]:
    """Plays each episode's actions, and stands still after them until all have ended. Returns the results of steps."""
    live, steps = {*range(len(actions))}, []
    while live:
        number = len(steps)
        texts = [own[number] if number < len(own) else "0 0" for own in actions]
        steps.append(simulator.step([Action(text) if index in live else None for index, text in enumerate(texts)]))
        live -= {index for index, result in enumerate(steps[-1]) if result is not None and result.done}
    return steps


def test_the_chosen_entries_are_shown() -> None:
    simulator = environment(entries=["sensor_data.camera.rgb", "agent.place", "extra.is_near"])
    for shown, seed in zip(simulator.reset([{}] * 4, [1, 2, 3, 4]), [1, 2, 3, 4], strict=True):
        walker, goal = beginning(seed)
        assert np.array_equal(*pictures(shown), picture(walker, goal))
        place, is_near, answer = text(shown).splitlines()
        assert place == f"agent.place: {walker[0]:.4g}, {walker[1]:.4g}" and is_near.startswith("extra.is_near: ")
        assert answer == "Answer with 2 numbers."


def test_a_batch_is_copied_from_the_device_once() -> None:
    simulator = environment(make={"obs_mode": "rgb", "reward_mode": "sparse"})
    simulator.reset([{}] * 4, [1, 2, 3, 4])
    assert Counted.copies == 1, "the images of all episodes"
    before = Counted.copies
    simulator.step([STILL] * 4)
    ends, numbers = 3, 2
    assert Counted.copies - before == 1 + ends + numbers


def test_drawings_are_made_and_copied_once_for_all() -> None:
    simulator = environment(render="rgb_array", entries=None, action_chunk=3, frames=2, make={"obs_mode": "rgb"})
    first = simulator.reset([{}, {}], [7, 8])
    drawn = [picture(*beginning(seed)) for seed in (7, 8)]
    assert np.array_equal([pictures(shown)[0] for shown in first], drawn)
    assert text(first[0]).startswith("extra: is_near: ") and "rgb" not in text(first[0]), "single values, no arrays"
    observing, copies, renders = 3, Counted.copies, Counted.renders
    results = simulator.step([Action("0.1 0 " * 3)] * 2)
    assert [len(pictures(result.observation)) for result in results] == [2, 2], "of the last two steps"
    assert Counted.renders - renders == observing + 2
    assert Counted.copies - copies == 3 * 5 + 2 * 2, "ends and infos of each step; drawing and single value of two"


def test_equal_seeds_begin_alike() -> None:
    simulator = environment()
    first, twin, other, own = map(pictures, simulator.reset([{}, {}, {}, {"seed": 5}], [5, 5, 6, 9]))
    assert np.array_equal(first, twin) and np.array_equal(first, own) and not np.array_equal(first, other)


def test_each_episode_ends_once() -> None:
    simulator = environment(make={"obs_mode": "rgb", "reward_mode": "sparse"})
    simulator.reset([{}] * 3, [1, 2, 3])
    wins, resets = [to_goal(1), to_goal(2), ["0 0"]], Counted.resets
    steps = play(simulator, wins)
    ends = [[number for number, step in enumerate(steps, 1) if step[episode]] for episode in range(3)]
    assert ends[2] == [1, 2, 3, 4, 5, 6], "the limit of steps, by the wrapper of the registered environment"
    for episode, seed in enumerate((1, 2)):
        results = [step[episode] for step in steps if step[episode]]
        assert len(results) <= len(to_goal(seed))
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [1.0], "success"
        assert results[-1].info == {"invalid_actions": 0, "elapsed_steps": len(results), "success": 1.0}
    lost = steps[-1][2]
    assert (lost.done, lost.reward, lost.info["success"]) == (True, 0.0, 0.0)
    assert Counted.resets == resets, "no episode begins again inside a batch"


def test_smaller_batches_play_in_the_same_simulator() -> None:
    simulator = environment()
    assert Counted.built == 1, "at once in its full size, as a process cannot go from the CPU to the GPU"
    for size in (4, 1, 3):
        assert len(simulator.reset([{}] * size, range(size))) == size
        assert [result is not None for result in simulator.step([STILL] * size)] == [True] * size
    assert Counted.built == 1
    simulator.close()
    assert Counted.living == 0


def test_an_offloaded_simulator_is_built_again() -> None:
    simulator = environment()
    first = simulator.reset([{}] * 4, [1, 2, 3, 4])
    simulator.step([Action("stop"), Action("stop"), STILL, STILL])
    simulator.offload()
    simulator.onload()
    assert (Counted.built, Counted.living) == (1, 1), "two episodes go on"
    assert not simulator.step([None, None, None, STILL])[3].done
    simulator.step([None, None, None, Action("stop")])
    simulator.offload()
    assert Counted.living == 0
    simulator.onload()
    assert Counted.living == 1
    again = simulator.reset([{}] * 4, [1, 2, 3, 4])
    assert np.array_equal([*map(pictures, again)], [*map(pictures, first)])
    simulator.offload()
    simulator.close()


def test_infos_of_the_end_are_kept_if_a_step_resets() -> None:
    same_step = {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
    lake = environment("gymnasium:FrozenLake-v1", vectorization="sync", make=same_step)
    lake.reset([{}] * 2, [1, 2])
    for _ in range(100):
        moved, _ = lake.step([Action("2"), None])
        assert moved.info["prob"] == pytest.approx(1 / 3), "a reset has 1"
        if moved.done:
            return
    raise AssertionError("the episode does not end")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"vectorization": None},
            r"env\.options\.vectorization: this environment steps a batch of .* set env\.options",
        ),
        (
            {"vectorization": "sync"},
            r"env\.options\.vectorization: this environment steps a batch of episodes by itself",
        ),
        ({"entries": ["sensor_data.rgb"]}, r"env\.options\.entries: 'sensor_data\.rgb' is no entry .* expected one of"),
        (
            {"make": {}},
            r"env\.options\.entries: 'sensor_data.camera.rgb' is no entry .* expected a space of dicts, but",
        ),
        ({"entries": None}, r"have an image at sensor_data\.camera\.rgb, which is too long as text; set env\.options"),
        ({"entries": "sensor_data"}, r"env\.options\.entries is 'sensor_data'; expected a list of paths"),
        ({"render": "numpy:asarray"}, r"env\.options has render and entries; expected one"),
        (
            {"function": WALKERS.replace(ID, "Walkers-bare-v0")},
            r"of Walkers-bare-v0 does not apply .*:StepLimit, which",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(options: dict[str, Any], expected: str) -> None:
    options = {**LOOKING, **options}
    with pytest.raises(ConfigError, match=expected):
        environment(options.pop("function", WALKERS), **options)


SEEN_GPUS = """
import os

class SeenGpus:
    def reset(self, row, seed):
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def step(self, action): ...
"""


def world(device: str) -> World:
    places: dict[str, Any] = {"rank": 6, "size": 8, "local_rank": 2, "ranks_per_node": 4, "store": None}
    return World(device=torch.device(device), timeout_s=1.0, **places)


def test_processes_use_the_gpu_of_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert world("cpu").visible_gpus([6]) == ()
    (tmp_path / "seen.py").write_text(SEEN_GPUS)
    factory = EnvironmentFactory(f"{tmp_path}/seen.py:SeenGpus", gpus=world("cuda").visible_gpus([6]))
    with EnvironmentHost(factory, num_workers=1) as host:
        host.begin(0, {}, seed=0)
        assert host.wait(60)
        assert [event.observation for event in host.events()] == ["6"]
