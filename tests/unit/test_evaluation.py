"""Tests of the command to evaluate a checkpoint, and of sets of held-out rows."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rltrain.cli.evaluate import evaluation_overrides
from rltrain.cli.main import run_script
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.data.hub import repositories_of
from rltrain.errors import CheckpointError, ConfigError
from rltrain.observability.evaluations import EvaluationTable
from rltrain.planning.validation import check_config
from tests.support.schedule_configs import make_config

TRAINING = """
algorithm: ppo
steps: 200
output_dir: runs/trained
placement: {'actor, critic': 0-3, 'rollout, reward': 4-7}
model: {path: start}
data: {train: {path: t.jsonl}, eval: {path: e.jsonl}}
actor: {parallel: {tp: 4}}
critic: {path: other}
rollout: {sampling: {max_response_tokens: 40}}
schedule: {mode: asynchronous, max_staleness: 2}
batch: {prompts_per_step: 64, mini_batches: 8}
loss: {old_logprobs: actor}
checkpoint: {save_interval: 20}
evaluation: {interval: 20, stop_at: 0.9, keep_best: {metric: eval/score}, sets: [{name: a, data: {path: a.jsonl}}]}
logging: {wandb: {project: p}}
"""

TRAINING_WITHOUT_EVALUATION = "".join(
    line for line in TRAINING.splitlines(keepends=True) if not line.startswith(("evaluation", "placement"))
)


@pytest.fixture
def evaluated(tmp_path: Path) -> Any:
    """Returns a function that loads the config of an evaluation, from a training config and overrides."""
    (tmp_path / "trained").mkdir()
    (tmp_path / "config.yaml").write_text(TRAINING)

    def load(
        *given: str, more: str = "", whole: str = TRAINING, output: Path | None = None, checkpoint: str | None = None
    ) -> Config:
        (tmp_path / "config.yaml").write_text(whole + more)
        arguments: dict[str, Any] = {"checkpoint": checkpoint or str(tmp_path / "trained"), "output": output}
        overrides = evaluation_overrides(tmp_path / "config.yaml", given, **arguments)
        return load_config(tmp_path / "config.yaml", overrides)

    return load


def test_nothing_is_left_of_training(evaluated, tmp_path: Path):
    config = evaluated("data.solved_rate={}")
    check_config(config)
    assert (config.algorithm, config.model.path) == ("evaluate", str(tmp_path / "trained"))
    assert config.placement == {"rollout, reward": "all"}
    assert config.output_dir == "runs/trained/evaluations/trained"
    assert config.checkpoint.save_interval == 0 and not config.checkpoint.save_hf
    assert config.evaluation.keep_best is None and config.stop_metric is None
    assert config.logging.wandb.project is None and config.data.solved_rate is None
    assert [plan.name for plan in config.evaluations] == ["eval", "a"]
    assert config.rollout.sampling.max_response_tokens == 40


def test_engines_are_those_that_evaluated_beside_training(evaluated):
    training = "placement: {actor: 0, critic: 1, 'rollout, reward': 2, evaluation: 3}\n"
    own = "evaluation: {parallel: {tp: 2}, max_context_tokens: 9000, sets: [{name: a, data: {path: a.jsonl}}]}\n"
    config = evaluated("rollout.max_running_requests=3", whole=TRAINING_WITHOUT_EVALUATION + training + own)
    check_config(config)
    assert (config.rollout.parallel.tp, config.rollout.max_context_tokens) == (2, 9000)
    assert config.rollout.max_running_requests == 3
    assert config.placement == {"rollout, reward": "all"} and not config.evaluation.engine_keys


def test_what_is_given_counts(evaluated, tmp_path: Path):
    config = evaluated(
        "placement={rollout: 0-1, reward: 2}", "evaluation.logged_prompts=3", "seed=4", output=tmp_path / "there"
    )
    assert config.placement == {"rollout": "0-1", "reward": 2}
    assert (config.evaluation.logged_prompts, config.seed, config.output_dir) == (3, 4, str(tmp_path / "there"))


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [("a/hf", "a_hf"), ("b/hf", "b_hf"), ("b/hf_best", "b_hf_best"), ("b/hf_steps/step_5", "b_step_5"), ("own", "own")],
)
def test_exports_of_several_runs_are_evaluated_in_folders_of_their_own(
    evaluated, tmp_path: Path, checkpoint: str, name: str
):
    (tmp_path / checkpoint).mkdir(parents=True)
    assert evaluated(checkpoint=str(tmp_path / checkpoint)).output_dir == f"runs/trained/evaluations/{name}"


def test_environments_come_along(evaluated):
    """Their reward is the default if the config names no other."""
    config = evaluated("placement={'actor, critic': 0, rollout: 1, env: 1}", more="env: {function: calculator}")
    assert config.placement["rollout, reward"] == 1
    of_default = evaluated(more="env: {function: calculator}")
    assert of_default.placement == {"rollout, reward, env": "all"}
    assert (config.reward.function, of_default.reward.function) == ("environment", "environment")


def test_a_checkpoint_may_be_on_the_hub(evaluated):
    config = evaluated(checkpoint="owner/tiny@v2")
    assert (config.model.path, config.output_dir) == ("owner/tiny@v2", "runs/trained/evaluations/tiny")
    assert [repository.title for repository in repositories_of(config)][0] == "model owner/tiny@v2"


def test_engines_may_be_servers_and_hold_fp8(evaluated):
    check_config(evaluated("rollout.engine=sglang", "rollout.dtype=fp8"))


def test_a_checkpoint_that_is_not_there_is_refused_and_so_is_a_start_without_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(CheckpointError, match="--checkpoint: there is no folder .*nowhere"):
        evaluation_overrides(tmp_path / "config.yaml", [], checkpoint=str(tmp_path / "nowhere"), output=None)
    monkeypatch.delenv("RANK", raising=False)
    assert run_script("evaluate", ["--checkpoint", "nowhere", "--config", "none.yaml"]) == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err


def test_the_table_and_the_file_have_every_set(tmp_path: Path):
    hard = {"name": "hard", "data": {"path": "h"}, "samples_per_prompt": 2, "sampling": {"temperature": 1.0}}
    config = make_config(evaluation={"sets": [hard]}, output_dir=str(tmp_path), algorithm="evaluate")
    printed = io.StringIO()
    table = EvaluationTable(config, Console(file=printed, width=100))
    table.write(0, {"eval/score": 0.5, "eval/hard/score": 0.25, "eval/hard/pass@2": 0.4, "perf/step_time_s": 1.0})
    table.close()
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {
        "checkpoint": "m",
        "sets": {"eval": {"score": 0.5}, "hard": {"score": 0.25, "pass@2": 0.4}},
    }
    rows = [line.split() for line in printed.getvalue().splitlines()]
    assert ["│", "score", "│", "0.5", "│", "0.25", "│"] in rows
    assert ["│", "pass@2", "│", "│", "0.4", "│"] in rows


HARD = {"name": "hard", "data": {"path": "h"}, "sampling": {"temperature": 0.7}, "samples_per_prompt": 4}


def of_sets(*sets: dict[str, Any], **sections: Any) -> Config:
    return make_config(evaluation={"interval": 10, "sets": sets, **sections.pop("evaluation", {})}, **sections)


def test_the_short_form_is_a_greedy_set_with_the_run_s_limits():
    sampling = {"max_response_tokens": 77, "stop": ["END"], "stop_token_ids": [5]}
    short, hard = of_sets(HARD, rollout={"sampling": sampling}).evaluations
    assert (short.name, short.prefix, short.config_key, short.samples_per_prompt) == ("eval", "eval", "data.eval", 1)
    assert (short.sampling.temperature, short.sampling.max_response_tokens, short.interval) == (0, 77, 10)
    assert (hard.prefix, hard.config_key) == ("eval/hard", "evaluation.sets.0.data")
    assert (hard.sampling.temperature, hard.sampling.max_response_tokens) == (0.7, 77)
    assert short.sampling.stop == hard.sampling.stop == ("END",)
    assert short.sampling.stop_token_ids == hard.sampling.stop_token_ids == (5,)


def test_a_set_may_have_an_interval_a_limit_and_a_reward_of_its_own():
    own = {"interval": 0, "sampling": {"max_response_tokens": 5}, "reward": {"function": "math"}}
    plan = of_sets({**HARD, **own}).evaluations[1]
    assert [step for step in range(31) if plan.is_due(step, 30)] == [0, 30]
    assert plan.sampling.max_response_tokens == 5
    assert plan.reward is not None and plan.reward.function == "math"


def test_metrics_belong_to_the_set_that_their_prefix_names():
    short, hard = of_sets(HARD).evaluations
    assert short.reports("eval/score") and not short.reports("eval/hard/score")
    assert hard.reports("eval/hard/pass@4") and not hard.reports("eval/pass@4")
    assert short.own_name("eval/reward_mean/gsm8k") == hard.own_name("eval/hard/reward_mean/gsm8k")
    assert not short.reports("eval/hard/reward_mean/gsm8k")


def test_what_ends_a_run_is_the_first_set_s_score_unless_it_is_named():
    assert of_sets(HARD, evaluation={"stop_at": 0.9}).stop_metric == "eval/score"
    named = {"stop_at": 0.9, "stop_metric": "eval/hard/pass@2"}
    assert of_sets(HARD, evaluation=named).stop_metric == "eval/hard/pass@2"
    alone = of_sets(HARD, evaluation={"stop_at": 0.9}, data={"train": {"path": "t"}})
    assert alone.stop_metric == "eval/hard/score"
    assert of_sets(HARD).stop_metric is None


KEEP = {"keep_best": {"metric": "eval/hard/pass@4"}}


@pytest.mark.parametrize("evaluation", [{}, KEEP, {"keep_best": {"metric": "eval/hard/reward_form", "mode": "min"}}])
def test_sets_that_work_are_accepted(evaluation: dict[str, Any]):
    check_config(of_sets(HARD, evaluation=evaluation))


REFUSED: dict[str, dict[str, Any]] = {
    "evaluation.sets: 2 sets are called 'hard'; expected different names": {"sets": [HARD, HARD]},
    "2 sets are called 'eval'; expected different names; eval is the set of data": {"sets": [{**HARD, "name": "eval"}]},
    "evaluation.sets: got the name 'a b'; expected letters, digits": {"sets": [{**HARD, "name": "a b"}]},
    "evaluation.sets.0.data.sources: got weights; expected none: an evaluation uses every row": {
        "sets": [{**HARD, "data": {"sources": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]}}]
    },
    "evaluation.sets.0.data: neither path nor sources is given": {"sets": [{**HARD, "data": {}}]},
    "evaluation.sets.0.samples_per_prompt: got 4 with sampling.temperature 0, so all samples": {
        "sets": [{**HARD, "sampling": {}}]
    },
    "rollout.max_context_tokens: got 4096; expected at least data.max_prompt_tokens 1024 + "
    "evaluation.sets.0.sampling.max_response_tokens 4000 = 5024": {
        "sets": [{**HARD, "sampling": {"temperature": 1, "max_response_tokens": 4000}}]
    },
    "evaluation.sets.0.data.label_key: got null, but reward exact_match needs labels": {
        "sets": [{**HARD, "data": {"path": "h", "label_key": None}}]
    },
    "evaluation.sets.0.reward.function: got 'http://'; expected a URL with a host": {
        "sets": [{**HARD, "reward": {"function": "http://"}}]
    },
    "evaluation.keep_best.metric: got 'eval/hard/pass@3'; expected a metric of an evaluation set: one of eval/": {
        "sets": [HARD],
        "evaluation": {"keep_best": {"metric": "eval/hard/pass@3"}},
    },
    r"eval/held/pass@4, eval/held/best@4 \(the nearest is eval/held/best@4\)": {
        "sets": [{**HARD, "name": "held"}],
        "evaluation": {"stop_at": 1, "stop_metric": "eval/held/bset@4"},
    },
    r" and 60 more \(docs/evaluation.md has all; the nearest is eval/set8/best@4\)": {
        "sets": [{**HARD, "name": f"set{number}"} for number in range(9)],
        "evaluation": {"stop_at": 1, "stop_metric": "eval/set8/bset@4"},
    },
    "evaluation.stop_metric: got 'eval/easy/score'; expected a metric of an evaluation set": {
        "sets": [HARD],
        "evaluation": {"stop_at": 1, "stop_metric": "eval/easy/score"},
    },
    "stop_metric: got 'eval/score' without evaluation.st": {
        "sets": [HARD],
        "evaluation": {"stop_metric": "eval/score"},
    },
    "evaluation.keep_best.metric: got 'eval/hard/pass@4'; .*: there is no set": {
        "evaluation": KEEP,
        "data": {"train": {"path": "t"}},
    },
    "evaluation.sets: got none, and no data.eval; expected one of them": {
        "algorithm": "evaluate",
        "data": {"train": {"path": "t"}},
        "placement": {"rollout,reward": 0},
    },
    "evaluation.sets: got 1 with algorithm dpo, which answers no prompts; expected none, and held-out rows": {
        "sets": [HARD],
        "algorithm": "dpo",
        "placement": {"actor,reference": 0},
    },
    r"got 'eval/lss'; expected a metric of an evaluation set: one of eval/loss \(the nearest is eval/loss\)": {
        "algorithm": "sft",
        "placement": {"actor": 0},
        "evaluation": {"stop_at": 1, "stop_metric": "eval/lss"},
    },
    "role actor has nothing to do in algorithm evaluate": {"sets": [HARD], "algorithm": "evaluate"},
}


@pytest.mark.parametrize(("expected", "sections"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_cannot_be_evaluated_is_refused(expected: str, sections: dict[str, Any]):
    others = {name: section for name, section in sections.items() if name != "sets"}
    with pytest.raises(ConfigError, match=expected.replace("+", r"\+")):
        check_config(of_sets(*sections.get("sets", ()), **others))
