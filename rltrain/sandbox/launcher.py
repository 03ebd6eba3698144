"""The script that starts a keeper: `python -I -S launcher.py CHANNEL`, with the descriptor of a socket to the
caller."""

import sys

if __name__ == "__main__":
    sys.path.append(__file__.rsplit("/", 3)[0])  # -I omits this folder; last, as it can hold other packages
    from rltrain.sandbox.keeper import main

    main(int(sys.argv[1]))
