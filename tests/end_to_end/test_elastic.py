"""Runs that go on with more or fewer ranks than their checkpoint was saved by."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from rltrain.checkpoint.run.folder import name_of
from tests.end_to_end.jobs import REPOSITORY, train
from tests.end_to_end.test_resume import PARTIAL, Run, reported

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES, STEPS = 4, 4, 5


class Elastic:
    """A job that is started again and again by one command, with as many ranks as there are."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder, self.overrides = folder, overrides

    def go_on(self, num_ranks: int, *, after: int = 0) -> Run:
        """From the checkpoint of a step, all that was saved later being lost, to the end: what the run has reported."""
        for step in range(after + 1, STEPS + 1):
            shutil.rmtree(self.folder / "checkpoints" / name_of(step), ignore_errors=True)
        config, output = REPOSITORY / "configs/quickstart.yaml", f"output_dir={self.folder}"
        train(config, *self.overrides, output, num_ranks=num_ranks, timeout_s=120)
        metrics, ids = reported(self.folder)
        assert list(metrics) == [*range(STEPS)]
        counts = Counter(number for of_step in ids.values() for number in of_step)
        assert counts == Counter(range(STEPS * PROMPTS * SAMPLES)), "every sample is trained on once"
        return metrics, ids


@pytest.fixture
def elastic(warmed_up: Path, data_overrides: list[str], tmp_path: Path) -> Elastic:
    overrides = [
        f"model.path={warmed_up}",
        *data_overrides,
        f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 2}}",
        f"steps={STEPS}",
        "logging.sample_ids=true",
        "data.train.max_rows=512",
        "data.eval=null",
        "checkpoint={save_hf: false, save_interval: 1, keep: 0}",
    ]
    return Elastic(tmp_path / "run", overrides)


def test_replicas_of_the_actor_come_and_go(elastic: Elastic) -> None:
    """One, three and two of them. What is drawn from the weights of a checkpoint is equal, and what is learnt from it
    but for the order of sums."""
    elastic.overrides += ["placement={'rollout, reward': 0, 'actor, reference': rest}", "actor.parallel.tp=1"]
    (first, first_ids), (second, _), (third, _) = [
        elastic.go_on(num_ranks, after=after) for num_ranks, after in ((2, 0), (4, 1), (3, 3))
    ]
    assert second[0] == first[0] and [second[step] for step in (1, 2)] == [third[step] for step in (1, 2)]
    assert second[1] == pytest.approx(first[1], rel=1e-4, abs=1e-4)
    assert third[3] == pytest.approx(second[3], rel=1e-4, abs=1e-4)
    assert {step: sorted(ids) for step, ids in first_ids.items()} == {
        step: [*range(step * PROMPTS * SAMPLES, (step + 1) * PROMPTS * SAMPLES)] for step in range(STEPS)
    }


def test_engines_that_work_ahead_come_and_go(elastic: Elastic) -> None:
    """Two, one and two again: unfinished responses, and experience on its way, go on where there are engines."""
    elastic.overrides += ["placement={'actor, reference': 0-1, 'rollout, reward': rest}", PARTIAL]
    elastic.overrides.append("rollout.max_running_requests=6")
    first, second, third = [elastic.go_on(num_ranks, after=after)[0] for num_ranks, after in ((4, 0), (3, 1), (4, 3))]
    assert second[0] == first[0] and [second[step] for step in (1, 2)] == [third[step] for step in (1, 2)]
    assert {metrics["train/lr"] for metrics in first.values()} == {metrics["train/lr"] for metrics in third.values()}
