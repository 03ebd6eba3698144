"""How long a planned reshard takes at given link bandwidths, beside the least that any plan could take."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from rltrain.reshard.plan import Planner
from rltrain.reshard.senders import Block


@dataclass(frozen=True)
class Links:
    """Bytes per second in each direction of one rank: to other nodes, and to other ranks of its node."""

    network: float
    node: float


@dataclass(frozen=True)
class Prediction:
    """Seconds. `network_bound` is that of the ideal split of the same bytes over all senders and all receivers.

    `network` is that of the busiest sender or receiver between nodes; `node` that of the busiest within its node.
    """

    network: float
    network_bound: float
    node: float
    busiest_sender_bytes: int
    busiest_receiver_bytes: int


def predict(planner: Planner, links: Links) -> Prediction:
    """Network and node transfers counted apart: they use different links."""
    network_out, network_in, node_out, node_in = (Counter[int]() for _ in range(4))
    for line in planner.lines.all.values():
        for block in line.blocks:
            out, into = (network_out, network_in) if block.enters_once else (node_out, node_in)
            _add_sent(block, out)
            _add_received(block, into)
            if block.enters_once:
                _add_fan_out(block, node_out, node_in)
    sent, received = max(network_out.values(), default=0), max(network_in.values(), default=0)
    total = sum(network_in.values())
    senders, receivers = len(planner.source.ranks), len(planner.destination.ranks)
    return Prediction(
        network=max(sent, received) / links.network,
        network_bound=max(total / senders, total / receivers) / links.network,
        node=max([0, *node_out.values(), *node_in.values()]) / links.node,
        busiest_sender_bytes=sent,
        busiest_receiver_bytes=received,
    )


def _add_sent(block: Block, sent: Counter[int]) -> None:
    bounds = np.clip(block.line.bounds, block.start, block.start + block.length)
    for rank, num_bytes in zip(block.line.candidates.tolist(), np.diff(bounds).tolist(), strict=True):
        sent[rank] += num_bytes


def _add_received(block: Block, received: Counter[int]) -> None:
    for number, ranks in zip(block.classes, block.receivers, strict=True):
        weight = int(block.node.needs.class_weights[number])
        for rank in ranks.tolist():
            received[rank] += weight // len(ranks) if block.enters_once else weight


def _add_fan_out(block: Block, sent: Counter[int], received: Counter[int]) -> None:
    """Each receiver sends its share on to all others and gets theirs."""
    for number, ranks in zip(block.classes, block.receivers, strict=True):
        share = int(block.node.needs.class_weights[number]) // len(ranks)
        for rank in ranks.tolist():
            sent[rank] += share * (len(ranks) - 1)
            received[rank] += share * (len(ranks) - 1)
