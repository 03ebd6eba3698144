"""Jobs on pairs: a reward model learns to score right sums above wrong ones, and a policy learns to prefer them."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import REPOSITORY, column, learnt, read_lines, train, train_each
from tests.support.tolerances import ADAM_EPS, EPS_OF_ACTOR

REWARD_MODEL, DPO = REPOSITORY / "configs/quickstart_reward_model.yaml", REPOSITORY / "configs/quickstart_dpo.yaml"


RewardModel = tuple[Path, list[dict[str, Any]]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pairs(warm_start: list[str]) -> list[str]:
    return [warm_start[0], *(path.replace(".jsonl", "_pairs.jsonl") for path in warm_start[1:])]


@pytest.fixture(scope="module")
def reward_model(pairs: list[str], tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    """Returns a trained reward model, and the records of its training."""
    output = tmp_path_factory.mktemp("reward_model")
    records = train(REWARD_MODEL, *pairs, f"output_dir={output}", "evaluation.stop_at=0.95")
    return output / "hf", records


def test_ppo_follows_a_reward_model(reward_model: RewardModel, warm_start: list[str], tmp_path: Path) -> None:
    """Only the reward model scores responses. It reads texts in the form of its training."""
    records = train(
        REPOSITORY / "configs/quickstart_ppo.yaml",
        *[*warm_start, f"output_dir={tmp_path}", "data.eval=null", "steps=8"],
        *["placement={'actor, critic': 0, 'rollout, reward': 1, reward_model: '0-1'}", "checkpoint.save_hf=false"],
        *["reward={functions: []}", f"reward_model={{path: {reward_model[0]}, ends_with_eos: true}}"],
        *["batch={prompts_per_step: 256, samples_per_prompt: 1, mini_batches: 2}", "critic.critic_warmup_steps=2"],
        num_ranks=2,
    )
    scores = column(records, "rollout/reward_model")
    assert scores == column(records, "rollout/reward_mean")
    assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.1


def test_a_reward_model_tells_right_sums_from_wrong_ones_and_transformers_scores_alike(
    reward_model: RewardModel, quickstart_files: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, records = reward_model
    accuracy = column(records, "eval/accuracy")
    assert accuracy[0] == 0.0 and accuracy[-1] >= 0.95, "the head is zero at first, so all scores are"
    margins = margins_of(AutoModelForSequenceClassification.from_pretrained(folder), folder, quickstart_files)
    assert (margins > 0).float().mean().item() == pytest.approx(accuracy[-1], abs=1 / len(margins))
    assert margins.mean().item() == pytest.approx(column(records, "eval/margin")[-1], rel=1e-4)


def test_adapters_learn_to_score(pairs: list[str], quickstart_files: Path, tmp_path: Path) -> None:
    """The head and the adapters are the same on each backend. PEFT, and transformers with merged adapters, score as
    training does."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    small = ["placement={actor: 0-1}", "steps=8", "model.lora={rank: 4, alpha: 8}", "data.eval.max_rows=64"]
    small.append(f"actor.optimizer={{lr: 1e-2, warmup_steps: 0, decay: constant, eps: {ADAM_EPS}}}")
    small.append("evaluation={interval: 8}")
    backends = {"megatron": ["actor.parallel.tp=2"], "fsdp": ["actor.backend=fsdp", "actor.parallel.tp=1"]}
    jobs = {name: [*pairs, *small, *chosen] for name, chosen in backends.items()}
    found = train_each(REWARD_MODEL, jobs, tmp_path, 2)
    first, second = (column(records, "train/loss") for records in found.values())
    assert first == pytest.approx(second, rel=2e-2) and first[-1] < 0.9 * first[0]

    margin, start = found["megatron"][-1]["eval/margin"], pairs[0].partition("=")[2]
    base = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    apart = PeftModel.from_pretrained(base, tmp_path / "megatron/hf_adapter")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "megatron/hf")
    for model in (apart, merged):
        assert margins_of(model, start, quickstart_files, 64).mean().item() == pytest.approx(margin, rel=1e-3)


def margins_of(model: Any, tokenizer_folder: Path | str, quickstart_files: Path, num_pairs: int | None = None) -> Any:
    """Returns the score margins of the preferred responses by `model`, a classifier, for held-out pairs, shape
    [pairs]."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = read_lines(quickstart_files / "eval_pairs.jsonl")[:num_pairs]
    texts = [row["prompt"] + row[side] + tokenizer.eos_token for side in ("chosen", "rejected") for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        scores = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    chosen, rejected = scores.chunk(2)
    return chosen - rejected


def test_dpo_raises_the_margin_and_keeps_what_was_chosen(pairs: list[str], tmp_path: Path) -> None:
    records = train(DPO, *pairs, f"output_dir={tmp_path}", "steps=20")
    assert column(records, "train/truncated_ratio") == column(records, "train/long_rows") == [0.0] * 20
    margins, chosen = column(records, "eval/margin"), column(records, "eval/chosen_logprob")
    assert margins[0] == pytest.approx(0, abs=1e-4), "actor and reference are equal at first"
    assert margins[-1] > 1 and column(records, "eval/accuracy")[-1] > 0.95
    assert chosen[-1] > chosen[0]


PLACEMENTS = {
    "one rank": ("placement={'actor, reference': 0}", "actor.parallel.tp=1"),
    "in the weights' place": ("placement={'actor, reference': 0-1}", "actor.parallel.tp=1", "reference.offload=true"),
    "apart in another layout": (
        *("placement={actor: 0-1, reference: 2-3}", "actor.parallel={tp: 1, pp: 2}", "reference.parallel={tp: 1}"),
    ),
}
"""Settings of the actor, and of the reference if named."""


def test_dpo_is_the_same_on_any_placement(pairs: list[str], tmp_path: Path) -> None:
    small = ["steps=2", "batch={prompts_per_step: 12, mini_batches: 2}", "actor.micro_batch_tokens=300"]
    small += ["data.eval.max_rows=5", "checkpoint.save_hf=false", EPS_OF_ACTOR]
    jobs = {name: [*pairs, *small, *where] for name, where in PLACEMENTS.items()}
    first, *others = map(of_pairs, train_each(DPO, jobs, tmp_path, num_ranks=4).values())
    assert [step["train/margin"] for step in first[:2]] != [0, 0] and "eval/margin" in first[2]
    for records in others:
        for found, expected in zip(records, first, strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def of_pairs(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes accuracies. At first actor and reference are equal, and rounding decides the sign of a margin."""
    told = learnt(records, "train", "eval")
    return [{name: value for name, value in record.items() if "accuracy" not in name} for record in told]
