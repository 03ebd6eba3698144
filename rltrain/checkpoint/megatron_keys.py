"""The tensors of Megatron's distributed checkpoints, and the places of a Hugging Face checkpoint's tensors in them.

They are the parameters of an undivided model, with Transformer Engine's names, for any layout of the writers or
readers. In dense models layers are stacked: a key has no number, and its tensor has a first axis of layers. Models with
experts have separate layers, with their numbers in the keys, as in Megatron with a list as `moe_layer_freq`. The
experts of a layer are stacked.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rltrain.errors import CheckpointError, listed
from rltrain.models import Architecture, Row, element_types, layer_of, table_of
from rltrain.models.table import Array, ElementType
from rltrain.reshard.layout import BOX_FIELDS, Parameters
from rltrain.reshard.megatron_layout import TRANSFORMER_ENGINE, megatron_layout, round_up
from rltrain.runtime.grid import Grid

VOCAB_ROWS_MULTIPLE = 128
"""The vocabulary's rows are padded to a multiple of it by default in Megatron-LM (--make-vocab-size-divisible-by)."""

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.(linear_fc\d\.\D+)(\d+)")

LOCATION = np.dtype(
    [
        ("tensor", np.int32),
        ("row", np.int64),
        ("col", np.int64),
        ("rows", np.int64),
        ("cols", np.int64),
        ("key", np.int32),
        ("leading", np.int64),
        ("key_row", np.int64),
        ("key_col", np.int64),
    ]
)
"""A box of canonical tensor number `tensor`. It begins at (key_row, key_col) of matrix number `leading` of key number
`key`. Global tensors are seen as stacks of matrices, in C order of their leading axes. A vector is one row."""


@dataclass(frozen=True)
class TensorChunk:
    """A box of a global tensor, in all its dimensions."""

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GlobalMatrix:
    """One matrix or vector of a global tensor, with its indices along the tensor's leading axes and its own shape.

    `layer` and `expert` are None if it belongs to none. `row` is its row in the family's table.
    """

    key: str
    leading: tuple[int, ...]
    shape: tuple[int, ...]
    layer: int | None
    expert: int | None
    row: Row


