"""Reward 1 for a response, or the last part of it, that equals the label."""


def exact_match(prompt: str, response: str, label: str, *, after: str | None = None, strip: bool = True) -> float:
    """1 if the response equals the label, else 0.

    `after`: compare only what follows its last occurrence; a response without it scores 0. `strip`: ignore white space
    around both sides.
    """
    if after is not None:
        _, found, response = response.rpartition(after)
        if not found:
            return 0.0
    if strip:
        response, label = response.strip(), label.strip()
    return float(response == label)
