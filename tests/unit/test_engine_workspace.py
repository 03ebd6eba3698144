"""What the embedded engine needs beside keys and values is foretold, and left to it."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rltrain.models import read_architecture
from rltrain.planning.hardware import GB, GPUS
from rltrain.planning.memory import cache_on_gpu, largest, rank_memories, working_bytes
from rltrain.rollout.embedded.engine import budget_within
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.workspace import workspace
from rltrain.runtime.grid import Grid
from tests.rollout_models import load_engine, write_checkpoint
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks.model_shapes import deepseek_v3, qwen3_8b, qwen3_30b_a3b

H100 = GPUS["h100"]
NUM_RUNNING, PROMPT_TOKENS = 32, 128
LONG = {"max_running_requests": 1024, "max_context_tokens": 16384, "sampling": {"max_response_tokens": 8192}}


class LiveBytes(TorchDispatchMode):
    """Of the storages that operators within it made and something still has: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._tensors: dict[int, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = operator(*args, **kwargs or {})
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and (_storage(made) in self._tensors or _storage(made) not in given):
                self._hold(made)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage, size = _storage(tensor), tensor.untyped_storage().nbytes()
        self._tensors[storage] = self._tensors.get(storage, 0) + 1
        if self._tensors[storage] == 1:
            self._now += size
            self.most = max(self.most, self._now)
        weakref.finalize(tensor, self._drop, storage, size)

    def _drop(self, storage: int, size: int) -> None:
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage]
            self._now -= size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_moe", "deepseek_v3"])
def test_no_more_is_live_in_an_engine_than_its_workspace(tmp_path: Path, family: str) -> None:
    """Prompts that fill half a pass, then all of them draw; and most of it is."""
    checkpoint = write_checkpoint(tmp_path, family)
    engine, _ = load_engine(checkpoint, max_running_requests=NUM_RUNNING)
    samples = [
        Sample(number, tuple(1 + (number + place) % 40 for place in range(PROMPT_TOKENS)), seed=number)
        for number in range(NUM_RUNNING)
    ]
    sampling = SamplingParams(1.0, 1.0, 0, 2, ())
    engine.generate(samples, sampling)  # its cache is there from here on
    with LiveBytes() as live:
        engine.generate([Sample(9 + one.id, one.prompt, seed=7) for one in samples], sampling)
    needed = workspace(
        read_architecture(checkpoint),
        Grid((0,)),
        num_running=NUM_RUNNING,
        prefill_tokens=NUM_RUNNING * PROMPT_TOKENS,
        item_bytes=4,
    )
    assert 0.75 * needed.generating < live.most < needed.generating


@pytest.mark.parametrize("role", ["rollout", "evaluation"])
def test_engine_and_estimate_leave_the_same_to_it(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    free, total = 50 * GB, H100.memory_gb * GB
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), int(total)))
    placement = {"actor": 0, "rollout, reward": 1, "evaluation": 2}
    evaluated = {"data": {"train": {"path": "t"}, "eval": {"path": "e"}}}
    job = job_of(qwen3_8b(), placement, 3, rollout=LONG, **evaluated)
    site = SimpleNamespace(
        config=job.config,
        architecture=qwen3_8b(),
        grid=job.grids[role],
        others=(),
        leaves=False,
        world=SimpleNamespace(device=torch.device("cuda")),
    )
    budget = budget_within(site, "auto", role)  # type: ignore[arg-type]
    assert budget is not None
    assert budget.num_bytes() == cache_on_gpu(job, role, H100, int(total - free))
    assert budget.num_bytes() < 0.95 * free - working_bytes(job, "generate", {"rollout": 0})["activations"]


@pytest.mark.parametrize(("model", "tp"), [(qwen3_8b, 1), (qwen3_30b_a3b, 2), (deepseek_v3, 32)])
def test_whatever_engines_take_by_themselves_fits(model: Any, tp: int) -> None:
    """With more responses than there is room for, the device is full at the most, and not much less."""
    placement = {"actor": f"0-{2 * tp - 1}", "rollout, reward": f"{2 * tp}-{3 * tp - 1}"}
    rollout = {**LONG, "parallel": {"tp": tp, "ep": tp if model is deepseek_v3 else 1}}
    batch = {"prompts_per_step": 4096, "samples_per_prompt": 8}
    job = job_of(model(), placement, 3 * tp, rollout=rollout, batch=batch)
    engine = largest([memory for memory in rank_memories(job, H100) if "rollout" in memory.kind.roles])
    assert engine.fits(H100)
    assert engine.peak.total > 0.9 * H100.usable_bytes
