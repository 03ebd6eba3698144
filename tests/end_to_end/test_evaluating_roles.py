"""Short jobs on two ranks with every role beside actor and rollout: their numbers equal independent ones.

Slow tests have these roles in longer jobs: test_ppo.py, test_distillation.py, test_preferences.py,
test_rewarding_models.py, test_synced_models.py, test_expert_replay.py.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rltrain.observability.evaluations import BEST_FILE
from tests.support.checkpoint_files import disturb
from tests.support.jobs import column, read_lines, read_records, train_in_turn
from tests.support.reward_models import make_judge_who_loves, make_lover_of
from tests.support.tolerances import ADAM_EPS

PROMPTS, SAMPLES = 4, 2
CONFIG = f"""
model: {{dtype: float32}}
data: {{eval: null, max_prompt_tokens: 16}}
actor: {{parallel: {{tp: 1}}, optimizer: {{lr: 1e-3, warmup_steps: 0, eps: {ADAM_EPS}}}}}
batch: {{prompts_per_step: {PROMPTS}, mini_batches: 1}}
checkpoint: {{save_hf: false}}
logging: {{progress: false, samples: {PROMPTS * SAMPLES}}}
"""
REWARD = "def number_of_ones(response):\n    return response.count('1')\n"
SUMS = ("555+362", "836+715", "120+307", "777+244")
LAMBDA = 0.95
BETA = 0.1
JUDGED_TOKENS = 80
"""Length of the longest question that the judge can be asked. Only one with a long label is longer."""
LONG = "9" * JUDGED_TOKENS
REFRESHED, SAVED = 2, 3
"""Steps of a refresh of the reference, and of the checkpoint of the resumed run."""
NAMES = ("ppo", "distillation", "dpo", "synced", "resumed", "experts", "replayed")


def rows() -> list[dict[str, str]]:
    """Returns rows for all algorithms. Teachers take turns, and the judge cannot be shown the last label."""
    return [
        {
            "prompt": f"{of_row}=",
            "label": LONG if number == 3 else "7",
            "teacher": ("same", "other")[number % 2],
            "chosen": "5+3=8,918",
            "rejected": "8+6=5,2+3=00,95",
        }
        for number, of_row in enumerate(SUMS)
    ]


@pytest.fixture(scope="module")
def folder(warmed_up: Path, upcycled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the output of each job, and of the other models."""
    made = tmp_path_factory.mktemp("roles")
    disturb(warmed_up, made / "other")
    make_lover_of("7", made / "classifier")
    make_judge_who_loves("1", made / "judge_model")
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows())))
    (made / "reward.py").write_text(REWARD)
    (made / "config.yaml").write_text(CONFIG)
    jobs = dict(zip(NAMES, overrides(made, warmed_up, upcycled), strict=True))
    train_in_turn(made / "config.yaml", jobs, made, num_ranks=2)
    return made


