"""What a config may ask for of evaluations."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.evaluation import OF_SOURCES, SHORT_FORM, EvaluationPlan
from rltrain.config.schema import Config
from rltrain.errors import one_of
from rltrain.legality.problems import evaluated_text, longest_text
from rltrain.observability.evaluations import sizes_up_to
from rltrain.runtime.placement import Placement, format_ranks
from rltrain.tasks.metrics import SCORE_HELD_OUT
from rltrain.tasks.roles import rewarding_roles

OF_EVERY_SET = ("score", "response_length_mean", "truncated_ratio")
"""That policies can be compared by."""


def evaluation_problems(config: Config) -> Iterator[str]:
    plans = config.evaluations
    yield from _name_problems(plans)
    yield from _length_problems(config, plans)
    for number, plan in enumerate(config.evaluation.sets):
        if plan.samples_per_prompt > 1 and plan.sampling.temperature == 0:
            yield (
                f"evaluation.sets.{number}.samples_per_prompt: got {plan.samples_per_prompt} with sampling.temperature "
                "0, at which all samples of a prompt are equal; expected 1, or a temperature above 0"
            )
    yield from _metric_problems(config, plans)
    yield from _own_engine_problems(config) if config.evaluates_apart else _keys_of_nobody(config)


def apart_problems(config: Config, placement: Placement) -> Iterator[str]:
    """Of the ranks of role evaluation."""
    if not config.evaluates_apart:
        return
    ranks = placement.ranks("evaluation")
    others = sorted({role for rank in ranks for role in placement.hosts(rank)} - {"evaluation"})
    if others:
        shared = {rank for role in others for rank in placement.ranks(role)} & {*ranks}
        yield (
            f"placement.evaluation: shares ranks {format_ranks(shared)} with {', '.join(others)}, which could not go "
            "on while it draws; expected ranks of its own. Or leave the role out: the rollout's engines then evaluate"
        )


def _own_engine_problems(config: Config) -> Iterator[str]:
    engines = config.served("evaluation")
    if not config.evaluations:
        yield (
            "placement.evaluation: the role is placed, and nothing is evaluated; expected held-out prompts in "
            "data.eval or evaluation.sets, or the role left out"
        )
    if "env" in config.placed_roles:
        yield (
            "placement.evaluation: got the role with role env, whose environments serve the rollout's engines alone; "
            "expected it left out: the rollout's engines then evaluate"
        )
    models = [role for role in rewarding_roles() if role in config.placed_roles]
    for plan in config.evaluations if models else ():
        if plan.reward is None:
            yield (
                f"{plan.config_key}: is scored by the run's reward, of which {', '.join(models)} is part and has "
                "training's samples to score; with role evaluation placed expected each set in evaluation.sets, with a "
                "reward section of functions. Or leave the role out: the rollout's engines then evaluate"
            )
    if engines.dtype == "fp8" and config.evaluation.keep_best is not None:
        yield (
            "evaluation.keep_best: got one with engines of role evaluation in fp8, which have no other weights to "
            "keep; expected evaluation.dtype: auto"
        )


def _keys_of_nobody(config: Config) -> Iterator[str]:
    for key, value in config.evaluation.engine_keys.items():
        yield (
            f"evaluation.{key}: got {value}, of engines of role evaluation, which is not placed; expected evaluation: "
            f"ranks in placement, or rollout.{key} for the rollout's engines, which evaluate"
        )


def _name_problems(plans: Sequence[EvaluationPlan]) -> Iterator[str]:
    for name, count in Counter(plan.name for plan in plans).items():
        if count > 1:
            and_short = f"; {SHORT_FORM} is that of data.eval" if name == SHORT_FORM else ""
            yield f"evaluation.sets: {count} sets are called {name!r}; expected a name for each{and_short}"
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name == OF_SOURCES:
            yield (
                f"evaluation.sets: got the name {name!r}; expected letters, digits, underscores, dots and hyphens, "
                f"and another name than {OF_SOURCES}: the metric is eval/<name>/score"
            )


def _length_problems(config: Config, plans: Sequence[EvaluationPlan]) -> Iterator[str]:
    """Of the limits that a set has beside the run's."""
    role = "evaluation" if config.evaluates_apart else "rollout"
    context = config.served(role).max_context_tokens
    for plan in plans:
        longest, sizes = evaluated_text(config, plan)
        is_drawn = role == "rollout" and not algorithm_of(config).reads_responses
        is_checked = is_drawn and longest <= longest_text(config)[0]  # with the run's
        if not is_checked and longest > context:
            yield f"{role}.max_context_tokens: got {context}; expected at least {sizes}"


def _metric_problems(config: Config, plans: Sequence[EvaluationPlan]) -> Iterator[str]:
    settings = config.evaluation
    if settings.stop_at is not None and not plans:
        yield (
            f"evaluation.stop_at: got {settings.stop_at} without data.eval and without evaluation.sets; expected "
            "held-out prompts in either, or null"
        )
    if settings.stop_metric is not None and settings.stop_at is None:
        yield f"evaluation.stop_metric: got {settings.stop_metric!r} without evaluation.stop_at; expected both or none"
    if config.scores_held_out and settings.sets:
        yield (
            f"evaluation.sets: got {len(settings.sets)} with algorithm {config.algorithm}, which answers no prompts; "
            "expected none: held-out rows are those of data.eval"
        )
    compared = {"evaluation.stop_metric": settings.stop_metric}
    if settings.keep_best is not None:
        compared["evaluation.keep_best.metric"] = settings.keep_best.metric
    for key, metric in compared.items():
        if metric is not None and not any(_has(config, plan, metric) for plan in plans):
            known = [f"{plan.prefix}/{name}" for plan in plans for name in _metrics(config, plan)]
            sets = one_of(metric, known, where="docs/evaluation.md") if known else "there is no set"
            yield f"{key}: got {metric!r}; expected a metric of an evaluation set: {sets}"


def _has(config: Config, plan: EvaluationPlan, metric: str) -> bool:
    name = plan.own_name(metric)
    is_reward = name is not None and name.startswith("reward_") and not config.scores_held_out
    return is_reward or name in _metrics(config, plan)


def _metrics(config: Config, plan: EvaluationPlan) -> list[str]:
    if config.scores_held_out:
        names = [metric.name.removeprefix("eval/") for metric in SCORE_HELD_OUT]
        return names[:1] if config.algorithm == "sft" else names
    n = plan.samples_per_prompt
    if n == 1:
        return [*OF_EVERY_SET]
    of_several = [f"{kind}@{k}" for k in sizes_up_to(n) for kind in ("pass", "best") if (kind, k) != ("best", 1)]
    return [*OF_EVERY_SET, f"mean@{n}", *of_several]
