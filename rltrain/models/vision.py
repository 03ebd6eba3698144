"""The shape of vision towers, and the places of images in a sequence. Loads no torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Tower = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
"""The kind of a tower: the model_type of its checkpoints."""
Grid = tuple[int, int, int]
"""An image in patches: (frames, height, width). Frames of a pair share patches in time."""


@dataclass(frozen=True)
class Vision:
    """The shape of a vision tower. It encodes patches of images as embeddings of the language model.

    - `depth`, `hidden`, `heads`, `ffn`: its blocks, their hidden size, attention heads and feed-forward units.
    - `patch`: height and width of a patch in pixels. `temporal_patch`: frames of a patch.
    - `merge`: height and width of a token in patches.
    - `out_hidden`: the hidden size of the language model.
    - `window`: height and width of a window of attention in pixels. None: all blocks attend to whole frames.
    - `full_attention`: with `window`, the blocks without windows.
    - `num_positions`: number of learned position embeddings. They form a square. None: there are none.
    - `deepstack`: blocks with outputs for the first layers of the language model, one block for each of these layers.
    - `image_token`: the id of the placeholder for one embedding of an image.
    - `prefix`: the beginning of the names of the tower's tensors in the files.
    """

    kind: Tower
    depth: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    temporal_patch: int
    merge: int
    out_hidden: int
    window: int | None
    full_attention: tuple[int, ...]
    num_positions: int | None
    deepstack: tuple[int, ...]
    image_token: int
    prefix: str

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices of a block's MLP. Towers of Qwen2.5-VL have a gate."""
        return 3 if self.kind == "qwen2_5_vl" else 2

    @property
    def patch_size(self) -> int:
        """Number of values of a patch, in three colours."""
        return 3 * self.temporal_patch * self.patch**2


@dataclass(frozen=True)
class MRope:
    """Rotary embeddings with three positions of a token: frame, row and column (Wang et al. 2024, "Qwen2-VL", section
    2.1).

    `sections` are the numbers of frequencies that rotate by each of the three. They are in turn, or with `interleaved`
    in alternation.
    """

    sections: tuple[int, int, int]
    interleaved: bool


class PlacedImage(NamedTuple):
    """An image in a sequence. `begin` is the place of its first token, and `key` its name in the image store."""

    begin: int
    key: int
    grid: Grid

    def num_tokens(self, merge: int) -> int:
        """Returns the number of tokens of the image. `merge` is the height and width of a token in patches."""
        frames, height, width = self.grid
        return frames * height * width // merge**2
