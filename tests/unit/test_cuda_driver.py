"""Memory that CUDA's driver shares between processes, on a stand-in for it: types and order of its calls, mapping."""

import json
import sys
from typing import Any

import pytest

from tests.cuda_driver import build
from tests.forked.popen import run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    library = build(tmp_path_factory.mktemp("driver"))
    done = run([sys.executable, "-m", "tests.staging_processes", str(library)], timeout_s=60)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_what_one_process_stages_the_other_one_loads(found: dict[str, Any]) -> None:
    assert found["weights"] == {"version": 2, "same": True, "kinds": ["cuda"]}
    assert found["other ended with"] == 0


def test_other_types_or_another_order_would_fail(found: dict[str, Any]) -> None:
    assert len(found["wrong"]) == 10
    assert [name for name, status in found["wrong"].items() if status == 0] == []


def test_what_the_driver_refuses_is_named(found: dict[str, Any]) -> None:
    too_much, elsewhere = found["refusals"]
    assert "cuMemAlloc_v2 of the CUDA driver returned error 2" in too_much and "rollout.sglang.staging_mb" in too_much
    assert "staged on device GPU-another" in elsewhere
    assert found["pages"] == 2, "the driver shares whole pages: what else lies in them would be shared too"
