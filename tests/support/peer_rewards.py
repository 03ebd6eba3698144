"""Reward functions with the signatures of this and other trainers, for test_reward_conventions."""

import asyncio
import json
import os
import time
from types import SimpleNamespace
from typing import Any


def ours(response: str, row: dict[str, Any], *, scale: float = 1.0) -> float:
    """Takes only some of the possible parameters."""
    return scale * float(response == row["solution"])


def ours_with_messages(messages: list[dict[str, str]], label: str) -> float:
    return float([message["role"] for message in messages] == json.loads(label))


def ours_with_images(response: str, images: list[Any]) -> float:
    """Returns whether the response is the number of red images."""
    return float(response == str(sum(image.getpixel((0, 0)) == (255, 0, 0) for image in images)))


def trl_with_images(completions: list[Any], images: list[list[Any]], **columns: Any) -> list[float]:
    return [float(image.width) for of_sample in images for image in of_sample]


def per_turn(prompt: str, response: str, label: str, turns: list[dict[str, Any]]) -> list[float]:
    """Returns, per turn, half of the environment's reward plus 1 for each reply "ok"."""
    return [turn["reward"] / 2 + sum(reply["content"] == "ok" for reply in turn["replies"]) for turn in turns]


def per_turn_and_in_the_end(prompt: str, response: str, label: str, turns: list[Any]) -> dict[str, Any]:
    return {"turns": [1.0] * len(turns), "score": 10.0, "length": len(response)}


def verl(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    right = solution_str in ground_truth["target"]
    return {
        "score": kwargs.get("bonus", 0.0) + float(right and data_source == "countdown"),
        "index": extra_info["index"] if extra_info else -1,
        "acc": right,
        "pred": solution_str,
        "broken": float("nan"),
    }


def verl_short(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def ours_with_verl_s_names(prompt: str, solution_str: str, ground_truth: str) -> float:
    return float(prompt + solution_str == ground_truth)


async def verl_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
) -> list[float]:
    return [float(a == b) * len(solution_strs) for a, b in zip(solution_strs, ground_truths, strict=True)]


def trl(completions: list[Any], solution: list[str], log_metric: Any = None, **kwargs: Any) -> list[float | None]:
    """Rewards a match with the column `solution`, or returns None without one. Completions of chats are messages."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    log_metric("group", float(len(texts)))
    rewards = [None if right is None else float(text == right) for text, right in zip(texts, solution, strict=True)]
    assert len(kwargs["completion_ids"]) == len(kwargs["prompts"]) == len(texts)
    return [r if r is None else r + len(i) for r, i in zip(rewards, kwargs["completion_ids"], strict=True)]


def trl_scheduled(
    prompts: list[str], completions: list[str], trainer_state: Any, difficulty: list[int], penalty: list[int] | int = 7
) -> list[float]:
    return [
        trainer_state.global_step + hard + (penalty if isinstance(penalty, int) else penalty[0]) for hard in difficulty
    ]


async def trl_async(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(completions))] * len(completions)


def trl_by_ids(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def trl_too_few(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0]


def trl_raising(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(text) for text in completions]


async def slime(args: Any, sample: Any, **kwargs: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {
        "points": float(sample.response == sample.label["answer"]) * args.scale,
        "score": -1.0,
        "length": sample.response_length,
        "cut": sample.status == sample.Status.TRUNCATED,
        "drawn": sum(sample.loss_mask),
        "tokens": len(sample.tokens),
        "level": sample.metadata.get("level", -1),
        "typed": args.rm_type is not None,
        "absent": getattr(args, "absent", 5),
    }


def slime_reading_what_is_not_there(args: Any, sample: Any) -> float:
    return float(args.threshold)


def slime_group(args: Any, samples: list[Any]) -> list[float]:
    """Gives 1 to the longest response of the group."""
    longest = max(sample.response_length for sample in samples)
    return [float(sample.response_length == longest and args.group_rm) for sample in samples]


async def together(prompt: str, response: str, label: str) -> int:
    """Returns the largest number of concurrent calls. The responses "block", "die", "sleep" and "exit" do what they
    say."""
    state.running += 1
    state.most = max(state.most, state.running)
    await asyncio.sleep(0.02)
    state.running -= 1
    if response == "block":
        time.sleep(3600)
    if response == "die":
        os._exit(3)
    if response == "sleep":
        await asyncio.sleep(3600)
    if response == "exit":
        raise SystemExit("gone")
    return state.most


state = SimpleNamespace(running=0, most=0)
