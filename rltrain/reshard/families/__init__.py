"""What differs between model families: how their config reads, and one table of parameters for each."""

from rltrain.reshard.families.architecture import Architecture, RopeScaling, read_architecture
from rltrain.reshard.families.table import Part, Row, Table, canonical_tensors, table_of

__all__ = [
    "Architecture",
    "Part",
    "RopeScaling",
    "Row",
    "Table",
    "canonical_tensors",
    "read_architecture",
    "table_of",
]
