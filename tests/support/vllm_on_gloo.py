"""An extension of vLLM's workers for servers without GPUs: weights over NCCL come over its stand-in on gloo.

    PYTHONPATH=<repository> python -m vllm.entrypoints.openai.api_server ... \\
        --worker-extension-cls tests.support.vllm_on_gloo.Extension

Only NCCL's communicator and CUDA's streams are replaced. The routes, the engine for weight transfers and the loading
are vLLM's own.
"""

from contextlib import nullcontext

import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import packed_tensor

from tests.support.nccl_on_gloo import PyNcclCommunicator


class Stream:
    """A stream whose work is complete."""

    def synchronize(self) -> None: ...


class Extension:
    """Adds nothing to the worker. vLLM imports this module for it."""


pynccl.PyNcclCommunicator = PyNcclCommunicator
packed_tensor._get_streams = lambda device, count: [Stream() for _ in range(count)]
torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment, return-value]
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.synchronize = lambda device=None: None
