"""What differs between model families: how their config reads, and one table of parameters for each."""

from rltrain.models.architecture import MLA, Architecture, MoE, RopeScaling, Unlisted, YarnScaling, read_architecture
from rltrain.models.canonical import (
    NUM_LABELS,
    canonical_tensors,
    element_types,
    first_tensors,
    layer_of,
    quantizable_tensors,
    sizes,
    table_of,
    tensors_in,
)
from rltrain.models.table import Layer, Part, Row, Split, Table

__all__ = [
    "MLA",
    "NUM_LABELS",
    "Architecture",
    "Layer",
    "MoE",
    "Part",
    "RopeScaling",
    "Row",
    "Split",
    "Table",
    "Unlisted",
    "YarnScaling",
    "canonical_tensors",
    "element_types",
    "first_tensors",
    "layer_of",
    "quantizable_tensors",
    "read_architecture",
    "sizes",
    "table_of",
    "tensors_in",
]
