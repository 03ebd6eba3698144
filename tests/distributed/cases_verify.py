"""Checksums of syncs on real ranks: of intact syncs and of tampered ones."""

from collections.abc import Callable

import torch.distributed as dist

from rltrain.errors import SyncMismatchError
from rltrain.reshard.verify import full_gather_sync, verify
from tests.distributed.cases_quantized import ARCHITECTURES, KINDS, Sync, bits, make_groups, sync

QKV = "model.layers.0.self_attn.qkv_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def checked(case: Sync) -> str:
    """Returns the message of a failing verify, or ""."""
    try:
        verify(case.plan, case.source, case.destination, case.held, case.wanted, group=case.group, blocks=case.blocks)
    except SyncMismatchError as problem:
        return str(problem)
    return ""


def flip_a_bit(case: Sync, rank: int) -> None:
    """Flips the lowest bit of one element on rank `rank`."""
    if dist.get_rank() == rank:
        bits(case.wanted[DOWN])[5, 7] ^= 1


def swap_two_rows(case: Sync, rank: int) -> None:
    """Swaps two rows of the keys. In the fused parameter they are between two other tensors."""
    if dist.get_rank() == rank:
        rows = bits(case.wanted[QKV])
        first = case.wanted[QKV].shape[0] // 2 + 2
        rows[[first, first + 1]] = rows[[first + 1, first]]


def change_the_source(case: Sync, rank: int) -> None:
    """Changes every source rank after the sync, as if the sync had used older values."""
    del rank
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    if case.held is not None and name in case.held:
        case.held[name][3] += 1


def wipe_a_vector(case: Sync, rank: int) -> None:
    if dist.get_rank() == rank:
        case.wanted[NORM].zero_()


def change_a_scale(case: Sync, rank: int) -> None:
    name = f"{DOWN}_scale_inv"
    if dist.get_rank() == rank and name in case.wanted:
        bits(case.wanted[name])[1, 0] ^= 1


def hide_two_changes(case: Sync, rank: int) -> None:
    """Changes two elements of one tensor without changing their sum."""
    if dist.get_rank() == rank:
        values = bits(case.wanted[DOWN])
        values[0, 0] += 1
        values[0, 1] -= 1


TAMPERING: dict[str, Callable[[Sync, int], None]] = {
    function.__name__: function
    for function in (flip_a_bit, swap_two_rows, change_the_source, wipe_a_vector, change_a_scale, hide_two_changes)
}


CASES = {
    "tp4 -> tp2 dp2, two nodes": ("bf16 to fp8",),
    "tp2 -> tp1 dp2 on another node": ("fp32 to bf16", "fp32 to fp8"),
    "pp2 -> tp2, overlapping": ("fp32 to fp8",),
}


def all_checks() -> dict[str, dict[str, str]]:
    """Returns the messages by kind of tampering, for every case of this rank."""
    groups, results = make_groups(), {}
    for placement, kinds in CASES.items():
        for kind in kinds:
            case = sync(ARCHITECTURES["qwen2"], placement, groups, **KINDS[kind])
            if case is not None:
                results[f"{placement}, {kind}"] = _complaints(case)
    return results


def _complaints(case: Sync) -> dict[str, str]:
    complaints = {"nothing arrived": checked(case)}
    full_gather_sync(case.source, case.destination, case.held, case.wanted, case.group)
    complaints["nothing"] = checked(case)
    for name, tamper in TAMPERING.items():
        saved = [
            (bits(tensor), bits(tensor).clone())
            for side in (case.held, case.wanted)
            for tensor in (side or {}).values()
        ]
        tamper(case, case.destination.ranks[-1])
        complaints[name] = checked(case)
        for tensor, values in saved:
            tensor.copy_(values)
    return complaints
