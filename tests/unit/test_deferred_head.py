"""Causal language models of transformers whose head is left to the loss."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
)

from rltrain.training.fsdp_model import Policy
from rltrain.training.vocabulary import Logits

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
CAP = 0.01
IDS = torch.arange(12)[None]


def policy_of(config: PreTrainedConfig, softcap: float | None = None) -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(config, dtype=torch.float32), softcap).eval()


@pytest.mark.parametrize(
    ("config", "softcap"),
    [
        (LlamaConfig(**SIZES), None),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), None),
        (Gemma2Config(**SIZES, head_dim=4, final_logit_softcapping=CAP), CAP),
    ],
    ids=["plain", "tied", "capped"],
)
def test_a_plain_or_capped_head_is_left_to_the_loss(config: PreTrainedConfig, softcap: float | None) -> None:
    policy = policy_of(config, softcap)
    outputs = policy(input_ids=IDS)[0]
    assert policy.defers_head and outputs.shape == (12, 8)
    weight = policy.head.weight
    assert isinstance(weight, torch.Tensor)
    expected = policy.language_model(input_ids=IDS).logits[0]
    torch.testing.assert_close(Logits(outputs, weight, softcap=softcap)[:, :], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SIZES, logits_scaling=3.0),
        CohereConfig(**SIZES, logit_scale=0.5),
        PhiConfig(**SIZES),
        Gemma2Config(**SIZES, head_dim=4, final_logit_softcapping=CAP),
    ],
    ids=["divided", "multiplied", "bias", "cap of an unlisted family"],
)
def test_a_head_with_other_arithmetic_computes_whole_logits(config: PreTrainedConfig) -> None:
    policy = policy_of(config)
    expected = policy.language_model(input_ids=IDS).logits
    for _ in range(2):
        torch.testing.assert_close(policy(input_ids=IDS), expected)
    assert not policy.defers_head
