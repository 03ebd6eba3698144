"""Rules for models that see: the tower, the columns of images, and the limits of their pixels."""

import json
import re
from typing import Any

from rltrain.import_config.translation import NOTHING, SourceKeys, Translation, UntranslatableError, count

SEES = re.compile(r"(?<![a-z])vl(?![a-z])", re.IGNORECASE)
"""Names of vision-language models, such as Qwen2.5-VL-7B-Instruct."""
TOWER, COLUMN = "model.vision", "data.train.images_key"
USUAL_COLUMN = "images"
"""The default of images_key, and of verl's trainers."""
ACTION_HEADS = re.compile(
    r"openvla|openpi|pi0|gr00t|dreamzero|lingbot|abot|evo1|starvla|molmoact|dexbotic|_policy$|^resnet|steam|recap|"
    r"cfg_model|buffered_vlm|ti2v|i2v|^sd3|cosmos",
    re.IGNORECASE,
)
"""RLinf's types of models that are no language models: they have heads for actions or values, or make pictures."""


def is_named_after_seeing(path: object) -> bool:
    """Returns whether the last part of a model's path names a vision-language model."""
    return SEES.search(str(path).rstrip("/").rsplit("/", 1)[-1]) is not None


def set_vision(
    out: Translation, column: Any = None, key: str = "", *, sees: bool = False, frozen: str | None = None
) -> None:
    """Sets the tower if the model's name says that it sees, or the source's `key`: it names a `column` of images, or
    `sees` is True. Called after the evaluation sets are set.

    `frozen` is the key of the source that keeps the tower's weights, or None if they are trained.
    """
    given = column not in NOTHING
    if not given and not sees and not is_named_after_seeing(out.get("model.path")):
        return
    origin = f"{key}, for images" if given or sees else "the model's name"
    if frozen is None:
        out.set(TOWER, {}, origin)
    else:
        out.set(f"{TOWER}.train", False, frozen)
    _choose_engine(out)
    if given and str(column) != USUAL_COLUMN:
        out.set(COLUMN, str(column), key)
        _use_in_evaluations(out, str(column), key)


def _choose_engine(out: Translation) -> None:
    """Replaces SGLang by the embedded engine if an engine has several ranks, as SGLang splits towers among them."""
    if out.get("rollout.engine") != "sglang" or out.get("rollout.parallel.tp") == 1:
        return
    named = out.settings["rollout.engine"].origin.partition(":")[0]
    out.set("rollout.engine", "embedded", f"{named}: rltrain's engine instead, as SGLang splits towers")
    given = out.settings.pop("rollout.sglang.args", None)
    for name, value in (given.value if given else {}).items():
        out.leave(name, value, "an argument of SGLang's server")


def _use_in_evaluations(out: Translation, column: str, key: str) -> None:
    if "data.eval.path" in out.settings:
        out.set("data.eval.images_key", column, key)
    for one in out.get("evaluation.sets") or ():
        one["data"] = {**one["data"], "images_key": column}


def column_of(keys: SourceKeys, out: Translation, key: str) -> Any:
    """Returns the column of a key with a list of columns. Several are a difference, as a row has one list of images."""
    given = keys.get(key)
    if not isinstance(given, list):
        return given
    if len(given) > 1:
        out.differs(key, given, "all images of a row are in one column here")
    return given[0] if given else None


def column_in_json(keys: SourceKeys, out: Translation, key: str) -> Any:
    """Returns the column of images in slime's map from kinds of media to columns, such as {"image": "images"}."""
    given = keys.get(key)
    if given in NOTHING:
        return None
    try:
        columns = json.loads(given) if isinstance(given, str) else given
        kinds = {str(kind): str(column) for kind, column in columns.items()}
    except (ValueError, AttributeError):
        raise UntranslatableError(f"a JSON object was expected (at {key}: {given!r})") from None
    others = kinds.keys() - {"image"}
    if others:
        out.differs(key, given, f"{', '.join(sorted(others))}: only images can be shown here")
    return kinds.get("image")


def set_pixels(keys: SourceKeys, out: Translation, *prefixes: str) -> None:
    """Sets the limits of pixels, from keys min_pixels and max_pixels after one of `prefixes`."""
    for limit in ("min_pixels", "max_pixels"):
        key, given = keys.first(*(prefix + limit for prefix in prefixes))
        if given not in NOTHING:
            out.set(f"data.images.{limit}", count(given), key)


def refuse_action_heads(keys: SourceKeys, *names: str) -> None:
    """Raises UntranslatableError for a model that is no language model, by its type under one of the keys `names`."""
    for name in names:
        kind = keys.get(name)
        if kind not in NOTHING and ACTION_HEADS.search(str(kind)):
            raise UntranslatableError(
                f"{name} is {kind}, which is no language model: actions, values or pictures come from a head of its "
                "own. Vision-language models act by text here: docs/environments.md"
            )
