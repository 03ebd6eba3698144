"""A simulator that steps a batch of episodes, with tensors on a device. It enforces ManiSkill 3's rules.

A walker in the unit square looks for a goal. `gymnasium.make(ID, num_envs=n)` makes a batch without automatic resets,
and the vector entry point puts ManiSkillVectorEnv's interface around it.
"""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import WrapperSpec
from gymnasium.vector import AutoresetMode, VectorEnv

ID = "Walkers-v0"
SIDE = 32
STRIDE = 0.25
NEAR = 0.2


class Counted:
    """What has happened in this process."""

    copies = renders = resets = built = living = 0
    has_run_on_cpu = False

    @classmethod
    def clear(cls) -> None:
        for name in ("copies", "renders", "resets", "built", "living"):
            setattr(cls, name, 0)
        cls.has_run_on_cpu = False


class DeviceTensor:
    """A tensor on a device. Only a copy of the whole can be read."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held, self.shape, self.dtype, self.device = held, held.shape, held.dtype, held.device

    def cpu(self) -> torch.Tensor:
        Counted.copies += 1
        return self.held.clone()


def on_device(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: on_device(held) for name, held in value.items()}
    return DeviceTensor(value) if isinstance(value, torch.Tensor) else value


def beginning(seed: int) -> tuple[list[float], list[float]]:
    """Returns walker and goal of an episode that was reset alone with this seed."""
    torch.manual_seed(seed)
    walker, goal = torch.rand((1, 2)), torch.rand((1, 2))
    return walker[0].tolist(), goal[0].tolist()


def picture(walker: Any, goal: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the pixels of an episode: its walker's place in red, and its goal's in green."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    for channel, place in enumerate((walker, goal)):
        row, column = (np.clip(np.asarray(place, np.float32), 0, 0.999) * SIDE).astype(int)
        pixels[row, column, channel] = 255
    return pixels


class Walkers(gymnasium.Env[Any, Any]):
    """A batch of episodes."""

    metadata = {"render_modes": ["human", "rgb_array"]}

    def __init__(
        self, num_envs: int = 1, obs_mode: str = "state", reward_mode: str = "dense", render_mode: str | None = None
    ) -> None:
        if num_envs > 1 and Counted.has_run_on_cpu:
            raise RuntimeError("GPU PhysX can only be enabled once before any other code involving PhysX")
        Counted.has_run_on_cpu |= num_envs == 1
        Counted.built += 1
        Counted.living += 1
        self.num_envs, self.obs_mode, self.reward_mode, self.render_mode = num_envs, obs_mode, reward_mode, render_mode
        self.device = torch.device("cpu")
        self.single_action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (num_envs, 2), np.float32)
        place = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        seen = {
            "agent": spaces.Dict({"place": place}),
            "extra": spaces.Dict({"is_near": spaces.Box(0, 1, (), np.bool_)}),
            "sensor_data": spaces.Dict({"camera": spaces.Dict({"rgb": spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)})}),
        }
        self.single_observation_space: Any = place if obs_mode == "state" else spaces.Dict(seen)
        self.observation_space = self.single_observation_space
        self.walker, self.goal = torch.zeros((num_envs, 2)), torch.ones((num_envs, 2))
        self.elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the episodes `env_idx`. Their beginnings are drawn together, from the first seed."""
        chosen = (options or {}).get("env_idx", torch.arange(self.num_envs))
        if not isinstance(chosen, torch.Tensor):
            raise TypeError(f"env_idx is {type(chosen)}")
        seeds = [seed] if isinstance(seed, int) else seed
        if seeds is not None:
            assert len(seeds) in (1, self.num_envs), seeds
            torch.manual_seed(seeds[0])
        Counted.resets += 1
        self.walker[chosen], self.goal[chosen] = torch.rand((len(chosen), 2)), torch.rand((len(chosen), 2))
        self.elapsed_steps[chosen] = 0
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if not isinstance(action, np.ndarray | torch.Tensor):
            raise TypeError(type(action))
        assert tuple(action.shape) == (self.num_envs, 2), f"Received action of shape {action.shape}"
        moved = torch.as_tensor(action)
        assert moved.dtype == torch.float32, moved.dtype
        self.walker = self.walker + STRIDE * moved.clip(-1, 1)
        self.elapsed_steps = self.elapsed_steps + 1
        info = self._info()
        reward = info["success"] if self.reward_mode == "sparse" else 1 - self._distance()
        return self._observation(), reward, info["success"].clone(), torch.zeros(self.num_envs, dtype=torch.bool), info

    def render(self) -> Any:
        if self.render_mode is None:
            raise RuntimeError("render_mode is not set.")
        Counted.renders += 1
        return self._pixels()

    def close(self) -> None:
        Counted.living -= 1

    def _distance(self) -> torch.Tensor:
        return torch.linalg.norm(self.walker - self.goal, axis=1)

    def _info(self) -> dict[str, Any]:
        return {"elapsed_steps": self.elapsed_steps.clone(), "success": self._distance() < NEAR}

    def _pixels(self) -> torch.Tensor:
        return torch.from_numpy(np.stack([*map(picture, self.walker.numpy(), self.goal.numpy())]))

    def _observation(self) -> Any:
        if self.obs_mode == "state":
            return self.walker.clone()
        Counted.renders += 1
        return {
            "agent": {"place": self.walker.clone()},
            "extra": {"is_near": self._distance() < 2 * NEAR},
            "sensor_data": {"camera": {"rgb": self._pixels()}},
        }


