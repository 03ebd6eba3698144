"""NCCL's groups on one GPU: reopened, and destroyed after their graphs."""

import pytest

from tests.forked.popen import run_module

pytestmark = pytest.mark.gpu


def test_groups_are_made_anew_after_what_is_recorded_of_them_is_forgotten() -> None:
    run_module("tests.gpu.group_cases")
