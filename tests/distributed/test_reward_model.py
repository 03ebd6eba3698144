"""Role reward_model gives the scores of transformers' classifier for the same conversations, in every parallel
layout."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.cases_reward_model import PROMPTS, RESPONSES
from tests.support.reward_models import LETTERS, TEMPLATE, make_random
from tests.support.worlds import made_once, run_case

FAMILIES = {"Llama": {}, "Qwen3": {"head_dim": 16, "pad_token_id": LETTERS["+"]}}
LONGEST = 64


@made_once
def scores(folder: Path) -> tuple[dict[str, list[float]], list[dict[str, list[float]]]]:
    """Returns transformers' scores by family, and the scores of every rank."""
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    expected = {family: scores_by_transformers(folder / family, family) for family in FAMILIES}
    return expected, run_case("cases_reward_model:all_cases", 2, folder=folder, families=[*FAMILIES])


@torch.no_grad()
def scores_by_transformers(path: Path, family: str) -> list[float]:
    """Returns the scores of every response to every prompt. Texts too long for the model are cut to their end."""
    from jinja2 import Template

    model, template = make_random(path, family, **FAMILIES[family]), Template(TEMPLATE)
    scores = []
    for prompt in PROMPTS:
        for response in RESPONSES:
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            ids = [LETTERS[letter] for letter in template.render(messages=said)]
            scores.append(float(model(torch.tensor([ids[-LONGEST:]])).logits))
    return scores


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(scores, family):
    """One text ends in tokens that transformers takes for padding."""
    expected, ranks = scores
    for number, rank in enumerate(ranks):
        assert rank[f"{family}/tp2"] == pytest.approx(expected[family], abs=5e-5)
        assert rank[f"{family}/dp2"] == pytest.approx(expected[family][number::2], abs=5e-5)
    assert max(expected[family]) - min(expected[family]) > 0.1
