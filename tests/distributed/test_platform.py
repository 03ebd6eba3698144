"""megatron-core needs every patch to run without CUDA. With CUDA no patch is applied."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from rltrain.training.megatron import platform
from tests.forked.popen import run
from tests.support.worlds import made_once

pytestmark = pytest.mark.slow  # every test that trains with Megatron needs the patches
NO_CUDA = "Torch not compiled with CUDA enabled|Found no NVIDIA driver|Cannot re-initialize CUDA in forked subprocess"
"""A CPU build of torch has the first message. A CUDA build on a machine without a GPU has one of the others."""
# Patch -> the failure without it: a pattern of the error, and the file of Megatron that raises it.
FAILURES = {
    "current_device_is_the_cpu": (NO_CUDA, "megatron/core/distributed/param_and_grad_buffer.py"),
    "cuda_literals_mean_the_cpu": (NO_CUDA, "megatron/core/optimizer/optimizer.py"),
    "tensor_types_are_cuda_types": ("TypeError", "megatron/core/optimizer/optimizer.py"),
    "tied_embeddings_stay_on_the_cpu": (NO_CUDA, "megatron/core/models/common/language_module/language_module.py"),
    "recomputation_keeps_no_cuda_random_state": (NO_CUDA, "megatron/core/tensor_parallel/random.py"),
    "experts_get_tokens_without_streams": ("CUDA", "megatron/core/transformer/moe/token_dispatcher.py"),
    "uneven_shares_are_exchanged": ("invalid tensor size", "megatron/core/tensor_parallel/mappings.py"),
    "counts_of_tokens_are_numbers": ("TypeError", "megatron/core/transformer/moe/token_dispatcher.py"),
    "routers_use_torch": ("te_general_gemm", "megatron/core/transformer/moe/moe_utils.py"),
    "latent_attention_knows_no_transformer_engine": (
        "TypeError",
        "megatron/core/transformer/multi_latent_attention.py",
    ),
    "slices_of_angles_are_cut_on_the_cpu": (f"pin|{NO_CUDA}", "megatron/core/models/common/embeddings/rope_utils.py"),
    "gradient_buckets_have_no_stream": (NO_CUDA, "megatron/core/distributed/param_and_grad_buffer.py"),
}
ALWAYS, NEVER = (0,), (99,)
NEEDED = {
    "gradient_buckets_have_no_stream": ((0, 19), NEVER),
    "routers_use_torch": (ALWAYS, (0, 19)),
    "latent_attention_knows_no_transformer_engine": (ALWAYS, (0, 19)),
}
"""The first Megatron release that needs a patch, and the first later one that does not."""
RELEASE = tuple(int(part) for part in version("megatron-core").split(".")[:2])


@made_once
def outcomes(folder: Path) -> dict[str, str]:
    done = run([sys.executable, "-m", "tests.distributed.cases_platform", str(folder / "results")], timeout_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results").read_text())


def test_models_work_with_all_patches_each_of_which_has_a_known_failure(outcomes: dict[str, str]) -> None:
    assert outcomes["none"] == "done"
    assert set(FAILURES) == {patch.__name__ for patch in platform.PATCHES}


@pytest.mark.parametrize("patch", FAILURES)
def test_a_model_fails_without_the_patch(outcomes: dict[str, str], patch: str) -> None:
    since, until = NEEDED.get(patch, (ALWAYS, NEVER))
    if not since <= RELEASE < until:
        assert outcomes[patch] == "done"
        return
    error, file = FAILURES[patch]
    assert re.search(error, outcomes[patch]) and file in outcomes[patch]


@pytest.mark.parametrize("has_cuda", [True, False])
def test_each_patch_is_applied_once_and_nowhere_where_there_is_cuda(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(platform, "PATCHES", (lambda: called.append("patched"),))
    monkeypatch.setattr(platform, "_applied", set())
    platform.adapt_to_platform()
    platform.adapt_to_platform()
    assert called == ([] if has_cuda else ["patched"])
