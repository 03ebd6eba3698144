"""Numbers of csrc/reshard_delta.h. Apart from changes.py because that loads torch."""

BLOCK, WHOLE = 256, 255
"""RS_DELTA_BLOCK and RS_DELTA_WHOLE: elements of a block, and the length of one that is sent whole."""
