"""python -m rltrain, and torchrun ... -m rltrain: the command `rltrain`."""

import sys

from rltrain.commands.main import main

sys.exit(main())
