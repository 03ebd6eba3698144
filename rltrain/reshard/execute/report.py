"""What a reshard did and how long it took."""

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SyncReport:
    """Bytes are counted where they are handed to the wire, over all ranks together; the other numbers are this rank's.

    `bytes_local` stayed on a rank, `bytes_node` went between ranks of a node, `bytes_network` between nodes, which is
    at least `network_minimum`. `peak_staging_bytes` is the memory of all four staging buffers.

    `copy_seconds` went into local copies, `pack_seconds` and `unpack_seconds` into filling and emptying staging
    buffers. `wire_seconds` are those during which messages of this rank were on the wire: from when they were handed to
    the transport to when all that it receives had arrived, or what it sends had left where it receives nothing. Over
    NCCL they are of rounds, on the device; over gloo of whole stages, until the host sees the end. These parts overlap,
    so they do not add up to `seconds`, from when all ranks had come to when all were done.

    A run that sends what changed compares `bytes_compared` of what it packs with what was sent last, over all ranks
    together, finds that `bytes_changed` differ, and sends `bytes_encoded` for them.
    """

    bytes_local: int
    bytes_node: int
    bytes_network: int
    network_minimum: int
    bytes_sent: int
    bytes_received: int
    num_rounds: int
    num_launches: int
    peak_staging_bytes: int
    copy_seconds: float
    pack_seconds: float
    wire_seconds: float
    unpack_seconds: float
    seconds: float
    bytes_compared: int = 0
    bytes_changed: int = 0
    bytes_encoded: int = 0

    @property
    def bytes_moved(self) -> int:
        """Between ranks."""
        return self.bytes_node + self.bytes_network

    @property
    def network_ratio(self) -> float:
        """Bytes between nodes over the least that had to go there; 1 where nothing had to and nothing did."""
        if self.network_minimum:
            return self.bytes_network / self.network_minimum
        return float("inf") if self.bytes_network else 1.0

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Achieved by all ranks together, from when all had come to when all were done."""
        return self.bytes_moved / self.seconds


def total(reports: Sequence[SyncReport]) -> SyncReport:
    """Of reshards that one rank made one after the other."""
    sums = {field.name: sum(getattr(report, field.name) for report in reports) for field in fields(SyncReport)}
    return SyncReport(**{**sums, "peak_staging_bytes": max(report.peak_staging_bytes for report in reports)})
