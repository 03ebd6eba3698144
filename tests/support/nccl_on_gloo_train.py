"""Runs launch/train.py with a stand-in for NCCL in groups with servers of vLLM, on a rank without a GPU.

    torchrun tests/support/nccl_on_gloo_train.py --config CONFIG [key=value ...]

The servers need the same stand-in: tests/support/vllm_on_gloo.py.
"""

import sys

import torch

from rltrain.cli.main import run_script
from rltrain.rollout.servers import update_groups
from rltrain.rollout.servers.protocols import VLLMBroadcasts
from tests.support.nccl_on_gloo import TorchBackend


def accept(way: VLLMBroadcasts, device: torch.device) -> None:
    """Refuses no device."""


if __name__ == "__main__":
    update_groups.nccl = TorchBackend  # type: ignore[assignment]
    VLLMBroadcasts.refusal = accept  # type: ignore[assignment, method-assign]
    sys.exit(run_script("train", sys.argv[1:]))
