"""Families that are asked for and that nothing here trains, serves or converts, each with the reason."""

REFUSED_FAMILIES = {
    "gemma3": "its checkpoints hold a picture encoder beside the language model; those of gemma3_text hold that alone",
    "gpt_oss": (
        "its files stack a layer's experts, transposed, gates and values in turn, in MXFP4 blocks, and boxes of a "
        "checkpoint's tensors are neither transposed nor taken apart row by row; and attention has sinks"
    ),
    "qwen3_next": (
        "three of four layers are gated delta nets, whose state of a sample neither the engine's cache keeps nor "
        "Megatron-core resets at the bounds of packed samples without the kernels of flash-linear-attention"
    ),
}
