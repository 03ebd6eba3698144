"""On-policy distillation in whole jobs: the actor becomes as good as its teacher; several teachers by row."""

import json
from pathlib import Path

import pytest

from tests.support.checkpoint_files import disturb
from tests.support.jobs import QUICKSTART, REPOSITORY, column, read_lines, train

CONFIG = REPOSITORY / "configs/quickstart_distillation.yaml"
pytestmark = pytest.mark.slow


@pytest.fixture
def disturbed(warmed_up: Path, tmp_path: Path) -> Path:
    return disturb(warmed_up, tmp_path / "disturbed")


def test_the_actor_becomes_like_its_teacher(
    disturbed: Path, warmed_up: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    paths = [f"model.path={disturbed}", f"teacher.path={warmed_up}", f"output_dir={tmp_path}/run", *data_overrides]
    records = train(CONFIG, *paths, "steps=24", "evaluation.interval=0", "actor.optimizer.lr=1e-3")
    distances, scores = column(records, "train/teacher_kl"), column(records, "eval/score")
    assert sum(distances[-5:]) / 5 < 0.4 * distances[0]
    assert scores[0] < 0.2 < 0.25 < scores[-1], "the teacher's score is 0.35"


def test_each_row_has_the_teacher_that_it_names(
    disturbed: Path, warmed_up: Path, quickstart_files: Path, tmp_path: Path
) -> None:
    """The warmed-up model is its own teacher on half of the rows, and learns from another on the rest."""
    rows = read_lines(quickstart_files / "train.jsonl")[:64]
    file = tmp_path / "rows.jsonl"

    def distance(*teachers: str) -> float:
        named = [{**row, "teacher": teachers[number % 2]} for number, row in enumerate(rows)]
        file.write_text("\n".join(json.dumps(row) for row in named))
        records = train(
            CONFIG,
            *[f"model.path={warmed_up}", f"output_dir={tmp_path}/{'-'.join(teachers)}", f"data.train.path={file}"],
            *["data.eval=null", "steps=1", "checkpoint.save_hf=false", "placement={'actor': 0, 'rollout, reward': 1}"],
            *["teacher={where: advantage, top_k: 0, parallel: {tp: 2}}", "loss.old_logprobs=actor"],
            *[f"teacher.path={{same: {warmed_up}, other: {disturbed}}}", "placement.teacher=0-1"],
            num_ranks=2,
        )
        return column(records, "train/teacher_kl")[0]

    assert distance("same", "same") < 1e-6
    assert distance("same", "other") == pytest.approx(distance("other", "other") / 2, rel=0.5)


def test_the_penalty_may_be_the_divergence_over_the_whole_vocabulary(warm_start: list[str], tmp_path: Path) -> None:
    """The reference has another layout than the actor. On average the divergence equals the k3 estimate."""
    records = train(
        QUICKSTART,
        *[*warm_start, f"output_dir={tmp_path}", "data.eval=null", "steps=3"],
        *["batch={prompts_per_step: 8, samples_per_prompt: 8, mini_batches: 1}", "checkpoint.save_hf=false"],
        *["placement={'actor': '0-1', 'rollout, reward': 0, reference: '0-1'}", "reference.parallel={pp: 2}"],
        *["loss.kl={coef: 0.05, estimator: full}", "actor.optimizer={lr: 1e-3, warmup_steps: 0}"],
        num_ranks=2,
    )
    exact, estimated = column(records, "train/kl_loss"), column(records, "train/reference_kl")
    assert abs(exact[0]) < 1e-6
    assert exact[1:] == pytest.approx(estimated[1:], rel=0.5)
