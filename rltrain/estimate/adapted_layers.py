"""What autograd keeps of a layer's inputs for the gradients of its matrices: those of every matrix that learns, of a
frozen one nothing, and of adapters their inputs and what is between their halves."""

from dataclasses import dataclass

from rltrain.estimate.optimizer import learns_adapters
from rltrain.estimate.planned import PlannedJob
from rltrain.models.canonical import layer_of
from rltrain.models.lora import ADAPTER_A
from rltrain.models.table import LayerKind

QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
SHARED_FC1, SHARED_FC2 = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"
EXPERT_FC1, EXPERT_FC2 = (f"mlp.experts.local_experts.{{expert}}.{name}" for name in ("linear_fc1", "linear_fc2"))
LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class KeptInputs:
    """`adapters` are the numbers between the halves, of one token, by the matrix that these are beside; None where the
    matrices learn themselves. With `drops` an adapter keeps its input without what was dropped, and which that was."""

    adapters: dict[str, int] | None
    drops: bool

    def copies(self, matrix: str) -> int:
        """Of its input: 0 where nothing beside it or in it learns."""
        if self.adapters is None:
            return 1
        return (2 if self.drops else 1) if matrix in self.adapters else 0

    def beside(self, *matrices: str) -> int:
        """Elements of one token that the adapters of these matrices keep between their halves."""
        return sum((self.adapters or {}).get(matrix, 0) for matrix in matrices)


def kept_inputs(job: PlannedJob, role: str, sparse: bool) -> KeptInputs:
    """Of a layer with experts (`sparse`) or without."""
    lora = job.config.model.lora
    if lora is None or not learns_adapters(job, role):
        return KeptInputs(None, drops=False)
    layer = layer_of(job.architectures[role].adapted(lora.rank, lora.targets), LayerKind(sparse))
    halves = (row for row in (*layer.rows, *layer.experts) if row.megatron.endswith(ADAPTER_A))
    between = {row.megatron.removeprefix(LAYER).removesuffix(ADAPTER_A): lora.rank * len(row.parts) for row in halves}
    return KeptInputs(between, drops=lora.dropout > 0)
