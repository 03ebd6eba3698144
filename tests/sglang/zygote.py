"""A process with SGLang imported once. Its forks are servers without another import. See
tests/sglang/forked_python.py."""

import importlib
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from selectors import EVENT_READ
from typing import Any

import torch

from tests.forked.zygote import Child, Zygote, become, prepare_forks

PRELOADED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.plugins",
)


class ServersZygote(Zygote):
    """Forks servers with their own process groups. A server and its requester end together."""

    def _fork(self, connection: socket.socket, request: dict[str, Any], streams: list[int]) -> None:
        before = set(self.children)
        super()._fork(connection, request, streams)
        if self.request is None:
            (pid,) = set(self.children) - before
            os.setpgid(pid, pid)
            child = self.children[pid]
            self.selector.register(connection, EVENT_READ, lambda: self._kill_all(child))  # the requester has ended

    def _ended(self, child: Child) -> None:
        self.selector.unregister(child.connection)
        self._kill_all(child)
        super()._ended(child)

    def _end(self) -> None:
        for child in self.children.values():
            self._kill_all(child)
        super()._end()

    def _kill_all(self, child: Child) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def forget_temporary_folder() -> None:
    """Resets the folder of tempfile, because the supervisor of every server sets another one."""
    tempfile.tempdir = None


def main() -> None:
    prepare_forks(sys.argv[1], PRELOADED)
    if not torch.cuda.is_available():
        # SGLang's Qwen3-Next asks for the current CUDA device even on a CPU.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        # Layers in FP8 are loaded as on a GPU. CPUs without AMX could not repack and multiply them.
        importlib.import_module("sglang.srt.layers.quantization.fp8")._is_cpu = False  # type: ignore[attr-defined]
        # Checksums are of bits and scales. SGLang itself would hash dequantised values.
        checker = importlib.import_module("sglang.srt.utils.weight_checker")
        checker.select_comparable_weight = lambda method: None  # type: ignore[attr-defined]
    become(ServersZygote(sys.argv[1]).serve(), forget_temporary_folder)


if __name__ == "__main__":
    main()
