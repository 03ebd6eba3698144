"""Evaluate: torchrun --nproc-per-node N launch/evaluate.py --checkpoint DIR --config FILE [--output DIR] [key=value]

Generates responses to data.eval and evaluation.sets of the config with the checkpoint. Scores them, prints a table, and
writes it to --output.
"""

import sys

from rltrain.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("evaluate"))
