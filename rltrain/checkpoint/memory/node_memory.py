"""What a rank knows of its node's memory and of those of the other nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from rltrain.checkpoint.memory.file_server import Address
from rltrain.checkpoint.memory.node_folder import NodeFolder


@dataclass(frozen=True)
class NodeMemory:
    """`addresses`: of the nodes' file servers, in the order of the nodes, all of which serve their `folder.base`."""

    folder: NodeFolder
    addresses: Sequence[Address]
