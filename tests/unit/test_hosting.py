"""Which roles leave the device of a job, and whether the reference has a model of its own: on GPUs and without."""

from types import SimpleNamespace

import pytest
import torch

from rltrain.config.schema import Config
from rltrain.roles.reference import uses_actor_modules
from rltrain.roles.role import Job
from rltrain.runtime.grid import Grid

ROLES = ("actor", "reference", "rollout")
GRID = Grid((0,))


def job_on(device, **sections):
    values = {
        "steps": 1,
        "placement": {"actor, reference, rollout, reward": 0},
        "model": {"path": "m"},
        "data": {"train": {"path": "t"}},
    }
    return Job(
        config=Config.model_validate(values | sections),
        world=SimpleNamespace(device=torch.device(device)),
        placement=None,
        grids=dict.fromkeys(ROLES, GRID),
        groups=None,
        architectures=dict.fromkeys(ROLES, "the same"),
        job_store=None,
        waiter=None,
        rows=None,
        pause=None,
    )


@pytest.mark.parametrize(("device", "auto"), [("cuda", "auto"), ("cpu", False)])
def test_auto_is_no_where_the_device_is_the_host(device, auto):
    job = job_on(device, actor={"offload": "auto"}, reference={"offload": True}, rollout={"offload": False})
    assert [job.offload_of(role) for role in ROLES] == [auto, True, False]


@pytest.mark.parametrize(
    ("device", "offload", "shares"),
    [("cuda", "auto", True), ("cuda", False, True), ("cpu", "auto", False), ("cpu", False, False), ("cpu", True, True)],
)
def test_a_reference_takes_the_actors_modules_where_that_saves_memory(device, offload, shares):
    assert uses_actor_modules(job_on(device, reference={"offload": offload})) == shares
