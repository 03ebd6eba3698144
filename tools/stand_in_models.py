"""config.json of published models by name, for dry runs without their weights.

stand_in_models.json has settings by family. For each model it has a pattern of the name, the family and further
settings. Models in `first` have gated delta nets, or names that begin as others do. Qwen3.6 has Qwen3.5's shapes. A
model with `text_of` is listed without its vision encoder.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KNOWN: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
OTHERS = (
    r"(qwen3\.\d|qwen3-next|qwen2(\.5)?-vl|glm-5|"
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
            shape = {"model_type": family, "text_config": text, "tie_word_embeddings": tied}
        yield model["name"], shape


def shape_of(name: str) -> dict[str, Any] | None:
    """Returns the config for a model's folder or hub name. It has only `model_type` if the shape is unknown. Returns
    None for an unknown name."""
    *folders, lower = [part for part in name.lower().replace("_", "-").split("/") if part]
    first = next((shape for pattern, shape in _shapes("first") if re.match(pattern, lower)), None)
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
