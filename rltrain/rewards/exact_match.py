"""Reward 1 if the response, or its last part, equals the label."""


def exact_match(prompt: str, response: str, label: str, *, after: str | None = None, strip: bool = True) -> float:
    """Returns 1 if the response equals the label, else 0.

    - `after`: compares only the text after the last occurrence of this string. A response without it scores 0.
    - `strip`: ignores white space around both sides.
    """
    if after is not None:
        _, found, response = response.rpartition(after)
        if not found:
            return 0.0
    if strip:
        response, label = response.strip(), label.strip()
    return float(response == label)
