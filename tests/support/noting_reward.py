"""A reward function that records the ids of its samples."""

import json
import os
from pathlib import Path
from typing import Any

RECORDS = "RLTRAIN_TEST_SAMPLES"
"""Environment variable: the file for the records."""


def noted(args: Any, sample: Any) -> float:
    """Appends the sample to the file. The arguments are those of slime's reward functions."""
    response = slice(len(sample.tokens) - sample.response_length, None)
    record = {
        "id": sample.index,
        "prompt": sample.tokens[: response.start],
        "response": sample.tokens[response],
        "mask": sample.loss_mask,
    }
    with Path(os.environ[RECORDS]).open("a") as records:
        records.write(json.dumps(record) + "\n")
    return float(len(sample.tokens) % 2)