class StepLimit(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates the episodes of a batch."""

    def __init__(self, env: gymnasium.Env[Any, Any], max_steps: int) -> None:
        super().__init__(env)
        self.max_steps = max_steps

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, _, info = self.env.step(action)
        return observation, reward, terminated, self.unwrapped.elapsed_steps >= self.max_steps, info  # type: ignore[attr-defined]


class WalkersVector(VectorEnv[Any, Any, Any]):
    """The batch as a vector environment. Episodes that end are reset in the same step, unless `auto_reset` is off."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env, self.auto_reset = env, True
        base = self.base_env
        self.num_envs, self.spec, self.device = base.num_envs, env.spec, base.device
        self.single_action_space, self.action_space = base.single_action_space, base.action_space
        self.single_observation_space, self.observation_space = base.single_observation_space, base.observation_space
        self.metadata = {**base.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    @property
    def base_env(self) -> Any:
        return self._env.unwrapped

    @property
    def unwrapped(self) -> Any:
        return self.base_env

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self._env.reset(seed=seed, options=options)
        return on_device(observation), on_device(info)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._env.step(actions)
        over = terminated | truncated  # type: ignore[operator]
        if over.any() and self.auto_reset:
            told = info
            observation, info = self._env.reset(options={"env_idx": torch.arange(self.num_envs)[over]})
            info |= {"final_info": told, "_final_info": over}
        return tuple(map(on_device, (observation, reward, terminated, truncated, info)))  # type: ignore[return-value]

    def render(self) -> Any:
        return on_device(self.base_env.render())

    def close_extras(self, **_: Any) -> None:
        self._env.close()


def make_vector(num_envs: int, max_episode_steps: int | None = None, **arguments: Any) -> WalkersVector:
    return WalkersVector(gymnasium.make(ID, num_envs=num_envs, **arguments))


def make_bare_vector(num_envs: int, **arguments: Any) -> WalkersVector:
    """Returns a vector environment without the wrappers of the registered one."""
    return WalkersVector(Walkers(num_envs))


LIMITED = WrapperSpec("StepLimit", f"{__name__}:StepLimit", {"max_steps": 6})
for name, made in ((ID, make_vector), ("Walkers-bare-v0", make_bare_vector)):
    gymnasium.register(
        name,
        entry_point=Walkers,
        vector_entry_point=partial(made),
        disable_env_checker=True,
        additional_wrappers=(LIMITED,),
    )