class GlobalTensors:
    """The global tensors of `architecture`.

    `padded_vocab_size` is the number of rows of its embedding. The default is Megatron-LM's. Rows beyond the vocabulary
    are zero. If `stacked`, layers are stacked. By default they are unless some layer has experts or is a delta net.
    Raises CheckpointError if `padded_vocab_size` is less than the vocabulary.
    """

    def __init__(
        self, architecture: Architecture, *, padded_vocab_size: int | None = None, stacked: bool | None = None
    ) -> None:
        self.architecture = architecture
        self.padded_vocab_size = padded_vocab_size or round_up(architecture.vocab_size, VOCAB_ROWS_MULTIPLE)
        if self.padded_vocab_size < architecture.vocab_size:
            raise CheckpointError(
                f"{EMBEDDING} has {self.padded_vocab_size} rows; expected at least vocab_size of config.json, "
                f"{architecture.vocab_size}"
            )
        of_one_kind = architecture.moe is None and architecture.delta is None
        self.stacked = of_one_kind if stacked is None else stacked
        undivided = megatron_layout(architecture, Grid((0,)), transformer_engine=True).part(0)
        self.matrices = tuple(self._named(undivided.parameters))
        self._num_leading = {matrix.key: len(matrix.leading) for matrix in self.matrices}
        # The last matrix of a key has the largest indices.
        self.shapes = {m.key: (*(place + 1 for place in m.leading), *m.shape) for m in self.matrices}
        """Shapes of the global tensors, by key."""
        self.keys = tuple(self.shapes)
        boxes = self._located(undivided.pieces)
        self._by_tensor = boxes[np.argsort(boxes["tensor"], kind="stable")]
        order = np.argsort(undivided.pieces["parameter"], kind="stable")
        self._by_matrix, self._matrix_of_box = boxes[order], undivided.pieces["parameter"][order]
        self._numbers = {(matrix.key, matrix.leading): number for number, matrix in enumerate(self.matrices)}
        float32 = element_types(architecture, "bfloat16") == ElementType.FLOAT32
        self.float32_keys = frozenset(self.keys[number] for number in boxes["key"][float32[boxes["tensor"]]])
        """Keys of the tensors with type fp32 in a model of any type."""

    @classmethod
    def stored_as(cls, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> "GlobalTensors":
        """Returns the global tensors of a checkpoint with tensors of these `shapes`. They are stacked and padded as in
        the checkpoint.

        Raises CheckpointError if keys are missing or unknown, or if shapes do not fit `architecture`.
        """
        tensors = cls(
            architecture,
            padded_vocab_size=shapes[EMBEDDING][0] if EMBEDDING in shapes else None,
            stacked=not any(LAYER.fullmatch(key) for key in shapes),
        )
        tensors.refuse_others(shapes)
        return tensors

    def refuse_others(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError unless `shapes` are the shapes of exactly these tensors."""
        differing = [key for key, shape in self.shapes.items() if tuple(shapes.get(key, shape)) != shape]
        problems = {
            "the checkpoint lacks": [key for key in self.shapes if key not in shapes],
            "the model does not have": [key for key in shapes if key not in self.shapes],
            "of another shape:": [
                f"{key} {list(shapes[key])} instead of {list(self.shapes[key])}" for key in differing
            ],
        }
        told = [f"{what} {listed(names, 8)}" for what, names in problems.items() if names]
        if told:
            raise CheckpointError(
                f"the Megatron checkpoint does not hold the tensors of the model of config.json; {'; '.join(told)}"
            )

    def location(self, tensor: int) -> Array:
        """Returns the boxes of canonical tensor number `tensor` [LOCATION]."""
        first, stop = np.searchsorted(self._by_tensor["tensor"], [tensor, tensor + 1])
        return self._by_tensor[first:stop]

    def chunk_of(self, box: np.void) -> TensorChunk:
        """Returns the place of a box [LOCATION] in its global tensor."""
        key = self.keys[box["key"]]
        num_leading, shape = self._num_leading[key], self.shapes[key]
        leading = np.unravel_index(int(box["leading"]), shape[:num_leading]) if num_leading else ()
        at, size = (int(box["key_row"]), int(box["key_col"])), (int(box["rows"]), int(box["cols"]))
        inner = num_leading - len(shape)
        return TensorChunk(key, (*map(int, leading), *at[inner:]), (1,) * num_leading + size[inner:])

    def chunk(self, matrix: GlobalMatrix, offsets: tuple[int, ...], shape: tuple[int, ...]) -> TensorChunk:
        """Returns a box of one matrix. `offsets` and `shape` are relative to the matrix."""
        leading = matrix.leading
        return TensorChunk(matrix.key, leading + offsets, (1,) * len(leading) + shape)

    def inside(self, chunk: TensorChunk) -> Array:
        """Returns the boxes [LOCATION] inside `chunk`, a part of one matrix. Their key_row and key_col count from its
        beginning.

        The rest of the chunk is padding.
        """
        num_leading = self._num_leading[chunk.key]
        number = self._numbers[chunk.key, chunk.offsets[:num_leading]]
        first, stop = np.searchsorted(self._matrix_of_box, [number, number + 1])
        at, shape = (0, *chunk.offsets[num_leading:])[-2:], (1, *chunk.shape[num_leading:])[-2:]
        boxes = self._by_matrix[first:stop].copy()
        for axis, (place, size, key_place) in enumerate((("row", "rows", "key_row"), ("col", "cols", "key_col"))):
            low = np.maximum(boxes[key_place], at[axis])
            high = np.minimum(boxes[key_place] + boxes[size], at[axis] + shape[axis])
            boxes[place] += low - boxes[key_place]
            boxes[key_place], boxes[size] = low - at[axis], high - low
        return boxes[(boxes["rows"] > 0) & (boxes["cols"] > 0)]

    def _named(self, parameters: Parameters) -> Iterator[GlobalMatrix]:
        """Yields the parameters of an undivided model as matrices, in their order."""
        rows = self._rows()
        for name, shape in parameters:
            if name == EMBEDDING or (name == HEAD and self.architecture.head == "vocabulary"):
                shape = (self.padded_vocab_size, *shape[1:])
            plain, layer, expert = _address(name)
            key = plain if layer is None or self.stacked else plain.replace("layers.", f"layers.{layer}.", 1)
            leading = (layer if self.stacked else None, expert)
            yield GlobalMatrix(key, tuple(i for i in leading if i is not None), shape, layer, expert, rows[plain])

    def _rows(self) -> dict[str, Row]:
        """Returns the table's row of every parameter, by its name without numbers."""
        table = table_of(self.architecture)
        rows = [table.embedding, *table.final_norm, table.head]
        for kind in set(self.architecture.layer_kinds):
            layer = layer_of(self.architecture, kind)
            rows += [*layer.rows, *layer.experts]
        return {_address(TRANSFORMER_ENGINE.name(row).format(layer=0, expert=0))[0]: row for row in rows}

    def _located(self, pieces: Array) -> Array:
        """Returns the pieces of an undivided model's parameters as boxes [LOCATION]."""
        boxes = np.empty(len(pieces), LOCATION)
        for field in BOX_FIELDS:
            boxes[field] = pieces[field]
        numbers = {key: number for number, key in enumerate(self.keys)}
        keys = [numbers[matrix.key] for matrix in self.matrices]
        leading = [
            int(np.ravel_multi_index(matrix.leading, self.shapes[matrix.key][: len(matrix.leading)]))
            if matrix.leading
            else 0
            for matrix in self.matrices
        ]
        widths = np.array([matrix.shape[-1] for matrix in self.matrices])
        parameter = pieces["parameter"]
        boxes["key"], boxes["leading"] = np.array(keys)[parameter], np.array(leading)[parameter]
        boxes["key_row"], boxes["key_col"] = np.divmod(pieces["offset"], widths[parameter])
        return boxes


def _address(name: str) -> tuple[str, int | None, int | None]:
    """Returns (key without numbers, layer, expert) of a parameter of an undivided model. Layer or expert is None if it
    belongs to none."""
    in_layer = LAYER.fullmatch(name)
    if not in_layer:
        return name, None, None
    layer, rest = int(in_layer[1]), in_layer[2]
    of_expert = EXPERT.fullmatch(rest)
    if not of_expert:
        return f"decoder.layers.{rest}", layer, None
    return f"decoder.layers.mlp.experts.experts.{of_expert[1]}", layer, int(of_expert[2])


def extra_state_keys(tensors: GlobalTensors) -> list[str]:
    """Returns the keys of the extra objects saved and expected by Transformer Engine's modules.

    Without FP8 all are empty. Every module with a possible object is named, because loaders ignore unknown keys.
    """
    keys: dict[str, None] = {}
    for matrix in tensors.matrices:
        module = matrix.key.rpartition(".")[0]
        if matrix.key in (EMBEDDING, HEAD) or module.endswith(".router"):
            continue
        sizes = tensors.shapes[matrix.key][: len(matrix.leading)]
        place = f"{'.'.join(map(str, matrix.leading or (0,)))}_{'.'.join(map(str, sizes or (1,)))}"
        keys[f"{module}._extra_state/shard_{place}"] = None
        if module.endswith(".linear_proj"):
            keys[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{place}"] = None
    return list(keys)
