"""Layers with sliding-window attention, and their description in config.json."""

from collections.abc import Callable
from dataclasses import dataclass

from rltrain.errors import listed
from rltrain.models.config_file import ConfigReader

LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}
WINDOW_SWITCH = "use_sliding_window"
"""The key of Qwen's families that turns on windows."""
SWITCHED_WINDOW, FIRST_SWITCHED = 4096, 28
"""transformers' defaults of sliding_window and max_window_layers in these families."""


@dataclass(frozen=True)
class Windows:
    """The sliding windows of a model. In the layers marked in `layers` [layers], a token attends to the last `size`
    tokens including itself."""

    size: int
    layers: tuple[bool, ...]

    def of(self, layer: int) -> int | None:
        """Returns the window of a layer, or None."""
        return self.size if self.layers[layer] else None


ReadWindows = Callable[[ConfigReader, int], Windows | None]
"""Reads the windows of a model, given its number of layers."""


def read_windows(read: ReadWindows | None, config: ConfigReader, num_layers: int, max_positions: int) -> Windows | None:
    """Returns the windows. None if no layer slides, or if a window covers all positions. `read` is None for families
    without windows."""
    if read is None:
        if config.values.get("layer_types") and not config.are_all("layer_types", (LAYER_TYPES["full"],)):
            raise config.error("layer_types", "full_attention in every layer")
        return None
    windows = read(config, num_layers)
    return windows if windows and windows.size < max_positions and any(windows.layers) else None


def in_every_layer(absent: int | None) -> ReadWindows:
    """Returns a reader for families with a window in all layers or in none. `absent` is the default window."""

    def read(config: ConfigReader, num_layers: int) -> Windows | None:
        size = config.count("sliding_window") if config.values.get("sliding_window") is not None else None
        size = absent if "sliding_window" not in config.values else size
        return None if size is None else Windows(size, (True,) * num_layers)

    return read


def by_layer_types(absent: int, pattern: int) -> ReadWindows:
    """Returns a reader for families with different layers. `absent` is the default window. Without layer types in
    config.json, the last of every `pattern` layers attends to all tokens."""

    def read(config: ConfigReader, num_layers: int) -> Windows | None:
        if config.values.get("sliding_window", absent) is None:
            return None
        layers = _named_layers(config, num_layers)
        if layers is None:
            every = config.count("sliding_window_pattern", default=pattern)
            layers = tuple((layer + 1) % every != 0 for layer in range(num_layers))
        return Windows(config.count("sliding_window", default=absent), layers)

    return read


def switched(config: ConfigReader, num_layers: int) -> Windows | None:
    """Returns the windows of Qwen's families, as in transformers.

    layer_types selects the layers, except in qwen3_moe with windows in all layers. Without it, qwen2 and qwen3 have
    windows from max_window_layers on, and qwen2_moe in every other layer before that.
    """
    family, layers = config.values["model_type"], range(num_layers)
    size = None
    if config.take(WINDOW_SWITCH, bool, default=False):
        if config.values.get("sliding_window", SWITCHED_WINDOW) is None:
            raise config.error("sliding_window", f"an integer if {WINDOW_SWITCH} is true")
        size = config.count("sliding_window", default=SWITCHED_WINDOW)
    bound = config.take("max_window_layers", int, default=FIRST_SWITCHED)
    slides = tuple(layer >= bound for layer in layers)
    if family == "qwen2_moe":
        slides = tuple(layer < bound and layer % 2 == 0 for layer in layers)
    elif family == "qwen3_moe":
        slides = (True,) * num_layers
    named = _named_layers(config, num_layers)
    if named is not None and any(named) and size is None:
        raise config.error("layer_types", f"full_attention in every layer unless {WINDOW_SWITCH} is true")
    if named is not None and size is not None and family == "qwen3_moe" and named != slides:
        raise config.error("layer_types", "sliding_attention in every layer, as in transformers")
    return None if size is None else Windows(size, slides if named is None else named)


def _named_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...] | None:
    """Returns True for each sliding layer in layer_types, [layers]. None without that key."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    if not config.are_all("layer_types", LAYER_TYPES.values(), num_layers):
        raise config.error("layer_types", f"one of {listed(LAYER_TYPES.values())} for each of {num_layers} layers")
    return tuple(kind == LAYER_TYPES["sliding"] for kind in kinds)
