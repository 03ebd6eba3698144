"""Serve a checkpoint by HTTP: python launch/serve.py --checkpoint DIR [--port N] [--host H] [--token T | --no-token]

Serves OpenAI's chat completions, completions and responses, and Anthropic's messages. Prints its address.
"""

import sys

from rltrain.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("serve"))
