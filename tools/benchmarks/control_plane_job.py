"""A job at any size, all of whose ranks are in one process, and what a phase of its control code costs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from counted_store import SharedStore, Traffic

from rltrain.config.schema import Config
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.placement import placement_of, role_grids
from rltrain.runtime.watchdog import Watchdog
from rltrain.runtime.world import World
from rltrain.schedule.steps import build_order

RANKS_PER_NODE = 8
TP, ENGINE_TP = 8, 2
STEPS = 1000


@dataclass(frozen=True)
class Cost:
    """None: not measured in this phase."""

    QUANTITIES: ClassVar[tuple[str, ...]] = (
        "seconds",
        "megabytes",
        "store_calls",
        "most_store_calls",
        "all_store_calls",
        "all_store_bytes",
        "messages",
        "message_bytes",
        "peers",
        "received",
        "least_received",
        "passed_on",
        "passed_on_bytes",
        "communicators",
    )
    seconds: float = 0.0
    """On the slowest rank looked at."""
    megabytes: float = 0.0
    """Of Python's objects, at most at a time, on one rank."""
    store_calls: float = 0.0
    """Mean of all ranks."""
    most_store_calls: int = 0
    """Of any rank."""
    all_store_calls: int = 0
    all_store_bytes: int = 0
    messages: int = 0
    """Of the rank that sends most."""
    message_bytes: int = 0
    peers: int = 0
    received: int = 0
    """Messages of the rank that receives most, of those looked at."""
    least_received: int = 0
    passed_on: int = 0
    """Messages to others of the node."""
    passed_on_bytes: int = 0
    communicators: int = 0
    per_second: bool = False
    """Whether calls are per second of the phase, not in all of it."""

    def __str__(self) -> str:
        found = [f"{name} {getattr(self, name):.4g}" for name in self.QUANTITIES if getattr(self, name)]
        return ", ".join(found) + (" (per second)" if self.per_second else "")

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


def cost_of(traffic: dict[int, Traffic], num_ranks: int, seconds: float = 0.0, per_s: float | None = None) -> Cost:
    """`per_s`: the traffic is that of so many seconds."""
    scale = 1.0 if per_s is None else 1 / per_s
    calls = [one.num_operations * scale for one in traffic.values()]
    return Cost(
        seconds=seconds,
        store_calls=sum(calls) / num_ranks,
        most_store_calls=round(max(calls, default=0)),
        all_store_calls=round(sum(calls)),
        all_store_bytes=round(sum(one.num_bytes for one in traffic.values()) * scale),
        per_second=per_s is not None,
    )


class JobAtSize:
    """A job of `num_ranks`, all of whose ranks are in this process."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self.size, self.folder = num_ranks, folder
        self.shared = SharedStore()

    @cached_property
    def config(self) -> Config:
        half, last = self.size // 2, self.size - 1
        return Config.model_validate(
            {
                "steps": STEPS,
                "output_dir": str(self.folder),
                "placement": {"actor,reference": f"0-{half - 1}", "rollout,reward": f"{half}-{last}"},
                "model": {"path": "model"},
                "data": {"train": {"path": "train"}},
                "actor": {"parallel": {"tp": TP}},
                "reference": {"parallel": {"tp": TP}},
                "rollout": {"parallel": {"tp": ENGINE_TP}},
                "schedule": {"mode": "asynchronous", "max_staleness": 1},
                "batch": {"prompts_per_step": self.size, "samples_per_prompt": 8},
                "checkpoint": {"save_interval": 100},
            }
        )

    def __getattr__(self, name: str) -> Any:
        """placement, grids, order: derived once for all ranks that need them."""
        if name not in ("placement", "grids", "order"):
            raise AttributeError(name)
        self.placement = placement_of(self.config, self.size, RANKS_PER_NODE)
        self.grids = role_grids(self.config, self.placement)
        self.order = build_order(self.config, self.placement)
        return self.__dict__[name]

    def world(self, rank: int) -> World:
        return World(
            rank,
            self.size,
            rank % RANKS_PER_NODE,
            RANKS_PER_NODE,
            torch.device("cpu"),
            dist.PrefixStore("attempt0", self.shared.client(rank)),
            timeout_s=300.0,
            timeouts=self.config.timeouts,
            node=rank // RANKS_PER_NODE,
            num_nodes=self.size // RANKS_PER_NODE,
        )

    @cached_property
    def job_stores(self) -> list[JobStore]:
        """By rank."""
        return [JobStore(self.world(rank), guarded=True) for rank in range(self.size)]

    @cached_property
    def watchdogs(self) -> list[Watchdog]:
        """By rank, none of them started."""
        return [
            Watchdog(store.heartbeat, store.observer, store.world.background, self.folder, beats=store.beats)
            for store in self.job_stores
        ]

    def rank_first(self, rank: int) -> list[int]:
        """All ranks, those first that others wait for."""
        return [rank, *(other for other in range(self.size) if other != rank)]


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Seconds since."""
    begin = time.perf_counter()
    yield lambda: time.perf_counter() - begin
