"""Careless users' reward functions, for test_rewards."""

import json
import os
import re
import sys
import time

import numpy as np

HANG = "a" * 60 + "!"


def misbehave(prompt: str, response: str, label: str) -> object:
    """Misbehaves in the way named by the response."""
    if response == "loop":
        while True:
            pass
    if response == "sleep":
        time.sleep(3600)
    if response == "regex":
        return re.fullmatch(r"(a+)+", HANG) is not None
    if response == "raise":
        raise KeyError("no such answer")
    if response == "exit":
        sys.exit("gone")
    if response == "die":
        os._exit(3)
    values: dict[str, object] = {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0, 2.0],
        "dict": {"points": 1.0},
        "complex": 1j,
        "huge": 10**400,
        "beyond float32": -1e39,
        "sum beyond float32": {"score": 3e38, "turns": [3e38]},
        "true": True,
        "int": 3,
        "half": 0.5,
        "numpy": np.float32(0.25),
        "numpy_bool": np.bool_(True),
    }
    return values[response]


def graded(response: str, label: str) -> dict[str, float]:
    return {"right": float(response == label), "short": -len(response) / 10}


def from_json(prompt: str, response: str, label: str) -> float:
    record = json.loads(response)
    return float(record["answer"])


def without_answer(prompt: str, response: str, label: str) -> float:
    return float({}["answer"])


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("cannot say")


def raise_unprintable(prompt: str, response: str, label: str) -> float:
    if response == "deep":
        return raise_unprintable(prompt, response, label)
    raise ValueError("x" * 100_000) if response == "long" else UnprintableError


def in_another_order(response: str, label: str, prompt: str) -> str:
    return prompt + response + label


def as_for_nobody(data_source: str, text: str, gold: str) -> float:
    return 0.0


def verl_with_a_tokenizer(data_source: str, solution_str: str, ground_truth: str, tokenizer: object) -> float:
    return 0.0


def trl_with_environments(completions: list[str], environments: list[object]) -> list[float]:
    return [0.0 for _ in completions]


def slime_with_more(args: object, sample: object, evaluator: object) -> float:
    return 0.0


def with_names_of_its_own(question: str, _: str, gold: str) -> str:
    return question + _ + gold


def tensor_of_size(prompt: str, response: str, label: str) -> object:
    """Returns a tensor with as many elements as the response says, like a reward model."""
    import torch

    return torch.full((int(response),), 0.75)


loaded: list[str] = []


def loading_at_first(prompt: str, response: str, label: str) -> float:
    """Takes long for the first call in a process."""
    if not loaded:
        time.sleep(3)
        loaded.append("a model")
    return 1.0


def chatty(prompt: str, response: str, label: str) -> float:
    """Prints, and reads standard input."""
    print("scoring", prompt, flush=True)
    os.system("echo from a child")
    return float(len(sys.stdin.read()) == 0)


def process_id_after_a_while(prompt: str, response: str, label: str) -> int:
    time.sleep(0.3)
    return os.getpid()


def whole(prompt: str, response: str, label: str, *, separator: str = "|") -> float:
    """Returns 1 if the response quotes its prompt and label exactly."""
    return float(response == separator.join((prompt, label)))
