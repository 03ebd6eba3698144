"""What became of a run, as `rltrain report`: python tools/report.py RUN [--output DIR]"""

import sys

from rltrain.cli.report import main
from rltrain.cli.report import report as report

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
