"""Train: torchrun --nproc-per-node N launch/train.py --config FILE [key=value ...]

With --dry-run --world-size W and without torchrun, prints a description of the job and runs nothing.
"""

import sys

from rltrain.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("train"))
