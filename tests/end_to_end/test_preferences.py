"""Jobs on pairs: a reward model that scores right sums above wrong ones, and a policy that comes to prefer them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import REPOSITORY, column, run, train
from tests.support.tolerances import ADAM_EPS, EPS_OF_ACTOR

REWARD_MODEL, DPO = REPOSITORY / "configs/quickstart_reward_model.yaml", REPOSITORY / "configs/quickstart_dpo.yaml"


@pytest.fixture(scope="module")
def pairs(warmed_up: Path, quickstart_files: Path) -> list[str]:
    paths = [f"data.{part}.path={quickstart_files}/{part}_pairs.jsonl" for part in ("train", "eval")]
    return [f"model.path={warmed_up}", *paths]


@pytest.fixture(scope="module")
def reward_model(pairs: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A trained one, and the records of its training."""
    output = tmp_path_factory.mktemp("reward_model")
    records = train(REWARD_MODEL, *pairs, f"output_dir={output}", "evaluation.stop_at=0.95")
    return output / "hf", records


@pytest.mark.slow
def test_ppo_follows_a_reward_model(
    reward_model: tuple[Path, list[dict[str, Any]]], warmed_up: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    """Nothing else says what a response is worth; it reads texts as it was trained on them."""
    records = train(
        REPOSITORY / "configs/quickstart_ppo.yaml",
        *[f"model.path={warmed_up}", f"output_dir={tmp_path}", *data_overrides, "data.eval=null", "steps=8"],
        *["placement={'actor, critic': 0, 'rollout, reward': 1, reward_model: '0-1'}", "checkpoint.save_hf=false"],
        *["reward={functions: []}", f"reward_model={{path: {reward_model[0]}, ends_with_eos: true}}"],
        *["batch={prompts_per_step: 256, samples_per_prompt: 1, mini_batches: 2}", "critic.critic_warmup_steps=2"],
        num_ranks=2,
    )
    scores = column(records, "rollout/reward_model")
    assert scores == column(records, "rollout/reward_mean")
    assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.1


@pytest.mark.slow
def test_a_reward_model_tells_right_sums_from_wrong_ones_and_transformers_scores_alike(
    reward_model: tuple[Path, list[dict[str, Any]]], quickstart_files: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, records = reward_model
    accuracy = column(records, "eval/accuracy")
    assert accuracy[0] == 0.0 and accuracy[-1] >= 0.95, "its head starts at zero, and so do all scores"
    margins = margins_of(AutoModelForSequenceClassification.from_pretrained(folder), folder, quickstart_files)
    assert (margins > 0).float().mean().item() == pytest.approx(accuracy[-1], abs=1 / len(margins))
    assert margins.mean().item() == pytest.approx(column(records, "eval/margin")[-1], rel=1e-4)


@pytest.mark.slow
def test_adapters_learn_to_score(pairs: list[str], quickstart_files: Path, tmp_path: Path) -> None:
    """With the head, the same on each backend; PEFT, and transformers with them merged, score as training does."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    small = ["placement={actor: 0-1}", "steps=8", "model.lora={rank: 4, alpha: 8}", "data.eval.max_rows=64"]
    small.append(f"actor.optimizer={{lr: 1e-2, warmup_steps: 0, decay: constant, eps: {ADAM_EPS}}}")
    small.append("evaluation={interval: 8}")
    backends = [["actor.parallel.tp=2"], ["actor.backend=fsdp", "actor.parallel.tp=1"]]
    jobs = train_each(REWARD_MODEL, [[*pairs, *small, *chosen] for chosen in backends], tmp_path, 2)
    first, second = ([step["train/loss"] for step in found if "train/loss" in step] for found in jobs)
    assert first == pytest.approx(second, rel=2e-2) and first[-1] < 0.9 * first[0]

    margin, start = jobs[0][-1]["eval/margin"], pairs[0].partition("=")[2]
    base = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    apart = PeftModel.from_pretrained(base, tmp_path / "0/hf_adapter")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "0/hf")
    for model in (apart, merged):
        assert margins_of(model, start, quickstart_files, 64).mean().item() == pytest.approx(margin, rel=1e-3)


def margins_of(model: Any, tokenizer_folder: Path | str, quickstart_files: Path, num_pairs: int | None = None) -> Any:
    """[pairs]: by how much `model`, a classifier, scores the preferred responses of the held-out pairs higher."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = [json.loads(line) for line in (quickstart_files / "eval_pairs.jsonl").read_text().splitlines()[:num_pairs]]
    texts = [row["prompt"] + row[side] + tokenizer.eos_token for side in ("chosen", "rejected") for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        scores = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    chosen, rejected = scores.chunk(2)
    return chosen - rejected


@pytest.mark.slow
def test_dpo_raises_the_margin_and_keeps_what_was_chosen(pairs: list[str], tmp_path: Path) -> None:
    records = train(DPO, *pairs, f"output_dir={tmp_path}", "steps=20")
    assert column(records, "train/truncated_ratio") == column(records, "train/long_rows") == [0.0] * 20
    margins, chosen = column(records, "eval/margin"), column(records, "eval/chosen_logprob")
    assert margins[0] == pytest.approx(0, abs=1e-4), "actor and reference start as one"
    assert margins[-1] > 1 and column(records, "eval/accuracy")[-1] > 0.95
    assert chosen[-1] > chosen[0]


PLACEMENTS = {
    "one rank": ("placement={'actor, reference': 0}", "actor.parallel.tp=1"),
    "two replicas, the reference in their weights' place": (
        "placement={'actor, reference': 0-1}",
        "actor.parallel.tp=1",
        "reference.offload=true",
    ),
    "pipeline stages, the reference apart in another layout": (
        "placement={actor: 0-1, reference: 2-3}",
        "actor.parallel={tp: 1, pp: 2}",
        "reference.parallel={tp: 1}",
    ),
}


@pytest.mark.slow
def test_dpo_is_the_same_on_any_placement(pairs: list[str], tmp_path: Path) -> None:
    small = [
        "steps=2",
        "batch={prompts_per_step: 12, mini_batches: 2}",
        "actor.micro_batch_tokens=300",
        "data.eval.max_rows=5",
        "checkpoint.save_hf=false",
        EPS_OF_ACTOR,
    ]
    jobs = [[*pairs, *small, *where] for where in PLACEMENTS.values()]
    first, *others = train_each(DPO, jobs, tmp_path, num_ranks=4)
    assert [step["train/margin"] for step in first[:2]] != [0, 0] and "eval/margin" in first[2]
    for records in others:
        for found, expected in zip(records, first, strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def train_each(config: Path, jobs: list[list[str]], folder: Path, num_ranks: int) -> list[list[dict[str, Any]]]:
    """What each reported, into folders called by their numbers. The processes go from one to the next."""
    overrides = [[*job, f"output_dir={folder}/{number}"] for number, job in enumerate(jobs)]
    (folder / "jobs.json").write_text(json.dumps(overrides))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = run([*torchrun, "tests/support/consecutive_jobs.py", str(config), str(folder / "jobs.json")], 200)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return [reported(folder / str(number)) for number in range(len(jobs))]


def reported(output: Path) -> list[dict[str, Any]]:
    """Without accuracies: at first actor and reference are one, and the sign of a margin is rounding."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    of_pairs = ("train/", "eval/")
    return [
        {name: value for name, value in record.items() if name.startswith(of_pairs) and "accuracy" not in name}
        for record in records
    ]
