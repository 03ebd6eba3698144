"""Train: torchrun --nproc-per-node N launch/train.py --config FILE [key=value ...]

With --dry-run --world-size W, and without torchrun, prints what the job would do.
"""

import sys

from rltrain.cli.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
