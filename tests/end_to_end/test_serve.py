"""launch/serve.py on a real checkpoint gives the same answers as the engine in-process."""

import json
import random
import signal
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from rltrain.data.tokenizer import load_tokenizer
from rltrain.endpoint.served_engine import EngineSettings, load_engine
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from tests.forked.popen import run
from tests.support.counting_agent import field, shown
from tests.support.served import CHECKPOINT, served
from tests.support.vision_checkpoints import load_model, model_inputs, write_checkpoint

PROMPTS = ["347+285=", "123+456=", "999+1=", "20+22="]


def drawn_in_process() -> list[str]:
    tokenizer = load_tokenizer(CHECKPOINT)
    engine = load_engine(EngineSettings(CHECKPOINT, "auto", torch.device("cpu"), 128, 8), tokenizer)
    sampling = SamplingParams(0.0, 1.0, 0, 40, (tokenizer.eos_token_id,))
    samples = [Sample(i, tuple(tokenizer(prompt)["input_ids"]), 0) for i, prompt in enumerate(PROMPTS)]
    return [tokenizer.decode(done.tokens, skip_special_tokens=True) for done in engine.generate(samples, sampling)]


def test_a_checkpoint_is_served_until_a_signal() -> None:
    with served() as (url, token, process):
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120, verify=False)
        body = {"prompt": PROMPTS, "max_tokens": 40, "temperature": 0}
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 128
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert [choice["text"] for choice in answer.json()["choices"]] == drawn_in_process()
        mixed = [client.post("/v1/completions", json={**body, "temperature": t, "seed": 1}).json() for t in (1, 1, 0)]
        texts = [[choice["text"] for choice in one["choices"]] for one in mixed]
        assert texts[0] == texts[1] and texts[2] == drawn_in_process()
        ids = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        drawn = client.post("/v1/completions", json=ids).json()["choices"][0]["token_ids"]
        ended = client.post("/v1/completions", json={**ids, "stop_token_ids": drawn[3:4]}).json()["choices"][0]
        assert ended["token_ids"] == drawn[: drawn.index(drawn[3]) + 1] and len(drawn) == 8
        check_reloading(client, body)
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert chat.status_code == 400 and "no chat template" in chat.text
        assert httpx.get(f"{url}/v1/models", verify=False).status_code == 401
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, output) == (0, "serve: stopped\n"), errors


def check_reloading(client: httpx.Client, body: dict[str, object]) -> None:
    """Checks that other weights arrive whole or not at all, and that answers name their version."""
    assert client.get("/model_info").json()["weight_version"] == "default"
    refused = client.post("/update_weights_from_disk", json={"model_path": "nowhere", "weight_version": "3"})
    assert refused.status_code == 400 and "nowhere" in refused.text
    taken = client.post("/update_weights_from_disk", json={"model_path": str(CHECKPOINT), "weight_version": "4"})
    assert taken.status_code == 200 and taken.json()["weight_version"] == "4", taken.text
    answer = client.post("/v1/completions", json=body).json()
    assert answer["weight_version"] == "4" and [one["text"] for one in answer["choices"]] == drawn_in_process()
    assert httpx.get(f"{client.base_url}/model_info", verify=False).status_code == 401


GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.slow
def test_a_checkpoint_with_a_tower_sees_the_images_of_requests(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3_vl")
    model = load_model(tmp_path / "model")
    images = [field(random.Random(0), 2), field(random.Random(1), 3)]
    answers = []
    with served("--vision", "--dtype", "float32", checkpoint=tmp_path / "model") as (url, token, _):
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120, verify=False)
        for image in images:
            answer = client.post("/v1/chat/completions", json={"messages": [shown(image)], **GREEDY})
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
        update = {"model_path": str(tmp_path / "model"), "weight_version": "1"}
        assert client.post("/update_weights_from_disk", json=update).status_code == 200
        again = client.post("/v1/chat/completions", json={"messages": [shown(images[0])], **GREEDY}).json()
        assert again["choices"][0]["token_ids"] == answers[0]["choices"][0]["token_ids"]
    for answer, image in zip(answers, images, strict=True):
        ids = [*answer["prompt_token_ids"]]
        for drawn in answer["choices"][0]["token_ids"]:
            logits = model(**model_inputs(tmp_path / "model", ids, [np.asarray(image)])).logits[0, -1]
            assert int(logits.argmax()) == drawn
            ids.append(drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", str(CHECKPOINT), "--vision"], "vision"),
        (["--checkpoint", "nowhere"], "there is no folder"),
        (["--checkpoint", str(CHECKPOINT), "--max-context-tokens", "4096"], "has 128 positions"),
        (["--checkpoint", str(CHECKPOINT), "--engine", "sglang"], "python -m sglang.launch_server"),
    ],
)
def test_what_cannot_be_served_is_refused(options: list[str], message: str) -> None:
    done = run([sys.executable, "launch/serve.py", *options], timeout_s=120)
    assert done.returncode == 2 and message in done.stderr, json.dumps([done.stdout, done.stderr])
