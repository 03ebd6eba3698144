"""Reports a GPU machine's software, and tests for problems that would slow or end a run.

    python tools/gpu_probe.py versions|graphs [--device cpu]

- versions: versions of packages, and the time of attention for new shapes, by rltrain's choice of kernels and torch's.
- graphs: two recordings of a product in one memory pool, with the first dropped before the second. Ends with an
  internal assertion of torch if that is not allowed.

The last line is one JSON object.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from rltrain.models.attention import attend, attend_packed, packed_kernel  # noqa: E402

PACKAGES = ("megatron-core", "transformers", "transformer-engine", "flash-attn", "sglang", "numpy", "triton")
NUM_SHAPES, HEADS, HEAD_DIM = 6, 16, 128


def versions(device: torch.device) -> dict[str, Any]:
    found = {name: _version(name) for name in PACKAGES}
    sdpa = torch.backends.cuda
    enabled = {
        "flash": sdpa.flash_sdp_enabled(),
        "memory_efficient": sdpa.mem_efficient_sdp_enabled(),
        "cudnn": sdpa.cudnn_sdp_enabled(),
    }
    on_gpu = device.type == "cuda"
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "packages": found,
        "attention_enabled": enabled,
        "attention_packed": on_gpu and packed_kernel() is not None,
        "attention_release": current_flash_attention_impl(),
        "attention_new_shape_ms": {
            "ours": _new_shapes(device, lambda q, k, v: attend(q, k, v, causal=True)),
            "torchs": _new_shapes(
                device, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            ),
            **({"packed": _new_shapes(device, _packed)} if on_gpu and packed_kernel() is not None else {}),
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    boundaries = torch.tensor([0, len(rows[0])], dtype=torch.int32, device=q.device)
    return attend_packed(rows[0], rows[1], rows[2], boundaries, len(rows[0]))


def _new_shapes(device: torch.device, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[float]:
    """Returns milliseconds of the first call with each of several new lengths. The first call includes one-time
    loading."""
    times = []
    for number in range(NUM_SHAPES):
        tokens = 200 + 24 * number
        q, k, v = (
            torch.randn(1, heads, tokens, HEAD_DIM, dtype=torch.bfloat16, device=device)
            for heads in (HEADS, HEADS // 2, HEADS // 2)
        )
        _synchronize(device)
        start = time.perf_counter()
        attention(q, k, v)
        _synchronize(device)
        times.append(round(1e3 * (time.perf_counter() - start), 3))
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graphs(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        raise SystemExit("graphs exist only with CUDA; expected --device cuda")
    x, pool = torch.randn(256, 256, device=device), torch.cuda.graph_pool_handle()
    x @ x  # prepares cuBLAS
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            y = x @ x
        graph.replay()
        torch.cuda.synchronize(device)
        del graph, y
    return {"a pool can be used again": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("versions", "graphs"))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    print(json.dumps({"versions": versions, "graphs": graphs}[arguments.what](torch.device(arguments.device))))


if __name__ == "__main__":
    main()
