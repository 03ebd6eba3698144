"""What a rank leaves for torchrun, which has started it."""

import json
import logging
import os
import time

logger = logging.getLogger(__name__)


def leave_for_launcher(summary: str) -> None:
    """Writes the file from which torchrun takes what it shows as a failed rank's traceback, at the end of its summary.

    The file appears at once: torchrun may kill this rank meanwhile, and half a file would make it fail itself.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    beside = f"{path}.{os.getpid()}"
    content = {"message": summary, "extraInfo": {"py_callstack": summary, "timestamp": str(int(time.time()))}}
    try:
        with open(beside, "w") as file:
            json.dump({"message": content}, file)
        os.replace(beside, path)
    except OSError as error:
        logger.warning("cannot write %s, so torchrun's summary has no message: %s", path, error)