def overrides(made: Path, warmed_up: Path, upcycled: Path) -> Iterable[list[str]]:
    """Yields the overrides of each of NAMES."""
    reads = f"data.train.path={made}/rows.jsonl"
    evaluates = f"data.eval={{path: {made}/rows.jsonl, max_rows: 2}}"
    generates = [
        *(reads, f"batch.samples_per_prompt={SAMPLES}"),
        f"reward={{function: {made}/reward.py:number_of_ones, num_workers: 1}}",
        "rollout={parallel: {tp: 1}, sampling: {max_response_tokens: 40}, max_context_tokens: 56}",
    ]
    dense, sparse = f"model.path={warmed_up}", f"model.path={upcycled}"
    yield [
        *(dense, *generates, evaluates, "algorithm=ppo", "steps=1", "reward={functions: []}"),
        "placement={'actor, critic': '0-1', 'rollout, reward': 1, 'reward_model, judge': '0-1'}",
        f"critic={{optimizer: {{eps: {ADAM_EPS}}}, parallel: {{tp: 2}}}}",
        f"advantages={{gamma: 1.0, gae_lambda: {LAMBDA}}}",
        f"reward_model={{path: {made}/classifier, parallel: {{tp: 2}}}}",
        f"judge={{path: {made}/judge_model, weight: 0.25, parallel: {{tp: 2}}, "
        f"prompt: '{{prompt}}{{label}}{{response}}', verdict: 'tests.support.reward_models:points', "
        f"max_context_tokens: {JUDGED_TOKENS}, sampling: {{max_response_tokens: 4}}}}",
    ]
    yield [
        *(dense, *generates, "algorithm=distillation", "steps=1", "loss.old_logprobs=rollout"),
        "placement={actor: 0, 'rollout, reward': 1, teacher: '0-1'}",
        f"teacher={{path: {{same: {warmed_up}, other: {made}/other}}, where: loss, top_k: full, parallel: {{tp: 2}}}}",
    ]
    yield [
        *(dense, reads, evaluates, "algorithm=dpo", "steps=1", f"preference.beta={BETA}"),
        *("data.max_response_tokens=40", "evaluation.keep_best={metric: eval/loss, mode: min}"),
        *("placement={'actor, reference': '0-1'}", f"reference={{path: {made}/other, offload: true}}"),
    ]
    synced = [dense, *generates, "algorithm=grpo", "loss.old_logprobs=actor"]
    yield [
        *(*synced, "steps=4", f"checkpoint.save_interval={SAVED}", f"reference.refresh_every={REFRESHED}"),
        "placement={actor: 0, 'rollout, reward, inference, reference': 1}",
    ]
    yield [
        *(*synced, "steps=5", f"reference={{refresh_every: {REFRESHED}, offload: true}}"),
        "placement={'actor, reference, rollout, reward': 0-1}",
        f"checkpoint={{save_interval: 5, resume: {made}/synced/checkpoints/step_{SAVED:07d}}}",
    ]
    yield [
        *(sparse, *generates, "algorithm=optimal_token_baseline", "steps=2", "actor.backend=fsdp"),
        *("loss={old_logprobs: actor, correction: {high: 2.0, normalize: step}}", "model.lora={rank: 4, alpha: 8}"),
        "placement={actor: 0-1, 'rollout, reward': 1}",
    ]
    yield [
        *(sparse, *generates, "algorithm=grpo", "steps=2", "actor.parallel={tp: 2, ep: 2, etp: 1}"),
        *("loss.old_logprobs=actor", "model.router_replay=recompute", "batch.dynamic_sampling={max_drawn: 4}"),
        "placement={actor: 0-1, 'rollout, reward': 1}",
    ]


