"""Writes a small, randomly initialised Qwen3 checkpoint in Hugging Face format, with a byte-level BPE tokenizer.

python tools/make_tiny_model.py --output DIR --corpus FILE.jsonl --vocab 1024 --chat-template
"""

import sys

from rltrain.cli.tiny_model import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
