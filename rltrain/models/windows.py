"""Layers of which a token attends to the last ones before it alone, and how config.json names them."""

from collections.abc import Callable
from dataclasses import dataclass

from rltrain.errors import listed
from rltrain.models.config_file import ConfigReader

LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}
WINDOW_SWITCH = "use_sliding_window"
"""The key that turns on windows of Qwen's families."""
SWITCHED_WINDOW, FIRST_SWITCHED = 4096, 28
"""Of those families, what transformers assumes where sliding_window and max_window_layers are absent."""


@dataclass(frozen=True)
class Windows:
    """A token of the layers that are marked in `layers` [layers] attends to `size` tokens, itself the last of them."""

    size: int
    layers: tuple[bool, ...]

    def of(self, layer: int) -> int | None:
        """The window of a layer; None where it has none."""
        return self.size if self.layers[layer] else None


ReadWindows = Callable[[ConfigReader, int], Windows | None]
"""Reads those of a model with so many layers."""


def read_windows(read: ReadWindows | None, config: ConfigReader, num_layers: int, max_positions: int) -> Windows | None:
    """None where no layer slides, or where a window holds all positions; `read` is None of families that have none."""
    if read is None:
        if config.values.get("layer_types") and not config.are_all("layer_types", (LAYER_TYPES["full"],)):
            raise config.error("layer_types", "full_attention in every layer")
        return None
    windows = read(config, num_layers)
    return windows if windows and windows.size < max_positions and any(windows.layers) else None


def in_every_layer(absent: int | None) -> ReadWindows:
    """Of families whose layers all have a window, or none has; `absent` is what holds where the key is not there."""

    def read(config: ConfigReader, num_layers: int) -> Windows | None:
        size = config.count("sliding_window") if config.values.get("sliding_window") is not None else None
        size = absent if "sliding_window" not in config.values else size
        return None if size is None else Windows(size, (True,) * num_layers)

    return read


def by_layer_types(absent: int, pattern: int) -> ReadWindows:
    """Of families whose layers differ: `absent` as above, and of every `pattern` layers the last attends to everything
    where config.json names no kinds of layers."""

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
    """Returns the windows of Qwen's families as transformers has them. layer_types names the layers, but in qwen3_moe,
    which has windows in all. Without it qwen2 and qwen3 have them from max_window_layers on, and qwen2_moe in every
    other layer before."""
    family, layers = config.values["model_type"], range(num_layers)
    size = None
    if config.take(WINDOW_SWITCH, bool, default=False):
        if config.values.get("sliding_window", SWITCHED_WINDOW) is None:
            raise config.error("sliding_window", f"an integer where {WINDOW_SWITCH} is true")
        size = config.count("sliding_window", default=SWITCHED_WINDOW)
    bound = config.take("max_window_layers", int, default=FIRST_SWITCHED)
    slides = tuple(layer >= bound for layer in layers)
    if family == "qwen2_moe":
        slides = tuple(layer < bound and layer % 2 == 0 for layer in layers)
    elif family == "qwen3_moe":
        slides = (True,) * num_layers
    named = _named_layers(config, num_layers)
    if named is not None and any(named) and size is None:
        raise config.error("layer_types", f"full_attention in every layer where {WINDOW_SWITCH} is not true")
    if named is not None and size is not None and family == "qwen3_moe" and named != slides:
        raise config.error("layer_types", "sliding_attention in every layer, as transformers has them in this family")
    return None if size is None else Windows(size, slides if named is None else named)


def _named_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...] | None:
    """Returns [layers] which slide by layer_types; None without it."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    if not config.are_all("layer_types", LAYER_TYPES.values(), num_layers):
        raise config.error("layer_types", f"one of {listed(LAYER_TYPES.values())} for each of {num_layers} layers")
    return tuple(kind == LAYER_TYPES["sliding"] for kind in kinds)
