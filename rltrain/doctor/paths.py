"""Which of several implementations a job would take here, and why."""

from collections.abc import Iterator

import torch

from rltrain.config.schema import Model
from rltrain.doctor.finding import FINE, LACKING, Finding
from rltrain.reshard import native
from rltrain.runtime import shared_memory


def paths_taken() -> Iterator[Finding]:
    """Of a model with the default settings."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    yield Finding("collectives", FINE, "NCCL, and gloo for what lies on the host" if on_gpu else "gloo: no GPU")
    yield _layers(device)
    yield from (_copies(device_type) for device_type in ("cpu", "cuda"))
    yield _between_ranks(on_gpu)


def _layers(device: torch.device) -> Finding:
    from rltrain.training.megatron.model import obstacle_to_transformer_engine

    obstacle = obstacle_to_transformer_engine(Model(path="-"), device)
    if obstacle is None:
        return Finding("layers", FINE, "Transformer Engine's, except in float32", True)
    problem, remedy = obstacle
    return Finding("layers", LACKING, f"Megatron's own: {problem} ({remedy})", True)


def _copies(device_type: str) -> Finding:
    """What packs and unpacks weights in a sync."""
    what = f"copies of weights, {device_type}"
    if native.mode() == "off":
        return Finding(what, LACKING, f"torch operations: {native.VARIABLE} is off", True)
    try:
        native.cpu_library() if device_type == "cpu" else native.cuda_library()
    except native.LibraryError as error:
        return Finding(what, LACKING, f"torch operations, slower: {error}. To change that, {native.REBUILD}", True)
    return Finding(what, FINE, "the native library", True)


def _between_ranks(on_gpu: bool) -> Finding:
    what = "weights between ranks of a node"
    if on_gpu:
        return Finding(what, FINE, "NCCL")
    if shared_memory.AVAILABLE:
        return Finding(what, FINE, "memory that they share")
    return Finding(what, LACKING, "gloo: this system has no memory without a name (memfd_create)")
