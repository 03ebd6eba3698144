"""config.json of published models by name, for dry runs without their weights.

stand_in_models.json has settings by family. For each model it has a pattern of the name, the family and further
settings. Models in `first` have gated delta nets, or names that begin as others do. Qwen3.6 has Qwen3.5's shapes. A
model with `text_of` is listed with the vision encoder of its family. A model in `seeing` has the text model of another
name, and a vision encoder of `towers`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KNOWN: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
OTHERS = (
    r"(qwen3\.\d|qwen3-next|qwen2(\.5)?-vl|glm-5|glm-4\.\d+v|"
    r"nemotron(?!-mini)|mimo-v2|minimax-(text|m1|m3|vl)|deepseek-v[24])"
)
LATER_NEMOTRONS = "nemotron_h"
"""The family of Nemotron models other than Nemotron-Mini."""


def _shapes(models: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the pattern of each model's name, and its config."""
    for model in KNOWN[models]:
        shape = {**KNOWN["families"].get(model.get("family"), {}), **model["config"]}
        if family := model.get("text_of"):
            tied, text = shape["tie_word_embeddings"], {**shape, "model_type": f"{family}_text"}
            shape = _seeing(family, text, KNOWN["towers"]["qwen3_5"], tied)
        yield model["name"], shape


ROPES = {"qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20], "qwen3_5": [11, 11, 10]}
"""Sections of the rotary embedding for time, height and width, by family."""


def _seeing(family: str, text: dict[str, Any], tower: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Returns the config of a model that sees."""
    sections = ROPES[family.removesuffix("_moe")]
    rope = {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": family != "qwen2_5_vl"}
    return {
        "model_type": family,
        "text_config": {**text, "rope_scaling": rope},
        "vision_config": {**tower, "out_hidden_size": text["hidden_size"]},
        "image_token_id": 151655,
        "tie_word_embeddings": tied,
    }


def _seeing_shape_of(lower: str) -> dict[str, Any] | None:
    for model in KNOWN["seeing"]:
        found = re.match(model["name"], lower)
        if found:
            text = dict(shape_of(model["text"].format(**found.groupdict())) or {})
            towers = [*(KNOWN["towers"][name] for name in model["tower"]), model.get("config", {})]
            tower = {key: value for one in towers for key, value in one.items()}
            return _seeing(model["family"], text, tower, text["tie_word_embeddings"])
    return None


def shape_of(name: str) -> dict[str, Any] | None:
    """Returns the config for a model's folder or hub name. It has only `model_type` if the shape is unknown. Returns
    None for an unknown name."""
    *folders, lower = [part for part in name.lower().replace("_", "-").split("/") if part]
    first = next((shape for pattern, shape in _shapes("first") if re.match(pattern, lower)), None)
    first = first or _seeing_shape_of(lower)
    if first:
        return first
    other = re.search(OTHERS, lower)
    if other:
        family = re.sub(r"[-.]", "_", other[0])
        return {"model_type": LATER_NEMOTRONS if family == "nemotron" else family}
    own = next((shape for pattern, shape in _shapes("models") if re.match(pattern, lower)), None)
    above = (
        shape for folder in reversed(folders) for pattern, shape in _shapes("models") if re.search(pattern, folder)
    )
    return own or next(above, None)


def write_stand_in(name: str, folder: Path, classifies: bool = False) -> Path | None:
    """Writes a folder with the named model's config.json and returns it. Returns None for an unknown name."""
    shape = shape_of(name)
    if shape is None:
        return None
    if classifies:
        shape = {**shape, "num_labels": 1, "architectures": [f"{shape['model_type'].title()}ForSequenceClassification"]}
    target = folder / re.sub(r"\W+", "_", name)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(shape))
    return target
