"""Conversations through the endpoint against the same ones drawn in-process: tokens per second, and their ratio.

    python tools/benchmarks/endpoint.py [--conversations 64] [--turns 4] [--tokens 64] [--hidden 512] [--layers 8]

The same embedded engine draws both, one after the other, several times; clients are a process of their own, as agents
are. Both draw equally many tokens, greedily and without an end of turn. `cpu_ratio` is of the processor seconds of the
engine's process alone, which a machine that does other work changes little.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch

from rltrain.cli.serve import draw_turns
from rltrain.cli.tiny_model import (
    CHAT_TEMPLATE,
    PAD,
    TURN_END,
    Size,
    SpecialTokens,
    byte_level_tokenizer,
    write_checkpoint,
)
from rltrain.data.chat_format import ChatFormat
from rltrain.data.tokenizer import TextDecoder, load_tokenizer
from rltrain.endpoint.app import EndpointServer, EndpointSettings
from rltrain.endpoint.engine_feed import EngineFeed, EngineMailbox
from rltrain.endpoint.requests import RequestLimits, SamplingRules
from rltrain.endpoint.served_engine import EngineSettings, load_engine
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.runtime.machine import JobThread

CONTEXT_TOKENS = 2048
OBSERVATION = "The tool says: 42. Go on."
CORPUS = [OBSERVATION, "Solve task 0123456789 step by step.", "The quick brown fox jumps over the lazy dog."]


def messages_of(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Solve task {number} step by step."}]


def turn_tokens(number: int, turn: int, asked: argparse.Namespace) -> int:
    """Of one turn: from a half of --tokens to one and a half of it, so that turns end at different steps."""
    return int(asked.tokens // 2 + (7 * number + 13 * turn) % (asked.tokens + 1))


def in_process(engine: EmbeddedEngine, form: ChatFormat, sampling: SamplingParams, asked: argparse.Namespace) -> float:
    """Seconds."""
    start = time.perf_counter()
    prompts = [form.prompt(messages_of(number)) for number in range(asked.conversations)]
    limits = [turn_tokens(number, 0, asked) for number in range(asked.conversations)]
    waiting = [Sample(i, p, i, turn_limit=limits[i], goes_on=True) for i, p in enumerate(prompts)]
    observation = [{"role": "user", "content": OBSERVATION}]
    while waiting or engine.num_unfinished:
        engine.submit(waiting, sampling)
        waiting = []
        for sample in engine.step():
            if len(sample.turns) < asked.turns:
                turn = len(sample.turns)
                drawn = sample.tokens[-turn_tokens(sample.id, turn - 1, asked) :]
                new = form.continuation(drawn, observation)
                limit = len(sample.tokens) + len(new) + turn_tokens(sample.id, turn, asked)
                waiting.append(sample.observed(new, turn_limit=limit))
    engine.forget(range(asked.conversations))
    return time.perf_counter() - start


async def converse(url: str, token: str, asked: argparse.Namespace) -> float:
    """Seconds, of all conversations at once."""
    limits = httpx.Limits(max_connections=asked.conversations)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, verify=False) as client:

        async def one(number: int) -> None:
            opened = (await client.post("/sessions", headers={"Authorization": f"Bearer {token}"})).json()
            own, messages = {"Authorization": f"Bearer {opened['token']}"}, messages_of(number)
            for turn in range(asked.turns):
                body = {"messages": messages, "max_tokens": turn_tokens(number, turn, asked)}
                answer = await client.post("/v1/chat/completions", json=body, headers=own)
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                messages += [message, {"role": "user", "content": OBSERVATION}]
            await client.post(f"/sessions/{opened['id']}/finish", headers=own, json={})

        start = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(asked.conversations)))
        return time.perf_counter() - start


def through_the_endpoint(server: EndpointServer, token: str) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--client", server.url, token]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["seconds"])


def serving(engine: EmbeddedEngine, sampling: SamplingParams, folder: Path) -> tuple[EndpointServer, Any]:
    tokenizer, mailbox = load_tokenizer(folder), EngineMailbox(1024)
    rules = SamplingRules(sampling, "override")
    limits = RequestLimits(CONTEXT_TOKENS, len(tokenizer))
    server = EndpointServer(mailbox, tokenizer, EndpointSettings(rules, limits, "model", "sk-benchmark"))
    stopping = threading.Event()
    feed = EngineFeed(engine, TextDecoder(tokenizer), mailbox)
    steps = JobThread(target=draw_turns, args=(feed, stopping))
    server.start()
    steps.start()

    def stop() -> None:
        stopping.set()
        mailbox.close("done")
        steps.join()
        server.stop()

    return server, stop


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = replace(Size(), hidden=asked.hidden, layers=asked.layers, heads=8, head_dim=asked.hidden // 8)
    size = replace(size, intermediate=4 * asked.hidden, max_positions=CONTEXT_TOKENS)
    tokenizer = byte_level_tokenizer(iter(CORPUS), 320)
    special = SpecialTokens(eos=TURN_END, pad=PAD)
    write_checkpoint(folder, size, tokenizer, special, seed=0, chat_template=CHAT_TEMPLATE)
    settings = EngineSettings(folder, "float32", torch.device(asked.device), CONTEXT_TOKENS, asked.conversations)
    engine = load_engine(settings, load_tokenizer(folder))
    sampling = SamplingParams(0.0, 1.0, 0, CONTEXT_TOKENS, ())
    form = ChatFormat(load_tokenizer(folder))
    seconds: dict[str, list[float]] = {"in_process": [], "endpoint": []}
    cpu_s: dict[str, list[float]] = {"in_process": [], "endpoint": []}
    in_process(engine, form, sampling, argparse.Namespace(**{**vars(asked), "turns": 1}))  # warms up
    for _ in range(asked.repeats):
        before = time.process_time()
        seconds["in_process"].append(in_process(engine, form, sampling, asked))
        cpu_s["in_process"].append(time.process_time() - before)
        server, stop = serving(engine, sampling, folder)
        before = time.process_time()
        seconds["endpoint"].append(through_the_endpoint(server, "sk-benchmark"))
        cpu_s["endpoint"].append(time.process_time() - before)
        stop()
    places = [(number, turn) for number in range(asked.conversations) for turn in range(asked.turns)]
    tokens = sum(turn_tokens(number, turn, asked) for number, turn in places)
    speeds = {name: round(tokens / statistics.median(values)) for name, values in seconds.items()}
    ratio, cpu_ratio = (statistics.median(s["in_process"]) / statistics.median(s["endpoint"]) for s in (seconds, cpu_s))
    ratios = {"ratio": round(ratio, 3), "cpu_ratio": round(cpu_ratio, 3)}
    return {"tokens": tokens, "tokens_per_s": speeds, **ratios, "seconds": seconds, "cpu_s": cpu_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"conversations": 64, "turns": 4, "tokens": 64, "hidden": 512, "layers": 8, "repeats": 3, "threads": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        url, token = asked.client
        print(json.dumps({"seconds": asyncio.run(converse(url, token, asked))}))
        return
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(asked, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
