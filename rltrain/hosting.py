"""The roles of one rank, built one after the other such that those that share its device fit on it in turn."""

from contextlib import AbstractContextManager

from rltrain.observability.trace import AnyTrace
from rltrain.offload.device_memory import device_memory
from rltrain.offload.memory_parts import memory_saver
from rltrain.offload.offload import CommunicatorPlan, Communicators, Residency
from rltrain.roles.actor import Actor
from rltrain.roles.critic import Critic
from rltrain.roles.env import Env
from rltrain.roles.evaluation import Evaluation
from rltrain.roles.reference import Inference, Reference, Teacher, is_actors_base, uses_actor_modules
from rltrain.roles.reward import Reward
from rltrain.roles.role import Job, Role
from rltrain.roles.rollout import Rollout
from rltrain.roles.scoring_models import Judge, RewardModel
from rltrain.schedule.order import Order
from rltrain.tasks.roles import device_roles

ROLES: dict[str, type[Role]] = {
    role.name: role
    for role in (
        *(Actor, Critic, Reference, Teacher, Inference, RewardModel, Judge),
        *(Evaluation, Env, Rollout, Reward),
    )
}


def host_roles(job: Job, order: Order, trace: AnyTrace) -> tuple[dict[str, Role], Residency]:
    """The roles that this rank hosts, and who of them is on its device when. Collective over: all ranks."""
    residency = _residency(job, order, trace)
    roles: dict[str, Role] = {}
    for name in job.placement.hosts(job.world.rank):
        roles[name] = ROLES[name].beside(job, roles)
        if name in job.offloads:
            residency.admit(name, roles[name].parts)
    return roles, residency


def _residency(job: Job, order: Order, trace: AnyTrace) -> Residency:
    def span(name: str, category: str) -> AbstractContextManager[object]:
        return trace.span(name, category)

    settings = job.config.residency
    return Residency(
        order,
        job.offloads,
        device_memory(job.world.device),
        guests=("reference",) if uses_actor_modules(job) or is_actors_base(job) else (),
        sharing=("reference",) if is_actors_base(job) else (),
        prefetch=settings.prefetch,
        communicators=_communicators(job, order) if settings.communicators == "release" else None,
        memory_saver=memory_saver() if settings.allocator == "torch_memory_saver" else None,
        span=span,
    )


def _communicators(job: Job, order: Order) -> Communicators:
    staying = {name for name in job.placement.roles if name not in device_roles() or not _may_leave(job, name)}
    plan = CommunicatorPlan(order, job.placement, job.grids, job.world.rank, lists=job.groups.reopenable, kept=staying)
    return Communicators(plan, job.groups)


def _may_leave(job: Job, role: str) -> bool:
    return job.offload_of(role) is not False
