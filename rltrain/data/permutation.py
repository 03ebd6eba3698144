"""A permutation of many numbers of which none is held: where each goes is computed."""

import numpy as np
import numpy.typing as npt

ROUNDS = 8
Numbers = npt.NDArray[np.uint64]


class FeistelPermutation:
    """Of 0 up to `size`: a Feistel network of ROUNDS rounds permutes the numbers below the next power of four, and one
    that it takes past the last is taken on until it is not (cycle walking; Black and Rogaway, Ciphers with Arbitrary
    Finite Domains, 2002). That is less than four times on average."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        """`key`, numbers of any size that are not negative, tells permutations of one size apart."""
        if size < 1:
            raise ValueError(f"a permutation needs numbers, got size={size}")
        self.size = size
        num_bits = max(1, -(-(size - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(num_bits), np.uint64(2**num_bits - 1)
        self._keys = np.random.SeedSequence([*key, size]).generate_state(ROUNDS, np.uint64)

    def of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each of `numbers`, all below `size`, goes. Shapes are equal."""
        found = self._network(numbers.astype(np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._network(found[outside])
        return found.astype(np.int64)

    def _network(self, numbers: Numbers) -> Numbers:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & self._mask)
        return (left << self._half) | right


def _mixed(values: Numbers) -> Numbers:
    """Each bit of a value changes every bit with a chance of nearly a half: the finalizer of SplitMix64 (Steele, Lea
    and Flood, Fast Splittable Pseudorandom Number Generators, 2014). Products keep their lowest 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
