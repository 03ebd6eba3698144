"""The task of counting red squares: rows with images of fields of coloured cells, and a config for one rank."""

import json
import random
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

CELL, SIDE = 14, 4
"""Pixels of a cell, and cells of a field. With tiny checkpoints a cell is a token."""
RED, OTHERS = (220, 30, 30), [(30, 60, 220), (40, 180, 60), (230, 230, 230), (20, 20, 20)]
MOST = 4
SFT_STEPS = 9
"""Enough to answer with a digit, often a wrong one."""


def field(rng: random.Random, num_red: int) -> Image.Image:
    cells = [RED] * num_red + [rng.choice(OTHERS) for _ in range(SIDE**2 - num_red)]
    rng.shuffle(cells)
    image = Image.new("RGB", (SIDE, SIDE))
    image.putdata(cells)
    return image.resize((SIDE * CELL, SIDE * CELL), Image.Resampling.NEAREST)


def write_rows(folder: Path, name: str, num_rows: int, seed: int) -> Path:
    """Writes rows of a prompt with an image, a response and a label. Returns the file."""
    rng = random.Random(seed)
    (folder / name).mkdir(parents=True)
    rows = []
    for number in range(num_rows):
        count = number % (MOST + 1)
        field(rng, count).save(folder / name / f"{number}.png")
        rows.append(
            {"prompt": "<image>red?", "images": [f"{name}/{number}.png"], "response": str(count), "label": str(count)}
        )
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump(sections))
    return path


def data_of(task: Path) -> dict[str, Any]:
    return {
        "train": {"path": f"{task}/train.jsonl"},
        "eval": {"path": f"{task}/eval.jsonl"},
        "max_prompt_tokens": 64,
    }


def sft(task: Path, steps: int = SFT_STEPS, **sections: Any) -> dict[str, Any]:
    """Returns a config that learns the responses on rank 0. `task` has model/, train.jsonl and eval.jsonl."""
    return {
        "algorithm": "sft",
        "steps": steps,
        "seed": 0,
        "placement": {"actor": 0},
        "model": {"path": f"{task}/model", "dtype": "float32", "vision": {}},
        "data": {
            "train": {"path": f"{task}/train.jsonl"},
            "eval": {"path": f"{task}/eval.jsonl"},
            "max_prompt_tokens": 64,
        },
        "actor": {"optimizer": {"lr": 3e-3, "warmup_steps": 5, "decay": "linear", "clip_grad": 1.0}},
        "batch": {"prompts_per_step": 32},
        "evaluation": {"interval": steps},
    } | sections


def grpo(task: Path, steps: int, **sections: Any) -> dict[str, Any]:
    """Returns a config that learns from rewards on rank 0. It continues from sft/hf in the folder of the task."""
    return {
        "algorithm": "grpo",
        "steps": steps,
        "seed": 0,
        "placement": {"actor, reference, rollout, reward": 0},
        "model": {"path": f"{task}/sft/hf", "dtype": "float32", "vision": {}},
        "data": {
            "train": {"path": f"{task}/train.jsonl"},
            "eval": {"path": f"{task}/eval.jsonl"},
            "max_prompt_tokens": 64,
        },
        "actor": {"optimizer": {"lr": 1.2e-3, "beta2": 0.99, "warmup_steps": 2, "decay": "linear", "clip_grad": 1.0}},
        "rollout": {
            "sampling": {"temperature": 1.0, "max_response_tokens": 2},
            "max_context_tokens": 66,
            "max_running_requests": 128,
        },
        "reward": {"function": "exact_match"},
        "batch": {"prompts_per_step": 32, "samples_per_prompt": 8, "mini_batches": 4},
        "loss": {
            "old_logprobs": "rollout",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "kl": {"coef": 0.05, "estimator": "k3", "where": "loss"},
        },
        "evaluation": {"interval": steps},
    } | sections
