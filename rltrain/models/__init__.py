"""Model families: their architectures, and one table of parameters per family."""

from rltrain.models.architecture import MLA, Architecture, Unlisted
from rltrain.models.canonical import (
    NUM_LABELS,
    adapted_tensors,
    canonical_tensors,
    element_types,
    first_tensors,
    layer_of,
    prediction_layer,
    quantizable_tensors,
    sizes,
    table_of,
    tensors_in,
    tower_names,
    tower_rows,
)
from rltrain.models.checkpoint_model import read_architecture
from rltrain.models.delta_net import DeltaNet
from rltrain.models.experts import ExpertLayers
from rltrain.models.rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, YarnScaling
from rltrain.models.table import Layer, LayerKind, Part, Row, Split, Table
from rltrain.models.windows import Windows

__all__ = [
    "MLA",
    "NUM_LABELS",
    "Architecture",
    "DeltaNet",
    "Layer",
    "LayerKind",
    "DynamicScaling",
    "LinearScaling",
    "LongRopeScaling",
    "ExpertLayers",
    "Part",
    "RopeScaling",
    "Row",
    "Split",
    "Table",
    "Unlisted",
    "Windows",
    "YarnScaling",
    "adapted_tensors",
    "canonical_tensors",
    "element_types",
    "first_tensors",
    "layer_of",
    "prediction_layer",
    "quantizable_tensors",
    "read_architecture",
    "sizes",
    "table_of",
    "tensors_in",
    "tower_names",
    "tower_rows",
]
