"""Refuses what a config may not ask for of policy losses and rewards."""

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.learning import Correction
from rltrain.config.schema import Config, Loss, Reward
from rltrain.errors import listed
from rltrain.tasks.metrics import OF_ALL_REWARDS
from rltrain.tasks.roles import rewarding_roles

# What a config may ask for of the policy loss: what has no meaning together is refused with the reason.


def learning_problems(config: Config) -> Iterator[str]:
    """Sentences with the keys, the reason, and what is expected in their place."""
    yield from _policy_problems(config)
    yield from _correction_problems(config.loss)
    yield from _kl_problems(config.loss)


def _policy_problems(config: Config) -> Iterator[str]:
    loss, algorithm = config.loss, algorithm_of(config)
    if loss.policy != "clip" and not algorithm.generates:
        yield (
            f"loss.policy: got {loss.policy} with algorithm {algorithm.name}, which learns from no samples of its own "
            "and has no policy loss; expected the key to be left out"
        )
    if (loss.policy == "own") != (loss.function is not None):
        expected = "null" if loss.function else '"file.py:function" or "module:function"'
        yield f"loss.function: got {loss.function} with loss.policy {loss.policy}; expected {expected}"
    if loss.dual_clip is not None and loss.policy not in ("clip", "own"):
        yield (
            f"loss.dual_clip: got {loss.dual_clip} with loss.policy {loss.policy}; expected null: it is the "
            "second bound of loss.policy clip"
        )
    if loss.policy == "geometric_mean" and algorithm.per_token:
        yield (
            f"loss.policy: got geometric_mean with algorithm {algorithm.name}, whose tokens have advantages of their "
            "own: it is of whole sequences, each with one advantage; expected clip, cispo or sapo"
        )
    if loss.clip_cov.low >= loss.clip_cov.high:
        yield (
            f"loss.clip_cov.low: got {loss.clip_cov.low} with loss.clip_cov.high {loss.clip_cov.high}; expected less: "
            "tokens are drawn from those whose covariance is between the two"
        )


def _correction_problems(loss: Loss) -> Iterator[str]:
    correction = loss.correction
    if correction.high is None:
        for key, default in (("method", "tis"), ("level", "token"), ("low", 0), ("normalize", None)):
            value = getattr(correction, key)
            if value != default:
                yield (
                    f"loss.correction.{key}: got {value} without loss.correction.high; expected an upper bound of the "
                    "ratio, such as 2.0"
                )
    elif correction.low >= correction.high:
        yield (
            f"loss.correction.low: got {correction.low} with loss.correction.high {correction.high}; expected less: "
            "ratios between the two are the ones that count as they are"
        )
    elif loss.old_logprobs != "actor" and correction.method != "mask" and loss.policy != "reinforce":
        yield (
            f"loss.correction.high: got {correction.high} with loss.old_logprobs {loss.old_logprobs} and "
            f"loss.correction.method {correction.method}; expected loss.old_logprobs: actor, since its weights compare "
            "the actor with the engine, which the policy's own ratio does already otherwise; or "
            "loss.correction.method: mask, which weighs nothing; or loss.policy: reinforce, which has no ratio"
        )
    elif correction.normalize is not None and correction.method == "mask":
        yield (
            f"loss.correction.normalize: got {correction.normalize} with loss.correction.method mask, whose weights "
            "are all 1; expected null, or tis, mis or icepop"
        )
    elif correction.normalize == "step" and loss.old_logprobs != "actor":
        yield (
            f"loss.correction.normalize: got step with loss.old_logprobs {loss.old_logprobs}; expected mini_batch: "
            "weights are of the present log-probs, which every mini-batch changes"
        )
    yield from _rejection_problems(correction)


def _rejection_problems(correction: Correction) -> Iterator[str]:
    for number, bounds in enumerate(correction.masks):
        if bounds.low >= bounds.high:
            yield (
                f"loss.correction.masks.{number}.low: got {bounds.low} with high {bounds.high}; expected less: ratios "
                "between the two are left in"
            )
    if correction.rejected == "weight_0" and correction.reject_above is None and not correction.masks:
        yield (
            "loss.correction.rejected: got weight_0 without loss.correction.masks or reject_above; expected left_out: "
            "there is nothing that would find what to reject"
        )
    if correction.reject_above is None and correction.reject_by != "k3":
        yield (
            f"loss.correction.reject_by: got {correction.reject_by} without loss.correction.reject_above; expected the "
            "estimated KL per token above which a sequence is left out, such as 0.01"
        )


