"""Two ranks reshard on one device: real streams, kernels and pinned staging, with gloo between them."""

import pytest

from tests.support.torchrun import run_distributed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("bucket_bytes", "rounds"), [(2**24, 1), (2**11, 2)])
def test_weights_are_right_after_every_sync(bucket_bytes: int, rounds: int) -> None:
    arguments = {"device": "cuda:0", "bucket_bytes": bucket_bytes}
    for found in run_distributed("tests.gpu.reshard_cases:syncs", 2, arguments, timeout_s=120):
        assert found["wrong"] == []
        assert found["rounds"] >= rounds and found["bytes"] > 0
