"""The form of files of what changed: server/rltrain_delta_files.py of SGLang's, which knows it by another name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rltrain_delta_files as form
else:
    from rltrain.rollout.servers.in_sglang import rltrain_delta_files as form

__all__ = ["form"]
