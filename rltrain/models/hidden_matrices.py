"""Which of a checkpoint's tensors are matrices within layers: those that Muon makes orthogonal updates of."""

import re
from collections.abc import Sequence

_OF_LAYERS = re.compile(r"\.(mtp_)?layers\.\d+\.|^mtp\.fc\.")
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$")
_BIASES = "_bias"
"""Ends the names of those of all experts of a layer together."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Queries, keys, values, gates and every expert are matrices of their own in a checkpoint. Embeddings, head,
    routers and vectors are none."""
    is_matrix = len(shape) == 2 and min(shape) > 1
    is_other = _ROUTER.search(name) or name.endswith(_BIASES)
    return is_matrix and bool(_OF_LAYERS.search(name)) and not is_other
