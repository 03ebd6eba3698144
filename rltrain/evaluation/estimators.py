"""What a policy would reach with k samples of a prompt, estimated without bias from n >= k that were drawn."""

from collections.abc import Sequence
from math import comb, fsum


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The probability that at least one of k samples passes: Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1.

        pass@k = 1 - C(n - c, k) / C(n, k)

    with c of n samples passed: the share of the subsets of k samples that hold one which passed. ValueError unless
    1 <= k <= n and 0 <= c <= n.
    """
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"{num_passed} of {num_samples} samples cannot have passed")
    _require_subset(num_samples, k)
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected largest reward of k samples: the mean over all subsets of k of the n `rewards`.

        best@k = sum_i C(i - 1, k - 1) / C(n, k) r_(i)

    where r_(1) <= ... <= r_(n): the i-th smallest is the largest of that many subsets. With rewards of 0 and 1 it is
    pass@k, with k = 1 the mean. ValueError unless 1 <= k <= n.
    """
    _require_subset(len(rewards), k)
    subsets = comb(len(rewards), k)
    return fsum(comb(i, k - 1) / subsets * reward for i, reward in enumerate(sorted(rewards)))


def sizes_up_to(num_samples: int) -> list[int]:
    """The k that are reported: 1, 2, 4, ... and `num_samples` itself."""
    powers = [1 << i for i in range(num_samples.bit_length())]
    return powers if powers[-1] == num_samples else [*powers, num_samples]


def _require_subset(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} of {num_samples} samples; expected 1 to {num_samples}")
