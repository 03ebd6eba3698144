"""Which launch scripts the share of imports is counted over: those that train a text model by a trainer that is named.

What is left out follows from a script's own keys and programs, never from whether it imports.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rltrain.errors import UserError
from rltrain.import_config.sources import Framework, read

TRAINS = re.compile(r"^\s+(trainer\.\w+|data\.train_\w+|--rollout-batch-size)", re.MULTILINE)
"""Keys of a training, in the text of a script of which no launch can be read."""
SEES_OR_HEARS = re.compile(r"[-_/]vl[-_/]|[-_]vl$|glm-?4\.\d+v|minicpm-?o|omni|[-_]audio|[-_]video", re.IGNORECASE)
BACKENDS = re.compile(r"veomni|torchtitan|automodel|megatron_lite|mlite|mindspeed|fsdp_turbo")
"""verl's trainers other than FSDP and Megatron."""
FOR_NPUS = re.compile(r"^export \w*ASCEND", re.MULTILINE)
"""Set whatever a variable says of the device."""
OWN_GENERATOR = re.compile(r"def get_generator\b")
"""SkyRL's method that makes the generator, in a program that has its own."""

Keys = Mapping[str, Any]


def _of_pictures(keys: Keys) -> bool:
    names = [str(value) for key, value in keys.items() if key.endswith(("model.path", "model_path", "hf-checkpoint"))]
    given = ("data.image_key", "data.video_key", "multimodal-keys", "generator.vision_language_generator")
    return any(map(SEES_OR_HEARS.search, names)) or any(keys.get(key) for key in given)


def _of_other_backends(keys: Keys) -> bool:
    named = re.compile(r"(.*\.)?(engine|model_engine|strategy)|actor@.*|--config-name")
    return any(BACKENDS.search(str(value)) for key, value in keys.items() if named.fullmatch(key))


def _draws_only(keys: Keys) -> bool:
    return re.search("generate|generation", str(keys.get("-m", "")).rsplit(".", 1)[-1]) is not None


def _on_made_up_data(keys: Keys) -> bool:
    named = (value for key, value in keys.items() if re.search(r"dummy|simulate", key))
    return any(str(value).lower() not in ("false", "0", "none", "null", "") for value in named)


NPUS = "on NPUs"
OUTSIDE: dict[str, Callable[[Keys], bool]] = {
    "on images, audio or video": _of_pictures,
    NPUS: lambda keys: str(keys.get("trainer.device", "")).strip("'\"") == "npu",
    "by a trainer other than FSDP and Megatron": _of_other_backends,
    "draws, and trains nothing": _draws_only,
    "on made-up data or steps": _on_made_up_data,
}
NO_TRAINING = "starts no training"


def outside(framework: Framework, script: str, arguments: list[str]) -> str | None:
    """Why a script is not counted; None: it is."""
    try:
        keys = read(framework, [script, *arguments], os.environ).keys
    except UserError:
        return None if TRAINS.search(_code(script)) else NO_TRAINING
    if FOR_NPUS.search(_code(script)):
        return NPUS
    return next((reason for reason, holds in OUTSIDE.items() if holds(keys)), None)


def generates_by_its_own(framework: Framework, script: str, arguments: list[str]) -> bool:
    """Whether the program that is started replaces the framework's generator by one of its own: an agent's harness."""
    try:
        found = read(framework, [script, *arguments], os.environ)
    except UserError:
        return False
    started = str(found.keys.get("-m", ""))
    if started.startswith("skyrl."):
        return False
    module = started.replace(".", "/") + ".py"
    program = next((folder / module for folder in found.folder.resolve().parents if (folder / module).is_file()), None)
    return program is not None and OWN_GENERATOR.search(program.read_text(encoding="utf-8")) is not None


def _code(script: str) -> str:
    """Without comments that stand alone."""
    lines = Path(script).read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))