def _kl_problems(loss: Loss) -> Iterator[str]:
    if loss.kl.unbiased and loss.kl.where == "reward":
        yield (
            "loss.kl.unbiased: got true with loss.kl.where reward; expected loss.kl.where: loss: a reward has no "
            "gradient to make unbiased"
        )
    if loss.kl.unbiased and loss.kl.estimator == "k2":
        yield (
            "loss.kl.unbiased: got true with loss.kl.estimator k2, whose mean is not the KL whatever weighs it; "
            "expected loss.kl.estimator: k3"
        )
    if loss.kl.estimator == "full" and (loss.kl.where == "reward" or loss.kl.unbiased):
        other = "where reward" if loss.kl.where == "reward" else "unbiased true"
        yield (
            f"loss.kl.estimator: got full with loss.kl.{other}; expected k1, k2 or k3: over the whole vocabulary the "
            "KL is a term of the loss, and exact"
        )


# What a config may ask for of reward functions; whether they can be called is found out where they are imported.

NEEDS_LABEL = ("exact_match", "math", "code")


def reward_problems(config: Config) -> Iterator[str]:
    yield from _section_problems("reward", config.reward, config, _models(config))
    for number, one in enumerate(config.evaluation.sets):
        if one.reward is not None:
            yield from _section_problems(f"evaluation.sets.{number}.reward", one.reward, config, [])
    yield from _model_problems(config)
    yield from _label_problems(config)


def _section_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    """`models` are roles that are part of this reward."""
    if reward.functions:
        for key in ("function", "options"):
            if key in reward.model_fields_set:
                yield (
                    f"{section}.{key}: got {getattr(reward, key)!r} beside {section}.functions; expected one of the "
                    f"two: each entry of {section}.functions has a function and options of its own"
                )
    if reward.functions is not None or models:
        yield from _name_problems(section, reward, config, models)
        yield from _weight_problems(section, reward, config, models)
    for name in reward.names:
        if name.startswith(("http://", "https://")) and not urlsplit(name).hostname:
            yield f"{section}.function: got {name!r}; expected an URL with a host, such as http://judge:8000/score"


def _models(config: Config) -> list[str]:
    """Placed roles that tell the reward what responses are worth."""
    return [role for role in rewarding_roles() if role in config.placed_roles]


def _name_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    titles = {f"{section}.functions.{number}.name": part.title for number, part in enumerate(reward.functions or ())}
    if reward.functions is None:
        titles[f"{section}.function"] = reward.parts[0].title
    titles |= {f"{role}.name": getattr(config, role).name for role in models}
    for key, title in titles.items():
        taken = title in OF_ALL_REWARDS or title.endswith(("_errors", "_timeouts"))
        if taken or not re.fullmatch(r"[A-Za-z0-9_]+", title):
            yield (
                f"{key}: got {title!r}; expected letters, digits and underscores, none of {listed(OF_ALL_REWARDS)} "
                "and nothing that ends in _errors or _timeouts: the metric is rollout/reward_<name>"
            )
    for title, count in Counter(titles.values()).items():
        if count > 1:
            keys = [key for key, of_key in titles.items() if of_key == title]
            of_functions = all(key.startswith(f"{section}.functions") for key in keys)
            yield (
                f"{section + '.functions' if of_functions else section}: {count} are called {title!r}; expected a name "
                f"for each that tells their metrics apart ({', '.join(keys)})"
            )


def _weight_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    weights = [part.weight for part in reward.parts] + [getattr(config, role).weight for role in models]
    if not weights:
        placing = " or ".join(rewarding_roles())
        yield (
            f"{section}.functions: got none, and no model tells what responses are worth; expected a function, or a "
            f"role {placing} in placement"
        )
    elif not any(weights):
        yield (
            f"{section if models else section + '.functions'}: every weight is 0; expected one that is not, or every "
            "reward is 0"
        )


def _model_problems(config: Config) -> Iterator[str]:
    placed = _models(config)
    for role in rewarding_roles():
        path = getattr(config, role).path
        if role in placed and path is None:
            yield f"{role}.path: got null, and placement has role {role}; expected the folder of its checkpoint"
        if role in placed and role == "judge" and config.judge.prompt is None:
            yield "judge.prompt: got null; expected what the judge is asked, a text with {response}"
        if role not in placed and path is not None:
            yield f"{role}.path: got {path!r}, but no role {role} is placed; expected {role}: ranks in placement"


def _label_problems(config: Config) -> Iterator[str]:
    """Files without labels, of which a function takes one."""
    scores_training = algorithm_of(config).generates
    files = [("data.train", config.data.train, config.reward)] if scores_training else []
    answered = [] if config.scores_held_out else config.evaluations
    files += [(plan.config_key, plan.file, plan.reward or config.reward) for plan in answered]
    for key, file, reward in files:
        needing = [name for name in reward.names if name in NEEDS_LABEL]
        if needing and any(source.label_key is None for source in file.parts()):
            yield f"{key}.label_key: got null, but the reward {needing[0]} compares with labels; expected their column"
