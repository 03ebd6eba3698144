"""What a config may ask for of the policy loss: what has no meaning together is refused with the reason."""

from collections.abc import Iterator

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.learning import Correction
from rltrain.config.schema import Config, Loss


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
