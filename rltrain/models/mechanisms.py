"""What models of some families have beside attention, MLPs and norms of the usual kind, in words."""

from rltrain.models.architecture import Architecture
from rltrain.models.rope_scaling import DynamicScaling, LongRopeScaling


def local_mechanisms(architecture: Architecture) -> list[str]:
    """What a model has that is trained by Megatron's own layers alone."""
    found = {
        "sliding windows": architecture.windows is not None,
        "norms behind attention and MLPs": architecture.post_norms,
        "rotated neighbours in heads": architecture.rotates_pairs,
        "norms of all heads at once": architecture.norms_projections,
        "bent scores or logits": (architecture.attention_softcap, architecture.logits_softcap) != (None, None),
        "attention sinks": architecture.attention_sinks,
        "rotations that multiply a part of heads (YaRN, LongRoPE)": (
            architecture.rotary_dim is not None and architecture.rotation_magnitude != 1
        ),
        "biases in MLPs": architecture.mlp_bias,
        "gated delta nets": architecture.delta is not None,
        "norms with biases": architecture.norm_bias,
        "another activation than SiLU": architecture.activation != "silu",
    }
    return [mechanism for mechanism, is_there in found.items() if is_there]


def positions_of(architecture: Architecture) -> str:
    """Returns how many positions a model has, with the reason if its config.json says more."""
    told = f"{architecture.max_positions} positions"
    if isinstance(architecture.rope_scaling, LongRopeScaling):
        told += (
            " (those of LongRoPE's short factors: the long ones would turn all tokens of a sample that outgrows them)"
        )
    if isinstance(architecture.rope_scaling, DynamicScaling):
        told += (
            " (max_position_embeddings: dynamic RoPE scaling would turn all tokens of a sample that outgrows them; "
            "yarn or linear in rope_scaling would not)"
        )
    return told
