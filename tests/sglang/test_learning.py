"""The quickstart's task, learned with SGLang as the engine."""

import pytest

from tests.end_to_end.jobs import REPOSITORY, column, train


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_quickstart_is_learned(sglang_python, warmed_up, data_overrides, tmp_path):
    records = train(
        REPOSITORY / "configs/quickstart.yaml",
        "rollout.engine=sglang",
        f"rollout.sglang.python={sglang_python}",
        f"model.path={warmed_up}",
        f"output_dir={tmp_path}",
        *data_overrides,
        "placement={'actor, reference': 0, 'rollout, reward': 1}",
        "actor.parallel.tp=1",
        "evaluation={interval: 10, stop_at: 0.8}",
        num_ranks=2,
        timeout_s=2400,
    )
    scores = column(records, "eval/score")
    assert scores[0] < 0.5 and scores[-1] >= 0.8
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-3
