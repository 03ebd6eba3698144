"""What a script of slime's says beside its training's flags: a server that it starts, variables of training."""

import re
from collections.abc import Sequence
from typing import Any

SERVER = "sglang.launch_server"
MODEL, CUT = "served-model", "served-tp"
"""The keys under which a server's model stands among the flags, and the ranks that it is cut over."""
CHANGING = re.compile(r'"?(OPEN_TRAINING_INT4_FAKE_QAT_FLAG)"?\s*[:=]\s*"?1\b')
"""Variables that have training round weights: no flag of slime's says so."""


def beside_training(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {**_served(commands), **_variables(commands)}


def _served(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    for words in commands:
        if SERVER in words or f"-m {SERVER}" in words:
            following = dict(zip(words, words[1:], strict=False))
            tp = following.get("--tp", following.get("--tp-size", following.get("--tensor-parallel-size", 1)))
            return {MODEL: following["--model-path"], CUT: tp} if "--model-path" in following else {}
    return {}


def _variables(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    found = (CHANGING.search(word) for words in commands for word in words)
    return {f"variable {one[1]}": 1 for one in found if one}
