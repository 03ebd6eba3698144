"""The command `rltrain`, for python -m rltrain and torchrun ... -m rltrain."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - from a checkout it is started by any Python
    sys.exit(f"rltrain needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}")

from rltrain.cli.main import main

sys.exit(main())
