"""How idle a role was, and how fast its models computed."""

import pytest

from rltrain.models.flops import forward_flops
from rltrain.observability.reporter import RoleWork, of_whole_job
from rltrain.planning.hardware import known_gpu
from rltrain.roles.role import Operations
from tests.model_shards import tiny_architecture


def test_a_role_is_idle_while_none_of_its_tasks_works() -> None:
    now = [100.0]
    work = RoleWork(clock=lambda: now[0])
    work.add({"actor"}, 3.0)
    work.add({"actor", "rollout"}, 2.0)
    now[0] += 10
    assert work.metrics({"actor": 1, "rollout": 1, "reward": 1}) == {"perf/actor_idle": 0.5, "perf/rollout_idle": 0.8}
    now[0] += 4
    work.add({"rollout"}, 1.0)
    assert work.metrics({"actor": 1, "rollout": 1}) == {"perf/actor_idle": 1.0, "perf/rollout_idle": 0.75}


def test_utilisation_is_of_the_tasks_that_compute() -> None:
    now = [0.0]
    work = RoleWork(peak=8e12, clock=lambda: now[0])
    work.add({"actor"}, 2.0, operations=4e12, tokens=500)
    work.add({"actor"}, 5.0)
    now[0] = 10.0
    assert work.metrics({"actor": 8}) == {
        "perf/actor_idle": pytest.approx(0.3),
        "perf/actor_tokens_per_gpu_s": pytest.approx(250),
        "perf/actor_pflop": pytest.approx(0.032),
        "perf/actor_tflops": pytest.approx(2.0),
        "perf/actor_mfu": pytest.approx(0.25),
    }


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L4", None),
    ],
)
def test_the_peak_of_devices_that_are_known(name: str, tflops: float | None) -> None:
    gpu = known_gpu(name)
    assert (gpu and gpu.flops("bfloat16") / 1e12) == tflops


def test_a_rank_counts_its_share_of_its_replica_s_operations() -> None:
    architecture, operations = tiny_architecture(), Operations()
    operations.add(architecture, [3, 5], 2, backward=True)
    operations.add(architecture, [4], 1, backward=False)
    cost = forward_flops(architecture)
    assert operations.take() == (3 * cost.forward([3, 5]) / 2 + cost.forward([4]), 8 / 2 + 4)
    assert operations.take() == (0, 0)


def test_a_step_counts_what_all_roles_computed_over_all_ranks_and_the_whole_step() -> None:
    step = {"perf/step_time_s": 2.0, "perf/actor_pflop": 0.03, "perf/rollout_pflop": 0.01, "perf/actor_mfu": 0.5}
    found = of_whole_job(step, num_ranks=4, peak=20e12)
    assert found == {"perf/tflops_per_gpu": pytest.approx(5.0), "perf/mfu": pytest.approx(0.25)}
    assert of_whole_job(step, num_ranks=4, peak=None).keys() == {"perf/tflops_per_gpu"}
    assert of_whole_job({"perf/step_time_s": 2.0}, num_ranks=4, peak=20e12) == {}
