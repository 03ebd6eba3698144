"""The doctor's part in a job of ranks: every node says what it has, links are measured, rank 0 prints one report."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rltrain.doctor.clocks import skew_s
from rltrain.doctor.finding import MISSING, Finding, has_fault, lines_of
from rltrain.doctor.installed import what_is_installed
from rltrain.doctor.limits import what_is_allowed
from rltrain.doctor.links import measure_links
from rltrain.doctor.paths import paths_taken
from rltrain.doctor.report import merged, of_clocks, of_links, of_storage
from rltrain.doctor.storage import try_storage
from rltrain.runtime.ending import Ending
from rltrain.runtime.nodes import NodeBoard, Spoken, compare_nodes
from rltrain.runtime.world import World, join_world, start_process_groups

WAIT_S = 60.0
"""For ranks to start, and for any answer of another node."""


def examine_job(sglang_python: Path | None, shared: list[Path], num_bytes: int) -> int:
    """Exit status, the same on all ranks: 1 where there is a fault. Collective over: all ranks."""
    world = join_world(WAIT_S)
    logging.basicConfig(level=logging.ERROR)
    try:
        start_process_groups(world, WAIT_S)
        findings = _examine(world, sglang_python, shared, num_bytes)
    except Exception as error:
        Ending(world.store, world.rank, world.size).by(error)
    if findings is not None:
        print("\n".join(lines_of(findings)), flush=True)
    verdict = NodeBoard(world, "verdict")
    if findings is not None:
        verdict.settle(has_fault(findings))
    status = int(verdict.settled())
    dist.destroy_process_group()
    return status


def _examine(world: World, sglang_python: Path | None, shared: list[Path], num_bytes: int) -> list[Finding] | None:
    """On rank 0; None on the others."""
    mine = _of_this_node(sglang_python, shared) if world.local_rank == 0 else []
    board = NodeBoard(world, "findings")
    if board.speaks:
        board.say([asdict(finding) for finding in mine])
    nodes = compare_nodes(NodeBoard(world, "hosts"), Spoken({}) if board.speaks else None)
    links = measure_links(world, num_bytes, WAIT_S)
    clocks = NodeBoard(world, "clocks")
    if (skew := skew_s(world)) is not None:
        clocks.say(skew)
    storages = {folder: try_storage(world, folder, num_bytes) for folder in shared}
    if nodes is None or links is None:
        return None
    findings = [*merged([_read(told) for told in board.of_all()], nodes)]
    findings += of_clocks(clocks.of_all(), nodes)
    for folder, by_node in storages.items():
        findings += of_storage(str(folder), by_node or [], nodes)
    return [*findings, *of_links(links, nodes)]


def _of_this_node(sglang_python: Path | None, shared: list[Path]) -> list[Finding]:
    found = [*what_is_installed(sglang_python), *what_is_allowed(shared)]
    if not any(finding.state == MISSING for finding in found):
        found += paths_taken()
    return found


def _read(told: list[dict[str, Any]]) -> list[Finding]:
    return [Finding(**one) for one in told]
