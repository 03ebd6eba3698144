"""What a script of slime's says beside its training's flags: a server that it starts, variables of training."""

import re
from collections.abc import Sequence
from typing import Any

from rltrain.importing.conversions import count
from rltrain.importing.int4 import WEIGHTS
from rltrain.importing.translation import SourceKeys, Translation

SERVER = "sglang.launch_server"
MODEL, CUT = "served-model", "served-tp"
"""The keys under which a server's model stands among the flags, and the ranks that it is cut over."""
ROUNDS, GROUP = "variable OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "variable OPEN_TRAINING_INT4_GROUP_SIZE"
"""The keys under which variables stand among the flags that have training round weights: no flag of slime's does."""
GROUP_SIZE = 128
"""Where no variable says another."""
VARIABLE = re.compile(r'"?(OPEN_TRAINING_INT4_\w+)"?\s*[:=]\s*"?(\d+)\b')


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
    found = (one for words in commands for word in words for one in VARIABLE.finditer(word))
    given = {f"variable {one[1]}": int(one[2]) for one in found}
    return given if given.get(ROUNDS) == 1 else {}


def set_fake_quantization(keys: SourceKeys, out: Translation) -> None:
    """Experts that are trained to be served in INT4, which slime rounds for training as it does for its engines."""
    if not keys.get(ROUNDS):
        return
    name = ROUNDS.removeprefix("variable ")
    out.set("model.fake_quantization.group_size", count(keys.get(GROUP, GROUP_SIZE)), name)
    out.notes.append(WEIGHTS)
