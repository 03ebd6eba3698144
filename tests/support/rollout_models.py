"""Tiny models for engines, with their expected tokens and routing."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import Architecture, read_architecture
from rltrain.planning.memory import kv_bytes, state_bytes
from rltrain.reshard.copy_table import Zeros, allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.block_tables import GB, KvBudget
from rltrain.rollout.embedded.decoder import Record
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from tests.support.family_checkpoints import CHECKPOINTS, remember, tiny_config

VOCAB_SIZE = 50
MAX_POSITIONS = 256


class LetterTokenizer:
    """A tokenizer with one letter per token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


def hf_config(family: str, *, tied: bool, **overrides: object) -> transformers.PretrainedConfig:
    """Returns a config with eight heads over two KV heads and hidden size 32; `overrides` take precedence.

    Heads have the width given by the hidden size, or a larger one if the family allows it.
    """
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    latent = "kv_lora_rank" in CHECKPOINTS[family][1]
    own: dict[str, object] = {"num_key_value_heads": 8} if latent else {}
    if family in ("llama", "qwen3"):
        own["head_dim"] = 8
    return tiny_config(family, sizes, tie_word_embeddings=tied, **own | overrides)


def write_checkpoint(folder: Path, family: str, *, tied: bool = False, seed: int = 0, **overrides: object) -> Path:
    """Writes a checkpoint with widely spread weights: the best token is never in doubt."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(family, tied=tied, **overrides), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(spread * 0.3 if parameter.ndim > 1 else parameter + 0.2 * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    remember(model)
    model.save_pretrained(folder)
    return folder


def load_engine(
    path: Path,
    *,
    grid: Grid | None = None,
    rank: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    max_running_requests: int = 64,
    max_context_tokens: int = MAX_POSITIONS,
    dtype: torch.dtype = torch.float32,
    tokenizer: object | None = None,
    device: str = "cpu",
    record: Record | None = None,
    kv_tokens: int | None = None,
    cache_returns: Callable[[], bool] = lambda: False,
    record_routing: bool = False,
    zeros: Zeros | None = None,
    ahead: int | None = None,
) -> tuple[EmbeddedEngine, dict[str, torch.Tensor]]:
    """Returns an engine with the checkpoint, and the parameters that it reads. Its KV cache has room for `kv_tokens`,
    and `zeros` allocates it."""
    architecture = read_architecture(path)
    layout = engine_layout(architecture, grid or Grid((0,)), dtype=str(dtype).removeprefix("torch."))
    parameters = allocate_parameters(layout, rank, device=device)
    load_parameters(path, layout, rank, parameters)
    engine = EmbeddedEngine(
        architecture,
        parameters,
        tp_group=tp_group,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        record=record,
        kv_budget=kv_budget(architecture, kv_tokens, dtype, grid, record_routing, max_running_requests)
        if kv_tokens
        else None,
        cache_returns=cache_returns,
        record_routing=record_routing,
        zeros=zeros,
        ahead=ahead,
    )
    return engine, parameters


def kv_budget(
    architecture: Architecture,
    num_tokens: int,
    dtype: torch.dtype,
    grid: Grid | None = None,
    routing: bool = False,
    num_slots: int = 64,
) -> KvBudget:
    """Returns the KV budget of a rank, with room for the tokens' routing and for the states of samples in all slots."""
    tp = grid.tp if grid else 1
    token_bytes = kv_bytes(architecture, 1, tp=tp, item_bytes=dtype.itemsize)
    if routing:
        token_bytes += architecture.routing_bytes
    num_bytes = num_tokens * token_bytes + state_bytes(architecture, num_slots, tp=tp, item_bytes=dtype.itemsize)
    return KvBudget(num_bytes / GB, lambda: num_bytes)


def widths_of_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that receives the number of computed tokens of each prefill of an engine."""
    widths: list[int] = []
    fill_cache = EngineModel.fill_cache

    def noted(self: EngineModel, tokens: Sequence[int], *rest: object) -> object:
        widths.append(len(tokens))
        return fill_cache(self, tokens, *rest)

    monkeypatch.setattr(EngineModel, "fill_cache", noted)
    return widths


def hf_model(path: Path) -> transformers.PreTrainedModel:
    """Returns transformers' model with eager attention. Only that kind is correct for Gemma 2."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def hf_logprobs(model: transformers.PreTrainedModel, done: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Returns the log-probs of one pass over the whole sequence, shape [response tokens, vocabulary]."""
    logits = model(torch.tensor([done.context])).logits[0, len(done.prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def of_tokens(logprobs: torch.Tensor, done: Sample) -> torch.Tensor:
    """Returns the log-probs of the response's own tokens."""
    return logprobs.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]


def ragged_requests(num_requests: int = 9, seed: int = 0) -> list[Sample]:
    """Returns requests with prompts of 1, 3, 5, ... random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            id=100 + index,
            prompt=tuple(torch.randint(VOCAB_SIZE, (1 + 2 * index,), generator=generator).tolist()),
            seed=seed * 1000 + index,
        )
        for index in range(num_requests)
    ]


def requests_of_one_system(
    num_prompts: int, num_samples: int = 1, *, system_tokens: int = 13, seed: int = 5
) -> list[Sample]:
    """Returns groups of requests whose prompts begin with the same tokens. 2, 5, 8, ... others follow these."""
    generator = torch.Generator().manual_seed(seed)
    system, *ends = (
        tuple(torch.randint(4, VOCAB_SIZE, (count,), generator=generator).tolist())
        for count in (system_tokens, *range(2, 2 + 3 * num_prompts, 3))
    )
    return [
        Sample(1000 + number, system + ends[number // num_samples], seed=number)
        for number in range(num_prompts * num_samples)
    ]


def assert_same_but_for_ties(
    found: Sequence[Sample], expected: Sequence[Sample], *, logprob: float, most: int = 1
) -> None:
    """Asserts equal tokens, and log-probs within `logprob` of each other.

    Other arithmetic can decide a near tie differently. So in at most `most` samples one token may differ, with all
    tokens after it.
    """
    num_ties = 0
    for done, other in zip(found, expected, strict=True):
        pairs = [*zip(done.tokens, other.tokens, strict=False)]
        same = next((place for place, (one, another) in enumerate(pairs) if one != another), len(pairs))
        num_ties += same < max(len(done.tokens), len(other.tokens))
        assert done.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=logprob), f"sample {done.id}"
    assert num_ties <= most


@torch.no_grad()
def expected_routing(path: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """Returns the experts of transformers' routers, shape [tokens, layers, top_k]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    routed: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, given, found: routed.append(found[2]))
    model(torch.tensor([tokens]))
    return torch.stack(routed, 1)


def check(path: Path, sample: Sample, first: int = 0) -> None:
    """Compares the routing of a sample with transformers. The order of experts is arbitrary, and the last token has
    none."""
    routing = sample.routing
    assert routing is not None and len(routing) == len(sample.context) - 1
    assert routing.experts.dtype == np.int8
    found, expected = torch.from_numpy(routing.experts).long(), expected_routing(path, sample.context[:-1])
    assert torch.equal(found.sort(-1).values[first:], expected.sort(-1).values[first:])
