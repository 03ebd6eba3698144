"""What a config may ask for of the checks while a run goes on."""

from collections.abc import Iterator

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config


def check_problems(config: Config) -> Iterator[str]:
    """Sentences with the keys, the reason, and what is expected in their place."""
    algorithm = algorithm_of(config)
    for key in ("max_logprob_diff", "max_kl"):
        limit = getattr(config.checks, key)
        if limit is not None and not algorithm.generates:
            yield (
                f"checks.{key}: got {limit} with algorithm {algorithm.name}, which trains on what no engine of the run "
                "drew; expected null"
            )
    if config.checks.action == "pause" and not config.checkpoint.saves:
        yield (
            "checks.action: got pause with checkpoint.save_interval 0 and checkpoint.save_every_s 0, by which nothing "
            "is saved to go on from; expected either above 0, or stop or warn"
        )
