"""The real server refuses the same as its stand-in, in the same words."""

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import HTTPError

import pytest

from rltrain.rollout.servers.sglang_process import Server
from rltrain.rollout.servers.sglang_weights import LOADER, TARGET, payload
from tests.sglang.servers import call
from tests.support.sglang_server import Refused, SchedulerDied, ServerRules

pytestmark = pytest.mark.slow

NOTHING = {
    "serialized_named_tensors": [payload("{}")],
    "load_format": LOADER,
    "flush_cache": False,
    "weight_version": "7",
    **TARGET,
}
BEGIN, UPDATE, END = (
    ("/begin_weight_update", TARGET),
    ("/update_weights_from_tensor", NOTHING),
    ("/end_weight_update", {}),
)
PAUSE, GO_ON = ("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {"torch_empty_cache": False})


def answer_of(server: Server, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
    try:
        return 200, str(call(server, path, body).get("message", ""))
    except HTTPError as error:
        return error.code, str(json.loads(error.read())["message"])


def stand_ins_answer(rules: ServerRules, path: str) -> tuple[int, str]:
    acts: dict[str, Callable[[], None]] = {
        BEGIN[0]: lambda: rules.begin_update("target", is_idle=True),
        UPDATE[0]: lambda: rules.update("7", is_idle=True),
        END[0]: lambda: rules.end_update(is_idle=True),
        PAUSE[0]: lambda: rules.pause("in_place"),
        GO_ON[0]: rules.go_on,
    }
    try:
        acts[path]()
    except Refused as refused:
        return 400, str(refused)
    return 200, ""


def test_sessions_and_pauses_are_refused_alike(server: Server) -> None:
    rules = ServerRules()
    in_session = (END, UPDATE, BEGIN, BEGIN, UPDATE, END, END)
    for path, body in (*in_session, PAUSE, PAUSE, UPDATE, BEGIN, UPDATE, END, GO_ON, GO_ON):
        status, message = answer_of(server, path, body)
        expected, words = stand_ins_answer(rules, path)
        assert (status, words in message) == (expected, True), f"{path}: {message}; the stand-in: {words}"
        if path == UPDATE[0] and status == 200:
            assert call(server, "/model_info")["weight_version"] == rules.version


def test_memory_that_was_not_released_ends_the_server(server: Server) -> None:
    with pytest.raises(SchedulerDied, match="KeyError"):
        ServerRules().resume(["weights"])
    with pytest.raises(OSError):  # its connection breaks
        call(server, "/resume_memory_occupation", {"tags": ["weights"]})
    assert "KeyError: 'weights'" in server.spec.log_path.read_text()
    server.kill()
