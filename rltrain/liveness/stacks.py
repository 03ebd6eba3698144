"""What the threads of this process are doing, from their Python stacks."""

import linecache
import sys
import threading
import traceback
from types import FrameType

COMMUNICATING_MODULES = (
    "torch.distributed",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.tensor_parallel.mappings",
)
"""A thread whose innermost Python frame is here is inside a collective or a transfer."""

COMMUNICATING_CALLS = (".wait(", "torch.cuda.synchronize(", "wait_stream(")
"""As is one that stands on a line with one of these: work handles are waited for wherever they are kept."""


def main_thread_communicates() -> bool:
    """Whether the main thread is inside a collective or a transfer, as far as its stack tells."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and communicates(frame)


def communicates(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    if any(module == known or module.startswith(f"{known}.") for known in COMMUNICATING_MODULES):
        return True
    number: int | None = frame.f_lineno  # None in a bytecode that stands for no line
    lines = linecache.getlines(frame.f_code.co_filename) or []  # None for code that a library has made up
    line = "".join(lines[number - 1 : number]) if number else ""
    return any(call in line for call in COMMUNICATING_CALLS)


def describe_threads() -> str:
    """The Python stacks of all threads, the main one first and innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )
