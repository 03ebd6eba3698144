"""The type that a conversion gives to its tensors."""

import numpy as np
import torch

from rltrain.checkpoint.conversion.sources import Source
from rltrain.errors import CheckpointError, named_by
from rltrain.models import element_types
from rltrain.models.table import ElementType

CHOICES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def target_type(source: Source, chosen: str | None) -> str:
    """`chosen`, or what all tensors of the source have but for those that are fp32 in any model of their family.

    CheckpointError where they differ.
    """
    if chosen is not None:
        return chosen
    marked = element_types(source.architecture, "bfloat16")
    first: dict[torch.dtype, str] = {}
    for tensor in np.flatnonzero(marked != ElementType.FLOAT32).tolist():
        first.setdefault(source.dtypes[tensor], source.tensors.names[tensor])
    if len(first) > 1:
        found = ", ".join(f"{type_name(dtype)} ({name})" for dtype, name in first.items())
        raise CheckpointError(
            f"{source.path} has tensors of several types: {found}; expected one: choose the type to convert to with "
            f"--dtype ({named_by(source.option)})"
        )
    return type_name(next(iter(first)))


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
