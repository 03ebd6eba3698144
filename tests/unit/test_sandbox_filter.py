"""The filter of system calls, run by a small interpreter of the kernel's packet filter, for both processors."""

import errno
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rltrain.sandbox import system_calls
from rltrain.sandbox.system_calls import NEW_NAMESPACES

ALLOWED = "allowed"
OTHER_PROCESSOR = 0x40000003


def verdict(machine: str, number: int, *arguments: int, internet: bool = False, processor: int | None = None) -> str:
    """What the kernel would do with a call: "allowed", "killed" or the name of an error."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    processor = system_calls.ARCHITECTURES[machine] if processor is None else processor
    data = struct.pack("=iIQ6Q", number - 2**32 if number >= 2**31 else number, processor, 0, *words)
    code = system_calls.as_bytes(system_calls.program(machine, internet))
    accumulator = place = 0
    while True:
        operation, if_held, if_not, operand = struct.unpack_from("=HBBI", code, 8 * place)
        place += 1
        if operation == system_calls.LOAD:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif operation == system_calls.RETURN:
            if operand == system_calls.ALLOW:
                return ALLOWED
            return "killed" if operand == system_calls.KILL_PROCESS else errno.errorcode[operand & 0xFFFF]
        else:
            held = {
                system_calls.JUMP_IF_EQUAL: accumulator == operand,
                system_calls.JUMP_IF_GREATER_EQUAL: accumulator >= operand,
                system_calls.JUMP_IF_ANY_BIT: accumulator & operand != 0,
            }[operation]
            place += if_held if held else if_not


MACHINES = pytest.mark.parametrize(("column", "machine"), list(enumerate(system_calls.ARCHITECTURES)))


@MACHINES
@settings(max_examples=150, derandomize=True, deadline=None)
@given(number=st.integers(0, 500), argument=st.integers(0, 2**64 - 1))
def test_what_is_denied_fails_and_all_else_goes_on(column: int, machine: str, number: int, argument: int) -> None:
    denied = {numbers[column] for numbers in system_calls.DENIED.values()}
    if number in denied:
        assert verdict(machine, number, argument) == "EPERM"
    elif number not in {numbers[column] for numbers in system_calls.LOOKED_AT.values()}:
        assert verdict(machine, number, argument) == ALLOWED


@MACHINES
def test_every_denied_call_is_denied(column: int, machine: str) -> None:
    numbers = [numbers[column] for numbers in system_calls.DENIED.values() if numbers[column] != -1]
    assert len({*numbers}) == len(numbers)
    assert {verdict(machine, number) for number in numbers} == {"EPERM"}


@MACHINES
@settings(max_examples=100, derandomize=True, deadline=None)
@given(flags=st.integers(0, 2**32 - 1))
@example(flags=17)
@example(flags=0x3D0F00)  # as threads are made
def test_no_process_is_made_in_new_namespaces(column: int, machine: str, flags: int) -> None:
    is_new = any(flags & flag for flag in NEW_NAMESPACES.values())
    assert verdict(machine, system_calls.LOOKED_AT["clone"][column], flags) == ("EPERM" if is_new else ALLOWED)


@MACHINES
@settings(max_examples=100, derandomize=True, deadline=None)
@given(family=st.integers(0, 50), internet=st.booleans())
def test_sockets_are_made_for_few_families(column: int, machine: str, family: int, internet: bool) -> None:
    allowed = {1, 2, 10} if internet else {1}
    found = verdict(machine, system_calls.LOOKED_AT["socket"][column], family, internet=internet)
    assert found == (ALLOWED if family in allowed else "EPERM")


@MACHINES
def test_nobody_types_on_a_terminal_for_somebody_else(column: int, machine: str) -> None:
    ioctl = system_calls.LOOKED_AT["ioctl"][column]
    assert {verdict(machine, ioctl, 0, request) for request in (0x5412, 0x541C, 0x5412 + 2**32)} == {"EPERM"}
    assert verdict(machine, ioctl, 0x5412, 0x5401) == ALLOWED


def test_calls_by_another_table_are_none() -> None:
    """32-bit calls on a 64-bit kernel, and x32's: their numbers mean something else."""
    assert verdict("x86_64", 0, processor=OTHER_PROCESSOR) == "killed"
    assert verdict("x86_64", 0x40000000 + 101) == "ENOSYS"
    assert verdict("x86_64", system_calls.LOOKED_AT["clone3"][0]) == "ENOSYS"
