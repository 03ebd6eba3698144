"""What tools/benchmarks/grpo_step.py compares with: GRPO steps by TRL's GRPOTrainer, in a Python that has TRL.

    python grpo_step_trl.py MODEL TRAIN.jsonl STEPS

Prints the seconds of each step, generation to optimizer, as one JSON list. The settings are the quickstart's.
"""

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, SAMPLES, MINI_BATCHES = 32, 16, 4
MAX_RESPONSE_TOKENS = 40


class StepTimes(TrainerCallback):
    """Seconds from the beginning of a step's generation to the end of its last optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % MINI_BATCHES == 0:
            self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % MINI_BATCHES == 0:
            self.seconds.append(time.perf_counter() - self.begin)


def exact_match(prompts: list[str], completions: list[str], label: list[str], **columns: Any) -> list[float]:
    return [float(text.rpartition(",")[2] == right) for text, right in zip(completions, label, strict=True)]


def main(model_path: str, train_path: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    with open(train_path) as file:
        rows = [json.loads(line) for _, line in zip(range(PROMPTS * (num_steps + 2)), file, strict=False)]
    times = StepTimes()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * SAMPLES // MINI_BATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=MINI_BATCHES,
        num_generations=SAMPLES,
        max_completion_length=MAX_RESPONSE_TOKENS,
        max_steps=num_steps * MINI_BATCHES,
        learning_rate=3e-4,
        beta=0.0,
        temperature=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        reward_funcs=exact_match,
        train_dataset=Dataset.from_list(rows),
        args=config,
        callbacks=[times],
    )
    trainer.train()
    print(json.dumps(times.seconds))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
