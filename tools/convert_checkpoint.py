"""Converts checkpoints between Hugging Face and Megatron (torch_dist), inspects them and compares them.

    python tools/convert_checkpoint.py hf-to-megatron --input HF_DIR --output DIR [--tp N --pp N --ep N] [--dtype TYPE]
    python tools/convert_checkpoint.py megatron-to-hf --input DIR --output HF_DIR [--hf-config HF_DIR] [--max-file-gb 5]
    python tools/convert_checkpoint.py inspect PATH [--tensors]
    python tools/convert_checkpoint.py verify A B [--dtype TYPE]

DIR can be loaded by Megatron-LM and slime, at any layout: --load DIR. `torchrun --nproc-per-node N
tools/convert_checkpoint.py ...` splits the work over N processes. Exit status: 0 done, 1 `verify` found a difference,
2 refused, with a message.
"""

import signal
import sys

from rltrain.cli.main import run_script

if __name__ == "__main__":
    # torchrun's, where another process failed: raised as an error, so that what was begun is deleted.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(run_script("convert"))
