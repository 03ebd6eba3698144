"""The numbers that a reward can be: those that a float32 tensor holds."""

MAX_REWARD = float.fromhex("0x1.fffffep127")
EXPECTED_REWARD = f"expected a finite number from {-MAX_REWARD:.3g} to {MAX_REWARD:.3g}, which float32 can hold"


def is_reward(number: float) -> bool:
    """Returns whether `number`, which may be an int of any size, is finite in float32."""
    return abs(number) <= MAX_REWARD
