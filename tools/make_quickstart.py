"""Writes the quickstart's files, as `rltrain make-quickstart` does: python tools/make_quickstart.py --output DIR --seed
0"""

import sys

from rltrain.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("make-quickstart"))
