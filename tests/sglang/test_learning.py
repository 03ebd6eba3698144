"""The quickstart's task learned with SGLang as the engine. One of its servers is killed."""

import threading

import pytest

from tests.sglang.kills import kill_a_server, ports
from tests.sglang.test_jobs import IN_MANY_PARTS
from tests.support.jobs import QUICKSTART, column, train

TIMEOUT_S = 2400
KILLED_AFTER = 2
"""Number of steps before the kill."""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_the_quickstart_is_learned_and_a_server_that_is_killed_is_started_again(
    sglang_python, warmed_up, data_overrides, tmp_path
):
    """The new server has the same weights, on another rank than the actor's. The run continues as if nothing had
    happened."""
    logs = tmp_path / "engines"
    killer = threading.Thread(
        target=kill_a_server, args=(tmp_path / "metrics.jsonl", KILLED_AFTER, logs, TIMEOUT_S), daemon=True
    )
    killer.start()
    records = train(
        QUICKSTART,
        *("rollout.engine=sglang", f"rollout.sglang.python={sglang_python}", *IN_MANY_PARTS),
        *(f"model.path={warmed_up}", f"output_dir={tmp_path}", *data_overrides, "data.eval.max_rows=256"),
        *("placement={'actor, reference': 0, 'rollout, reward': 1}", "actor.parallel.tp=1"),
        "evaluation={interval: 5, stop_at: 0.7}",
        num_ranks=2,
        timeout_s=TIMEOUT_S,
    )
    killer.join()
    assert len(ports(logs)) == 2, "one start, and one more after the kill"
    scores = column(records, "eval/score")
    assert scores[0] < 0.5 and scores[-1] >= 0.7
    # With the weights of an earlier step they would differ by more than a hundred times this limit.
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-3
