"""Writes the quickstart's files, as `rltrain make-quickstart`: python tools/make_quickstart.py --output DIR --seed 0"""

import sys

from rltrain.cli.quickstart import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
