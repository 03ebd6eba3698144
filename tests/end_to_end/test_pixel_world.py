"""An embodied job: a tiny model that sees learns to walk to the red cell. Actors, simulators and engines are in the
hybrid layout of RLinf."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.jobs import column, read_lines, train
from tests.support.pixel_world import ID, LETTERS, beginnings, write_demonstrations, write_tasks
from tests.support.vision_checkpoints import write_checkpoint

pytestmark = pytest.mark.slow

HELD_OUT = 40
SFT_STEPS, MOST_GRPO_STEPS = 54, 200
LEARNT = 0.9
"""The share of won episodes held out that ends training. Seeds and processors differ in the steps until then."""
RANDOM_STEPS = 0.3
"""Share of random steps in the demonstrations."""
ROWS = {"label_key": None}


def write_config(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the rows, and a model that has seen demonstrations but walks badly."""
    folder = tmp_path_factory.mktemp("pixel_world")
    write_checkpoint(folder / "model", "qwen3_vl")
    held_out, trained = beginnings()[:HELD_OUT], beginnings()[HELD_OUT:]
    write_tasks(folder / "train.jsonl", trained)
    write_tasks(folder / "eval.jsonl", held_out)
    shown = write_demonstrations(folder / "shown.jsonl", trained, share_of_random=RANDOM_STEPS)
    config = {
        "algorithm": "sft",
        "steps": SFT_STEPS,
        "seed": 0,
        "placement": {"actor": 0},
        "model": {"path": str(folder / "model"), "dtype": "float32", "vision": {}},
        "data": {
            "train": {"path": str(shown), "response_key": None, **ROWS},
            "max_prompt_tokens": 64,
            "max_response_tokens": 300,
        },
        "actor": {"optimizer": {"lr": 3e-3, "warmup_steps": 5, "decay": "linear"}},
        "batch": {"prompts_per_step": 40},
    }
    train(write_config(folder / "sft.yaml", **config), f"output_dir={folder / 'sft'}", num_ranks=1)
    return folder


def walking(task: Path, steps: int, **sections: Any) -> dict[str, Any]:
    """Returns a config of episodes in the world, with actors on all ranks, simulators on two and engines on two."""
    return {
        "algorithm": "grpo",
        "steps": steps,
        "seed": 0,
        "placement": {"actor": "0-3", "env, reward": "0-1", "rollout": "2-3"},
        "schedule": {"mode": "pipelined"},
        "model": {"path": str(task / "sft/hf"), "dtype": "float32", "vision": {}},
        "data": {
            "train": {"path": str(task / "train.jsonl"), **ROWS},
            "max_prompt_tokens": 64,
        },
        "actor": {"optimizer": {"lr": 5e-4, "warmup_steps": 2}},
        "rollout": {
            "sampling": {"temperature": 1.0, "max_response_tokens": 250},
            "max_context_tokens": 320,
            "max_running_requests": 64,
        },
        "env": {
            "function": f"gymnasium:tests.support.pixel_world:{ID}",
            "options": {"action_names": [*LETTERS]},
            "max_turns": 6,
            "max_turn_tokens": 2,
            "num_workers": 1,
        },
        "batch": {"prompts_per_step": 16, "samples_per_prompt": 8, "mini_batches": 4},
        "loss": {"old_logprobs": "rollout"},
        "evaluation": {
            "interval": min(steps, 10),
            "stop_at": LEARNT,
            "sets": [
                {
                    "name": "held_out",
                    "data": {"path": str(task / "eval.jsonl"), **ROWS},
                    "sampling": {"temperature": 1.0},
                    "samples_per_prompt": 2,
                }
            ],
        },
    } | sections


def test_walking_is_learnt_from_rewards(task: Path) -> None:
    config = write_config(task / "grpo.yaml", **walking(task, MOST_GRPO_STEPS))
    records = train(config, f"output_dir={task / 'grpo'}")
    before, *_, after = column(records, "eval/held_out/score")
    assert before <= 0.4 and after >= LEARNT, "the share of won episodes held out"
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert max(column(records, "env/failed")) == 0


@pytest.mark.parametrize("vectorization", [None, "sync"])
def test_chunks_of_actions_in_one_or_many_worlds(task: Path, vectorization: str | None) -> None:
    options = {"action_names": [*LETTERS], "action_chunk": 2, "render": "rgb_array", "vectorization": vectorization}
    env = {**walking(task, 2)["env"], "options": options, "batch_size": 4, "max_turn_tokens": 4}
    config = write_config(task / "chunks.yaml", **walking(task, 2, env=env))
    output = task / f"chunks-{vectorization}"
    records = train(config, f"output_dir={output}")
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert max(column(records, "env/failed")) == 0
    evaluated = [sample for file in (output / "evaluation_samples").iterdir() for sample in read_lines(file)]
    samples = [*read_lines(output / "samples.jsonl"), *evaluated]
    assert evaluated and all(len(sample["images"]) == 1 for sample in samples)
    replies = [reply for sample in samples for turn in sample.get("turns", ()) for reply in turn["replies"]]
    ends_at_once = vectorization is not None  # the model gives one action, and many worlds need whole chunks
    assert ends_at_once or any("<image>" in reply["content"] for reply in replies)
    for reply in replies:
        assert len(reply.get("images", ())) == reply["content"].count("<image>")
