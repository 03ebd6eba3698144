"""Batches of sources that count prompts, and tables that several sources share."""

from math import gcd
from typing import Any

from rltrain.importing.conversions import count
from rltrain.importing.translation import Translation, UntranslatableError

ALGORITHMS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gae": "ppo",
    "ppo": "ppo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
    "reinpp": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "maxrl": "maxrl",
    "gdpo": "gdpo",
    "gpg": "gpg",
    "optimal_token_baseline": "optimal_token_baseline",
    "grpo_passk": "pass_at_k",
}
WITHOUT_COMPARISON = ("reinforce_plus_plus", "ppo", "remax")
WHITENED = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
DISCOUNTED = ("ppo", "reinforce_plus_plus")
WITH_STD = ("grpo", "pass_at_k", "gdpo")


def take_rewards(out: Translation, estimator: str, key: str, *, whitens: bool) -> None:
    """Of sources in which a sample that is alone in its group has its reward as advantage, where all are alone: here
    algorithms that compare samples would give it 0."""
    origin = f"{estimator} of one sample per prompt: its reward is its advantage"
    out.set("algorithm", "reinforce_plus_plus", origin)
    out.set("advantages.whiten", whitens, origin)
    out.notes.append(
        f"{key} is 1: a sample that is alone in its group has its reward as advantage in {out.framework} under "
        f"{estimator}, and 0 here; so the algorithm is reinforce_plus_plus, which gives it its reward"
    )


def set_mini_batches(out: Translation, prompts: Any, mini_batch: Any, origin: str) -> None:
    """Mini-batches that are counted in prompts."""
    whole, rest = divmod(count(prompts), count(mini_batch))
    if rest or not whole:
        raise UntranslatableError(
            f"{origin}: train batch size {prompts} must be divisible by mini batch size {mini_batch}"
        )
    out.set("batch.mini_batches", whole, origin)
    if whole > 1:
        out.set("batch.mini_batches_by", "prompts", origin)


def set_context(out: Translation, longest: Any, origin: str) -> None:
    """The longest prompt and response, or more where the source says so."""
    needed = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    given = count(longest) if longest is not None else 0
    out.set("rollout.max_context_tokens", max(needed, given), origin if given > needed else "prompt and response")


def set_evaluation(out: Translation, data: dict[str, Any], sampling: dict[str, Any], samples: int, origin: str) -> None:
    """One held-out set: data.eval where it is decoded greedily once."""
    if sampling.get("temperature", 0.0) == 0 and samples == 1:
        for key, value in data.items():
            out.set(f"data.eval.{key}", value, origin)
        return
    plan = {"name": "val", "data": data, "sampling": sampling, "samples_per_prompt": samples}
    out.set("evaluation.sets", [plan], origin)
    needed = sampling.get("max_response_tokens", 0) + out.get("data.max_prompt_tokens")
    if needed > out.get("rollout.max_context_tokens"):
        out.set("rollout.max_context_tokens", needed, f"prompt and the longest response of {origin}")


def cut_fully_sharded(out: Translation, key: str, name: object) -> None:
    """FSDP spreads weights over all ranks; here Megatron cuts them by tensor parallelism, as wide as the engine's, and
    shards the optimizer over the replicas. Ranks that cut weights share out sequences, too."""
    tp, slices = out.get("rollout.parallel.tp"), out.get("actor.parallel.cp")
    out.leave(key, name, "Megatron trains: tensor parallelism as the engine's, and a distributed optimizer")
    if tp > 1 and out.get("actor.parallel.tp") == 1:
        out.set("actor.parallel.tp", tp, f"{key} {name}: in the place of sharded weights, as wide as the engine's")
        out.set("actor.parallel.sequence_parallel", True, f"{key} {name}")
        if slices > 1:
            out.set("actor.parallel.cp", slices // gcd(slices, tp), f"{slices} ranks share out a sequence, {tp} by tp")
