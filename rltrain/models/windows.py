"""Layers of which a token attends to the last ones before it alone, and how config.json names them."""

from collections.abc import Callable
from dataclasses import dataclass

from rltrain.models.config_file import ConfigReader
from rltrain.models.delta_net import DELTA_FAMILIES
from rltrain.models.rope_scaling import LAYER_TYPES


@dataclass(frozen=True)
class Windows:
    """A token of the layers that are marked in `layers` [layers] attends to `size` tokens, itself the last of them."""

    size: int
    layers: tuple[bool, ...]

    def of(self, layer: int) -> int | None:
        """The window of a layer; None where it has none."""
        return self.size if self.layers[layer] else None


MISTRAL_WINDOW = 4096  # what transformers assumes where the key is absent
BY_LAYER_WINDOW = {"gemma2": 4096, "gemma3_text": 4096, "gpt_oss": 128}
"""As much, of families whose layers differ."""
PATTERN = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}  # of so many layers the last one attends to everything


def read_windows(config: ConfigReader, num_layers: int, max_positions: int) -> Windows | None:
    """None where no layer slides, or where a window holds all positions."""
    family = config.values["model_type"]
    if family in DELTA_FAMILIES:
        return None
    if family not in READ:
        if config.values.get("layer_types") and not config.are_all("layer_types", (LAYER_TYPES["full"],)):
            raise config.error("layer_types", "full_attention in every layer")
        return None
    windows = READ[family](config, num_layers)
    return windows if windows and windows.size < max_positions and any(windows.layers) else None


def _in_every_layer(absent: int | None) -> Callable[[ConfigReader, int], Windows | None]:
    """Of families whose layers all have a window, or none has; `absent` is what holds where the key is not there."""

    def read(config: ConfigReader, num_layers: int) -> Windows | None:
        size = config.count("sliding_window") if config.values.get("sliding_window") is not None else None
        size = absent if "sliding_window" not in config.values else size
        return None if size is None else Windows(size, (True,) * num_layers)

    return read


def _by_layer_types(config: ConfigReader, num_layers: int) -> Windows | None:
    family = config.values["model_type"]
    if config.values.get("sliding_window", BY_LAYER_WINDOW[family]) is None:
        return None
    kinds = config.values.get("layer_types")
    if kinds is None:
        pattern = config.count("sliding_window_pattern", default=PATTERN[family])
        kinds = [LAYER_TYPES["sliding" if (layer + 1) % pattern else "full"] for layer in range(num_layers)]
    elif not config.are_all("layer_types", LAYER_TYPES.values(), num_layers):
        raise config.error("layer_types", f"one of {', '.join(LAYER_TYPES.values())} for each of {num_layers} layers")
    size = config.count("sliding_window", default=BY_LAYER_WINDOW[family])
    return Windows(size, tuple(kind == LAYER_TYPES["sliding"] for kind in kinds))


READ = {
    "phi3": _in_every_layer(None),
    "mistral": _in_every_layer(MISTRAL_WINDOW),
    "mixtral": _in_every_layer(None),
    "gemma2": _by_layer_types,
    "gemma3_text": _by_layer_types,
    "gpt_oss": _by_layer_types,
}
