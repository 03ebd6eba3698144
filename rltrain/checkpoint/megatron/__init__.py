"""Megatron's distributed checkpoints ("torch_dist"): folders that Megatron-LM loads at any layout.

ROOT/
    latest_checkpointed_iteration.txt    the number of the iteration below, or "release"
    iter_0000001/ or release/
        .metadata                        where each chunk of which tensor lies (torch.distributed.checkpoint)
        __0_0.distcp, ...                the chunks, one file per writer
        common.pt                        what is no tensor: Megatron-LM's arguments, the iteration (0.19 writes it as an
                                         object among the chunks)
        metadata.json                    the name and version of the format
"""
