"""The command `rltrain serve` and launch/serve.py."""

import argparse
import json
import logging
import secrets
import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rltrain.config.explain import expectation
from rltrain.config.rollout import Sampling
from rltrain.data.chat_template import ChatTemplate, ends_of_turns
from rltrain.data.hub import named_checkpoint
from rltrain.data.tokenizer import TextDecoder, end_token_ids, load_tokenizer
from rltrain.endpoint.app import EndpointServer, EndpointSettings
from rltrain.endpoint.opening import RecordedSession
from rltrain.endpoint.request_images import MAX_BODY_BYTES, ServedImages
from rltrain.endpoint.requests import RequestLimits, SamplingRules
from rltrain.endpoint.served_engine import EngineSettings, Reloads, dtype_of, load_engine, longest_context
from rltrain.errors import ConfigError, DivergenceError, UserError
from rltrain.models import read_architecture
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.engine_feed import EngineFeed, EngineMailbox, Mail

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


# The device of an option.

EXPECTED = 'expected "cpu", "cuda" or "cuda:N"'


def device_named(text: str | None, option: str = "--device") -> "torch.device":
    """Returns the device named by `option`. The default is the first GPU, or the CPU without one.

    Raises UserError if torch cannot use the device on this machine.
    """
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UserError(f"{option}: got {text!r}; {EXPECTED}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"{option}: got {text!r}, a device unknown to rltrain; {EXPECTED}")
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU here"
        raise UserError(f"{option}: got {text!r}, but {why}; expected {option} cpu, or a machine with a GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{option}: got {text!r}; expected one of the {torch.cuda.device_count()} GPUs, from cuda:0")
    return device


logger = logging.getLogger(__name__)

GREETING = "Hello"
EXAMPLE_LETTERS, EXAMPLE_TOKENS = 3, 1024
LOOK_S = 0.5
"""Seconds between checks for a stop while the engine is idle."""


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal. Returns the exit status: 0 after a signal, 2 for a mistake of the user."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    serve(arguments, stopping)
    return 0


def serve(arguments: argparse.Namespace, stopping: threading.Event) -> None:
    """Serves the checkpoint until `stopping` is set."""
    if arguments.engine == "sglang":
        raise ConfigError(
            "--engine sglang: use SGLang's own server, which has the same API; expected embedded, or: python -m "
            f"sglang.launch_server --model-path {arguments.checkpoint} --host {arguments.host} --port {arguments.port}"
        )
    given, device = sampling_of(arguments), device_named(arguments.device)
    named = named_checkpoint(arguments.checkpoint, "--checkpoint")
    checkpoint = named if isinstance(named, Path) else named.copy()
    architecture = read_architecture(checkpoint, "--checkpoint")  # before transformers reads it for the tokenizer
    tokenizer = load_tokenizer(checkpoint, "--checkpoint")
    context = longest_context(checkpoint, arguments.max_context_tokens)
    engine_settings = EngineSettings(
        checkpoint,
        arguments.dtype,
        device,
        context,
        arguments.max_running_requests,
        arguments.kv_cache_gb or "auto",
    )
    images = ServedImages.open(checkpoint, "--checkpoint") if arguments.vision else None
    engine = load_engine(engine_settings, tokenizer, images)
    template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer, (), {})
    ends = tuple(sorted(ends_of_turns(tokenizer, end_token_ids(checkpoint, "--checkpoint"), template)))
    token = None if arguments.no_token else arguments.token or "sk-" + secrets.token_urlsafe(24)
    settings = EndpointSettings(
        SamplingRules(SamplingParams(given.temperature, given.top_p, given.top_k, context, ends), "request"),
        RequestLimits(
            context,
            architecture.vocab_size,
            max_turns=arguments.max_requests,
            max_sessions=arguments.max_requests,
            **({"max_body_bytes": MAX_BODY_BYTES} if arguments.vision else {}),
        ),
        model=arguments.model_name or (named.resolve().name if isinstance(named, Path) else named.name),
        token=token,
        host=arguments.host,
        port=arguments.port,
        answers_passers_by=True,
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
        end_tokens=ends,
    )
    mailbox = EngineMailbox(arguments.max_requests)
    reloads = Reloads(engine, checkpoint, dtype_of(engine_settings), mailbox.wake, sees=arguments.vision)
    server = EndpointServer(mailbox, tokenizer, settings, forget_session(images), reloads, images)
    server.start()
    print(greeting(server.url, settings, tokenizer), flush=True)
    feed = EngineFeed(engine, TextDecoder(tokenizer), mailbox)
    try:
        draw_turns(feed, stopping, reloads, images)
    finally:
        mailbox.close("the server stops")
        server.stop()
        engine.close()
        if images is not None:
            images.store.close()
    print("serve: stopped", flush=True)


