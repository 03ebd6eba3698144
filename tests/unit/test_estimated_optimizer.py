"""What the dry run says of optimizers whose states are smaller, lie on the host, or are Muon's."""

from typing import Any

import pytest

from rltrain.planning.hardware import GPUS
from rltrain.planning.memory import host_bytes, resident_bytes, working_bytes
from rltrain.planning.optimizer_memory import STAGING_BYTES, orthogonalizing_s
from rltrain.planning.planned import PlannedJob, Workload
from rltrain.planning.task_time import TrainingTime
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks.model_shapes import qwen3_8b, qwen3_30b_a3b

APART = {"actor": "0-7", "rollout, reward": "8-15"}
H100 = GPUS["h100"]


def eight_b(**optimizer: Any) -> PlannedJob:
    return job_of(qwen3_8b(), APART, 16, actor={"optimizer": optimizer})


def held(job: PlannedJob) -> tuple[dict[str, int], int]:
    """On the device by part, and on the host for good."""
    return resident_bytes(job, "actor", 0), host_bytes(job, {"actor": 0}, frozenset()).get("optimizer", 0)


def test_moments_in_bf16_take_half() -> None:
    (plain, _), (small, on_host) = held(eight_b()), held(eight_b(moments_dtype="bfloat16"))
    assert small["optimizer"] == plain["optimizer"] // 2
    assert {k: v for k, v in small.items() if k != "optimizer"} == {k: v for k, v in plain.items() if k != "optimizer"}
    assert on_host == 0


@pytest.mark.parametrize(("given", "share"), [(True, 1.0), (0.25, 0.25)])
def test_what_is_offloaded_is_on_the_host(given: float, share: float) -> None:
    (plain, _), (left, on_host) = held(eight_b()), held(eight_b(cpu_offload=given))
    moved = sum(plain[part] - left[part] for part in ("master_weights", "optimizer"))
    assert moved == pytest.approx(share * (plain["master_weights"] + plain["optimizer"]))
    assert on_host == pytest.approx(moved + STAGING_BYTES)
    assert left["weights"] == plain["weights"] and left["gradients"] == plain["gradients"]


def test_muon_keeps_one_momentum_of_every_matrix() -> None:
    (plain, _), (muon, _) = held(eight_b()), held(eight_b(name="muon"))
    vocabulary = 2 * 151936 * 4096
    matrices = 8.19e9 - vocabulary
    assert muon["optimizer"] == pytest.approx((matrices + 2 * vocabulary) * 4 / 8, rel=0.01)
    assert muon["master_weights"] == plain["master_weights"]
    assert working_bytes(eight_b(name="muon"), "update", {"actor": 0})["orthogonalizing"] > 0
    assert "orthogonalizing" not in working_bytes(eight_b(), "update", {"actor": 0})


def test_matrices_are_made_orthogonal_once_for_all_ranks() -> None:
    cut = job_of(qwen3_8b(), APART, 16, actor={"optimizer": {"name": "muon"}, "parallel": {"tp": 4}})
    whole = orthogonalizing_s(eight_b(name="muon"), "actor", 0, H100)
    assert orthogonalizing_s(cut, "actor", 0, H100) == pytest.approx(whole, rel=1e-3) and whole > 0
    experts = {"optimizer": {"name": "muon"}, "parallel": {"ep": 8}}
    alone, spread = (
        orthogonalizing_s(job_of(qwen3_30b_a3b(), APART, 16, actor={**experts, **parallel}), "actor", 0, H100)
        for parallel in ({"parallel": {"ep": 1}}, {"parallel": {"ep": 8}})
    )
    assert alone == pytest.approx(spread, rel=1e-3)


def test_steps_take_longer_on_the_host_and_with_muon() -> None:
    plain, offloaded, muon = (
        TrainingTime(eight_b(**settings), "actor", H100, Workload(500, 1000, 2000)).optimizer_steps()
        for settings in ({}, {"cpu_offload": True}, {"name": "muon"})
    )
    assert offloaded > 3 * plain and muon > plain


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_on_the_host_leave_some_layers_of_them(recompute: str) -> None:
    def of(**model: Any) -> tuple[int, int]:
        job = job_of(qwen3_8b(), APART, 16, model={"path": "m", "recompute": recompute, **model})
        on_device = working_bytes(job, "update", {"actor": 0})["activations"]
        return on_device, host_bytes(job, {"actor": 0}, frozenset()).get("activations", 0)

    (plain, nothing), (left, moved) = of(), of(activation_offload=True)
    assert nothing == 0
    assert left < plain / 2 and moved > plain - left
