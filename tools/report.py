"""What became of a run, as `rltrain report`: python tools/report.py RUN [--output DIR]"""

import sys

from rltrain.tools.report.command import main
from rltrain.tools.report.command import report as report

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
