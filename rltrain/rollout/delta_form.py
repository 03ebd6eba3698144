"""The file format of weight deltas, from servers/in_sglang/rltrain_delta_files.py.

SGLang's Python imports that file as a top-level module.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rltrain_delta_files as form
else:
    from rltrain.rollout.servers.in_sglang import rltrain_delta_files as form

__all__ = ["form"]
