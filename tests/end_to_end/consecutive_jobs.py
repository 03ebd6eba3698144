"""Jobs one after the other in the same processes, which load their libraries once.

torchrun tests/end_to_end/consecutive_jobs.py CONFIG JOBS: the file JOBS has a JSON list with the overrides of each job.
"""

import json
import os
import sys
from pathlib import Path

from rltrain.job import run_job

if __name__ == "__main__":
    for number, overrides in enumerate(json.loads(Path(sys.argv[2]).read_text())):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # as after a restart: nothing of the last one's store
        run_job(Path(sys.argv[1]), overrides)
