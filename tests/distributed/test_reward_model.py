"""Role reward_model gives what transformers' classifier says of the same conversations, in every parallel layout."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.cases_reward_model import PROMPTS, RESPONSES
from tests.support.reward_models import LETTERS, TEMPLATE, make_random
from tests.support.torchrun import run_distributed

FAMILIES = {"Llama": {}, "Qwen3": {"head_dim": 16, "pad_token_id": LETTERS["+"]}}
LONGEST = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_models")
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[float]]:
    return {family: scores_by_transformers(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def ranks(folder: Path, expected: dict[str, list[float]]) -> list[dict[str, list[float]]]:
    arguments = {"folder": str(folder), "families": [*FAMILIES]}
    return run_distributed("tests.distributed.cases_reward_model:all_cases", 2, arguments, timeout_s=120)


@torch.no_grad()
def scores_by_transformers(path: Path, family: str) -> list[float]:
    """Of every response to every prompt. Of texts that are too long for the model, of their end."""
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
def test_scores_are_those_of_transformers(ranks, expected, family):
    """Also where a text ends in what transformers takes for padding."""
    for number, rank in enumerate(ranks):
        assert rank[f"{family}/tp2"] == pytest.approx(expected[family], abs=5e-5)
        assert rank[f"{family}/dp2"] == pytest.approx(expected[family][number::2], abs=5e-5)
    assert max(expected[family]) - min(expected[family]) > 0.1
