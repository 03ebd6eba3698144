"""Converts checkpoints between Hugging Face and Megatron (torch_dist), inspects them and compares them.

    python tools/convert_checkpoint.py hf-to-megatron --input HF_DIR --output DIR [--tp N --pp N --ep N] [--dtype TYPE]
    python tools/convert_checkpoint.py megatron-to-hf --input DIR --output HF_DIR [--hf-config HF_DIR] [--max-file-gb 5]
    python tools/convert_checkpoint.py inspect PATH [--tensors]
    python tools/convert_checkpoint.py verify A B [--dtype TYPE]

Megatron-LM and slime can load DIR at any layout with --load DIR. `torchrun --nproc-per-node N
tools/convert_checkpoint.py ...` splits the work over N processes. Exit status: 0 done, 1 `verify` found a difference, 2
a mistake in the arguments or the checkpoint, with a message.
"""

import signal
import sys

from rltrain.cli.main import run_script

if __name__ == "__main__":
    # torchrun sends SIGTERM if another process has failed. As an exception it lets unfinished files be deleted.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(run_script("convert"))
