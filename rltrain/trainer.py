"""The run: builds the roles that this rank hosts and executes the order of tasks."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable

import torch

from rltrain.cluster.exchange import Exchange, Route
from rltrain.cluster.residency import Residency
from rltrain.cluster.waiting import Patience
from rltrain.cluster.world import Bulletin
from rltrain.errors import DivergenceError
from rltrain.observability.metrics import MetricsWriter
from rltrain.observability.progress import Progress
from rltrain.observability.reporter import Reporter
from rltrain.roles.actor import Actor
from rltrain.roles.reference import Reference
from rltrain.roles.reward import Reward
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.rollout import Rollout
from rltrain.roles.weight_sync import WeightSync
from rltrain.schedule import Entry, Order

ROLES: dict[str, type[Role]] = {role.name: role for role in (Actor, Reference, Rollout, Reward)}

SAMPLES = (
    "group_ids",
    "prompt_ids",
    "lengths",
    "truncated",
    "tokens",
    "response_mask",
    "policy_version",
    "rollout_logprobs",
)

# The fields of Experience that each transfer carries.
TRANSFERS: dict[str, tuple[str, ...]] = {
    "samples": SAMPLES,
    "evaluation_samples": SAMPLES,
    "scored": (*SAMPLES, "rewards"),
    "reference_logprobs": ("group_ids", "lengths", "reference_logprobs"),
}


def reporting_rank(job: Job, entry: Entry) -> int:
    """The rank whose metrics of a task are those of the whole role."""
    return job.grids[entry.roles[0]].owner(0)


def build_reporter(job: Job, order: Order, bulletin: Bulletin) -> Reporter:
    expected: dict[int, Counter[int]] = defaultdict(Counter)
    for entry in order:
        if entry.kind == "task":
            expected[entry.step][reporting_rank(job, entry)] += 1
    logging_rank = job.grids["actor"].owner(0)
    is_logging = job.world.rank == logging_rank
    return Reporter(
        bulletin, expected, logging_rank, [MetricsWriter(job.config), Progress(job.config)] if is_logging else []
    )


class Trainer:
    """One rank's part of the run."""

    def __init__(self, job: Job, order: Order) -> None:
        self.job, self.order = job, order
        self.rank = job.world.rank
        self.bulletin = Bulletin(job.world)
        self._agree_on_order()
        self.bulletin.announce("building its roles")
        self.hosted = set(job.placement.hosts(self.rank))
        self.roles: dict[str, Role] = {name: ROLES[name](job) for name in job.placement.roles if name in self.hosted}
        self.joint_tasks: dict[str, Callable[[int], Metrics | None]] = {"decide_to_stop": self.decide_to_stop}
        if self.hosted & {"actor", "rollout"} and "rollout" in job.placement.roles:
            sync = WeightSync(job, self.roles.get("actor"), self.roles.get("rollout"))  # type: ignore[arg-type]
            self.joint_tasks["weight_sync"] = sync.weight_sync
        self.residency = Residency({name: role for name, role in self.roles.items() if role.uses_device})
        patience = Patience(self.bulletin, job.config.cluster.stall_report_s)
        self.exchange = Exchange(self.rank, job.groups.cpu[tuple(range(job.world.size))], patience)
        self.wait_position = {entry.transfer: i for i, entry in enumerate(order) if entry.kind == "wait"}
        self.post_position = {entry.transfer: i for i, entry in enumerate(order) if entry.kind == "post"}
        self.reporter = build_reporter(job, order, self.bulletin)
        self.stopped = False

    def run(self) -> None:
        """Every entry of this rank, in order."""
        execute = {"task": self._task, "post": self._post, "wait": self._wait}
        try:
            for position, entry in enumerate(self.order):
                if self.hosted.isdisjoint(entry.actors) or (self.stopped and not entry.final):
                    continue
                self.bulletin.announce(str(entry))
                execute[entry.kind](entry, position)
            self.exchange.retire(list(self.exchange.outbox))
        except BaseException as error:
            error.add_note(f"on rank {self.rank}, which {self.bulletin.activity(self.rank)}")
            self.reporter.abandon()
            raise
        self.bulletin.announce("finished")
        self.reporter.close()
        for role in self.roles.values():
            role.close()

    def decide_to_stop(self, step: int) -> None:
        """Everybody learns whether the evaluation just made reached its goal."""
        goal = self.job.config.evaluation.stop_at
        assert goal is not None, "the order has this task only where evaluation.stop_at is set"
        verdict = f"stop/{step}"
        reward_leader = self.job.grids["reward"].owner(0)
        if self.rank == reward_leader:
            reward: Reward = self.roles["reward"]  # type: ignore[assignment]
            self.bulletin.put(verdict, reward.evaluation_score >= goal)
        self.stopped = self.bulletin.get(verdict, waiting_for=f"the verdict of rank {reward_leader} at step {step}")

    def _task(self, entry: Entry, position: int) -> None:
        self.residency.require(entry.roles)
        start = time.perf_counter()
        task = self.joint_tasks.get(entry.name) or getattr(self.roles[entry.roles[0]], entry.name)
        metrics: Metrics = task(entry.step) or {}
        if self.job.world.device.type == "cuda":
            # A task's communication is over before the next task's begins.
            torch.cuda.synchronize()
        metrics[f"perf/{entry.name}_s"] = time.perf_counter() - start
        if self.rank == reporting_rank(self.job, entry):
            self.reporter.add(entry.step, metrics)

    def _post(self, entry: Entry, position: int) -> None:
        self.exchange.retire([p for p in self.exchange.outbox if self._waited_before(p, position)])
        self.exchange.post(self._route(entry), self.roles[entry.roles[0]].shipments[entry.name])

    def _wait(self, entry: Entry, position: int) -> None:
        self.roles[entry.roles[1]].shipments[entry.name] = self.exchange.wait(self._route(entry))

    def _route(self, entry: Entry) -> Route:
        source, destination = entry.roles
        return Route(
            name=f"{entry.name}[{entry.step}] ({source} -> {destination})",
            source=self.job.grids[source],
            destination=self.job.grids[destination],
            fields=TRANSFERS[entry.name],
            position=self.post_position[entry.transfer],
            num_blocks=self.job.config.prompt_blocks if destination == "actor" else 1,
        )

    def _waited_before(self, posted: int, position: int) -> bool:
        return self.wait_position[self.order[posted].transfer] < position

    def _agree_on_order(self) -> None:
        """Ranks with different orders would wait for each other forever: compare before anything else."""
        self.bulletin.put(f"order/{self.rank}", self.order.digest())
        first = self.bulletin.get("order/0", waiting_for="the order of tasks of rank 0")
        if first != self.order.digest():
            raise DivergenceError(
                f"rank {self.rank} derived another order of tasks than rank 0: "
                "start every rank with the same code, config file and overrides"
            )