def forget_session(images: ServedImages | None) -> Callable[[RecordedSession], None]:
    """Returns a function that ends the use of the images of an ended session."""
    return lambda session: None if images is None else images.forget(session.id)


def draw_turns(
    feed: EngineFeed,
    stopping: threading.Event,
    reloads: Reloads | None = None,
    images: ServedImages | None = None,
) -> None:
    """Steps the engine while there are requests, until `stopping` is set. Between two steps requested weights are
    loaded, and images of ended requests are removed."""
    engine, mailbox = feed.engine, feed.mailbox
    assert mailbox is not None, "this process is the engine's first rank"
    while not stopping.is_set():
        if reloads is not None:
            reloads.carry_out()
        if images is not None:
            images.advance()
        feed.begin_step(feed.mail() or Mail())
        if engine.num_unfinished:
            try:
                feed.end_step(engine.step())
            except DivergenceError as error:  # of one request perhaps: the others are served on
                logger.error("%s", error)
                feed.fail_running()
        else:
            mailbox.wait(LOOK_S)


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Returns the sampling for requests without settings. Raises ConfigError for invalid numbers."""
    try:
        return Sampling(temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        expected = expectation(("rollout", "sampling", name))
        raise ConfigError(f"--{name.replace('_', '-')}: got {first['input']}; expected {expected}") from error


def greeting(url: str, settings: EndpointSettings, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the address of the server and an example command for it."""
    header = "" if settings.token is None else f" -H 'Authorization: Bearer {settings.token}'"
    text = _example_text(tokenizer)
    asked: dict[str, Any] = {"prompt": text}
    if tokenizer.chat_template is not None:
        asked = {"messages": [{"role": "user", "content": text}]}
    path = "chat/completions" if "messages" in asked else "completions"
    body = shlex.quote(json.dumps({**asked, "max_tokens": 64}))
    call = f"curl {url}/v1/{path}{header} -H 'Content-Type: application/json' -d {body}"
    access = "no token is needed" if settings.token is None else f"token {settings.token}"
    return f"serving {settings.model} at {url}/v1 ({access})\n{call}"


def _example_text(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns a text that the tokenizer encodes without loss: a greeting, or its first letters and digits."""
    special = set(tokenizer.all_special_ids)
    spellings = (
        str(tokenizer.decode([token])) for token in range(min(len(tokenizer), EXAMPLE_TOKENS)) if token not in special
    )
    own = "".join(text for text in spellings if text.isalnum())[:EXAMPLE_LETTERS]
    for text in (GREETING, own):
        if text and text in str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])):
            return text
    return GREETING


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = "Serves a Hugging Face checkpoint over the HTTP APIs of OpenAI and Anthropic."
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder, or a name on the hub")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 or :: for other machines")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    access = parser.add_mutually_exclusive_group()
    access.add_argument("--token", help="token for clients to send (default: a random one, printed at the start)")
    access.add_argument("--no-token", action="store_true", help="serve all clients without a token")
    parser.add_argument("--model-name", help="name in answers (default: the name of the folder)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", default=None, help="cuda or cpu (default: the first GPU, if there is one)")
    parser.add_argument("--vision", action="store_true", help="load the vision tower; requests may then have images")
    parser.add_argument("--max-context-tokens", type=int, help="most tokens of prompt and response together")
    parser.add_argument("--max-running-requests", type=int, default=64, help="most requests at once; others wait")
    parser.add_argument("--max-requests", type=int, default=1024, help="most requests in total; more are refused")
    parser.add_argument(
        "--kv-cache-gb",
        type=float,
        help="memory for keys and values (default: the free memory of a GPU; no limit on CPUs)",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="default of requests, as the next two")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, help="seed of requests without one (default: random)")
