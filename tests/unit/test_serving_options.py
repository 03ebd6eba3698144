"""Options of the serve command that say how requests are drawn which say nothing themselves."""

import json
import shlex
import signal
from pathlib import Path

import pytest
import torch

from rltrain.cli.serve import device_named, greeting, main, parser, sampling_of
from rltrain.data.tokenizer import load_tokenizer
from rltrain.endpoint.app import EndpointSettings
from rltrain.endpoint.requests import RequestLimits, SamplingRules
from rltrain.errors import ConfigError
from rltrain.rollout.engine import SamplingParams
from tests.talking_engine import byte_tokenizer

WARMED_UP = Path(__file__).resolve().parents[1] / "warmed_up"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--temperature", "1e400"], "--temperature: got inf; expected 0, or a number from 0.001 to 1000"),
        (["--temperature", "nan"], "--temperature: got nan; expected 0, or a number from 0.001 to 1000"),
        (["--temperature", "1e-5"], "--temperature: got 1e-05; expected 0, or a number from 0.001 to 1000"),
        (["--top-p", "0"], "--top-p: got 0.0; expected a number, at least 0.000001 and at most 1"),
        (["--top-k", "-5"], "--top-k: got -5; expected a whole number, at least -1"),
    ],
)
def test_numbers_that_no_engine_can_draw_with_are_refused(options: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        sampling_of(parser().parse_args(["--checkpoint", "x", *options]))
    assert str(error.value) == expected


def test_others_are_taken() -> None:
    given = ["--checkpoint", "x", "--temperature", "0", "--top-p", "0.5", "--top-k", "-1"]
    sampling = sampling_of(parser().parse_args(given))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)


@pytest.mark.parametrize(("token", "has_chats"), [("sk-1", True), (None, True), (None, False)])
def test_the_command_that_is_printed_asks_for_a_text_that_the_tokenizer_has(token: str | None, has_chats: bool) -> None:
    tokenizer = byte_tokenizer() if has_chats else load_tokenizer(WARMED_UP)
    rules = SamplingRules(SamplingParams(1.0, 1.0, 0, 64, (0,)), "request")
    settings = EndpointSettings(rules, RequestLimits(64, len(tokenizer)), "model", token)
    words = shlex.split(greeting("http://host:1", settings, tokenizer).splitlines()[1])
    path, body = words[1], json.loads(words[-1])
    assert path == ("http://host:1/v1/chat/completions" if has_chats else "http://host:1/v1/completions")
    assert ("Authorization: Bearer sk-1" in words) == (token is not None)
    text = body["messages"][0]["content"] if has_chats else body["prompt"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert text == "Hello" if has_chats else text.isdigit()


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("cuda", 0, "--device: got 'cuda', but "),
        ("cuda:2", 2, "--device: got 'cuda:2'; expected one of the 2 GPUs, from cuda:0"),
        ("gpu", 0, '--device: got \'gpu\'; expected "cpu", "cuda" or "cuda:N"'),
        ("meta", 0, "--device: got 'meta', a device that rltrain has no code for"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(
    device: str, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["--checkpoint", str(WARMED_UP), "--device", device]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_the_first_gpu_is_taken_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(device_named(None)) == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(device_named(None)) == str(device_named("cpu")) == "cpu"