def first_samples(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns all samples of step 0."""
    samples = [sample for sample in read_lines(folder / name / "samples.jsonl") if sample["step"] == 0]
    assert len(samples) == PROMPTS * SAMPLES
    return samples


def test_the_reward_is_told_by_models_and_the_critic_learns_from_it(folder: Path) -> None:
    """The critic's head is zero at first, so its loss is half the mean square of the returns."""
    record, samples = read_records(folder / "ppo")[0], first_samples(folder, "ppo")
    asked = [sample for sample in samples if sample["label"] != LONG]
    for sample in samples:
        model, judge = (float(sample["response"].endswith(digit)) for digit in "71")
        judge *= sample in asked
        assert sample["rewards"] == {"model": pytest.approx(model, abs=1e-4), "judge": judge}
        assert sample["reward"] == pytest.approx(model + 0.25 * judge, abs=1e-4)
    assert record["rollout/reward_judge_errors"] == len(samples) - len(asked) == SAMPLES
    questions = ["<user>{prompt}{label}{response}".format(**sample) for sample in asked]
    assert record["judge/question_tokens_mean"] == pytest.approx(sum(map(len, questions)) / len(asked))
    returns = torch.tensor([one["reward"] * LAMBDA**left for one in samples for left in range(one["length"])])
    assert record["critic/return_mean"] == pytest.approx(float(returns.mean()), rel=1e-4)
    assert record["critic/loss"] == pytest.approx(float(returns.square().mean() / 2), rel=1e-4) and returns.any()


def logprobs_of(checkpoint: Path, texts: list[tuple[str, str]]) -> list[Tensor]:
    """Returns the log-probs of the vocabulary before each token of the responses by transformers, each [tokens,
    vocabulary]. `texts` are pairs of prompt and response."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    for prompt, response in texts:
        ids, begins = ids_of(checkpoint, prompt + response), len(ids_of(checkpoint, prompt))
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits[0, begins - 1 : -1].log_softmax(-1))
    return found


def ids_of(checkpoint: Path, text: str) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"])


def test_each_row_has_the_teacher_that_it_names(folder: Path, warmed_up: Path) -> None:
    """The warmed-up model is its own teacher on half of the rows, and the other one on the rest."""
    teachers = {row["prompt"]: row["teacher"] for row in rows()}
    texts = [(one["prompt"], one["response"] + "<eos>") for one in first_samples(folder, "distillation")]
    actor, other = (logprobs_of(checkpoint, texts) for checkpoint in (warmed_up, folder / "other"))
    divergences = [
        (mine.exp() * (mine - told)).sum(-1) * (teachers[prompt] == "other")
        for (prompt, _), mine, told in zip(texts, actor, other, strict=True)
    ]
    expected = float(torch.cat(divergences).mean())
    assert column(read_records(folder / "distillation"), "train/teacher_kl") == [pytest.approx(expected, rel=1e-3)]
    assert expected > 1e-3


def margin_of(actor: Path, reference: Path) -> float:
    """Returns the mean margin of the evaluated rows under two checkpoints of the same tokenizer."""
    sides = [[(row["prompt"], row[side] + "<eos>") for row in rows()[:2]] for side in ("chosen", "rejected")]

    def total(checkpoint: Path, texts: list[tuple[str, str]]) -> float:
        targets = [torch.tensor(ids_of(reference, response)) for _, response in texts]
        pairs = zip(logprobs_of(checkpoint, texts), targets, strict=True)
        return sum(float(values.gather(1, ids[:, None]).sum()) for values, ids in pairs) / len(texts)

    chosen, rejected = (BETA * (total(actor, texts) - total(reference, texts)) for texts in sides)
    return chosen - rejected


def test_margins_of_pairs_are_those_of_transformers_and_the_best_policy_is_kept(folder: Path, warmed_up: Path) -> None:
    records = read_records(folder / "dpo")
    margins, held_out = column(records, "eval/margin"), column(records, "eval/loss")
    assert margins[0] == pytest.approx(margin_of(warmed_up, folder / "other"), abs=1e-3)
    best = json.loads((folder / "dpo/hf_best" / BEST_FILE).read_text())
    assert best == {"step": held_out.index(min(held_out)), "metric": "eval/loss", "value": min(held_out)}
    assert margins[best["step"]] == pytest.approx(margin_of(folder / "dpo/hf_best", folder / "other"), abs=1e-3)


def test_inference_and_reference_get_the_actors_weights(folder: Path) -> None:
    """Inference has those of each step, the reference those of its last refresh. A resumed run goes on with them, in
    the actor's place."""
    synced, resumed = (read_records(folder / name) for name in ("synced", "resumed"))
    assert max(map(abs, column(synced, "train/ppo_kl"))) < 1e-5
    assert "perf/inference_logprobs_s" in synced[0] and "perf/inference_logprobs_s" not in resumed[0]
    distances, later = column(synced, "train/reference_kl"), column(resumed, "train/reference_kl")
    assert [distance < 1e-6 for distance in distances] == [True, False, True, False]
    assert later == [pytest.approx(distances[SAVED], rel=1e-3), pytest.approx(0, abs=1e-6)]


def test_adapters_of_experts_compute_what_engines_compute_with_merged_weights(folder: Path) -> None:
    """After the first step the adapters are not zero. Correction weights have a mean of 1 over the step."""
    records = read_records(folder / "experts")
    assert min(column(records, "train/grad_norm")) > 0
    assert max(column(records, "train/train_rollout_logprob_abs_diff")) < 1e-5
    assert column(records, "train/tis_weight") == pytest.approx([1, 1], rel=1e-6)


def test_the_actor_replays_its_own_choices_of_experts_on_groups_that_differ(folder: Path) -> None:
    records, rewards = read_records(folder / "replayed"), dict[tuple[int, int], list[float]]()
    assert column(records, "train/replayed_choices") == [1, 1]
    assert column(records, "train/replayed_choices_differing") == [0, 0]
    for number, sample in enumerate(read_lines(folder / "replayed/samples.jsonl")):
        rewards.setdefault((sample["step"], number // SAMPLES), []).append(sample["reward"])
    flat = Counter(step for (step, _), of_group in rewards.items() if len(set(of_group)) == 1)
    dropped, kept = (column(records, f"rollout/dynamic_filter/{what}") for what in ("dropped", "kept_at_limit"))
    assert [flat[0], flat[1]] == kept and len(rewards) == 2 * PROMPTS
    assert all(count <= 3 * PROMPTS for count in dropped)
