"""Writes the page of a run, as `rltrain report` does: python tools/report.py RUN [--output DIR]"""

import sys

from rltrain.cli.main import run_script
from rltrain.cli.report import report as report

if __name__ == "__main__":
    sys.exit(run_script("report"))
