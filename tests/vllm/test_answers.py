"""The recorded answers of the stand-in for vLLM have the form of the real server's answers."""

import json
from pathlib import Path

from tests.support.http_servers import VLLM
from tests.vllm.answers import fits, recorded
from tests.vllm.servers import VLLMServer


def test_the_server_answers_in_the_recorded_form(server: VLLMServer, checkpoints: list[Path]) -> None:
    found = recorded(server, checkpoints[0])
    for name, answer in found.items():
        assert answer["status"] == VLLM[name]["status"], f"{name}: {answer}"
        assert fits(answer, VLLM[name]), f"{name}: {json.dumps(answer)[:2000]}"
        if isinstance(content := answer["content"], list):
            assert fits(content[-1], VLLM[name]["content"][-1]), f"{name} ends with {json.dumps(content[-1])[:2000]}"
    assert {name for name in VLLM if "adapter" not in name} - {*found} == {"broken", "lora_config"}, (
        "test_generation.py compares the answer of a server whose engine ends, test_adapters.py those about adapters"
    )
