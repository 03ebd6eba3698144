"""Seeds of samples: pure functions of what is drawn, never of where."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """The splitmix64 finaliser: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def request_seed(seed: int, step: int, row: int, sample: int) -> int:
    """Seed of one response, in [0, 2**63): the same on every rank and in every engine."""
    state = 0
    for part in (seed, step, row, sample):
        state = mix64((state + _GOLDEN + part) & _MASK)
    return state >> 1
