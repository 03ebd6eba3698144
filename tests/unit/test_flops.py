"""Operations counted from an architecture equal those that torch counts while a model runs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rltrain.models import read_architecture
from rltrain.models.flops import forward_flops, latent_reading_flops, positions_read
from tests.distributed.family_checkpoints import tiny_config
from tests.distributed.tiny_checkpoints import SHAPE
from tests.model_shards import tiny_architecture
from tools.benchmarks.model_shapes import deepseek_v3, qwen3_8b

LENGTH = 24
COUNTED = ("qwen3", "qwen3_moe", "deepseek_v3", "moonlight", "qwen2_moe", "glm4_moe", "phi3")


def counted_flops(model, *, backward):
    """By torch, which counts all of attention's products, masked or not."""
    tokens = torch.randint(model.config.vocab_size, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens).logits.sum()
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", COUNTED)
def test_equal_to_torchs_count(name, tmp_path):
    import transformers

    config = tiny_config(name, SHAPE)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.save_pretrained(tmp_path)
    flops = forward_flops(read_architecture(tmp_path))
    expected = LENGTH * flops.of_token(LENGTH)
    assert counted_flops(model, backward=False) == pytest.approx(expected, rel=0.005), "but for rotary frequencies"
    assert counted_flops(model, backward=True) == pytest.approx(3 * expected, rel=0.005)


def test_a_causal_token_reads_the_positions_up_to_itself():
    assert positions_read([4, 1]) == (1 + 2 + 3 + 4) + 1
    flops = forward_flops(tiny_architecture())
    assert flops.forward([4, 1]) == sum(flops.of_token(context) for context in (1, 2, 3, 4, 1))


def test_in_a_window_a_token_reads_no_more_than_that():
    assert positions_read([4, 1, 2], 2) == (1 + 2 + 2 + 2) + 1 + (1 + 2)
    architecture = tiny_architecture("gemma3_text", num_layers=4)
    flops, whole = forward_flops(architecture), forward_flops(replace(architecture, windows=None))
    per_layer = whole.attention // 4
    assert (flops.attention, flops.sliding, flops.window) == (per_layer, 3 * per_layer, 3)
    assert flops.forward([4, 1]) == sum(flops.of_token(context) for context in (1, 2, 3, 4, 1))
    assert whole.of_token(4) - flops.of_token(4) == 3 * per_layer


def test_recomputation_repeats_what_it_says():
    flops = forward_flops(tiny_architecture())
    lengths = [5, 9]
    training = flops.training(lengths)
    assert training == 3 * flops.forward(lengths)
    assert flops.training(lengths, recompute="selective") - training == positions_read(lengths) * flops.attention
    assert flops.training(lengths, recompute="full") - training == flops.forward(lengths) - sum(lengths) * flops.head


def test_a_value_head_has_one_row():
    architecture = tiny_architecture()
    assert forward_flops(architecture.value_model()).head == 2 * architecture.hidden_size
    assert forward_flops(architecture).head == 2 * architecture.hidden_size * architecture.vocab_size
    assert forward_flops(replace(architecture, tied_embeddings=True)).head == forward_flops(architecture).head


def test_latents_are_attended_to_by_queries_as_wide_as_they_are():
    """A score of 512 + 64 elements and a weighted latent of 512, of 128 heads."""
    assert latent_reading_flops(deepseek_v3()) == 2 * 128 * (576 + 512)
    assert latent_reading_flops(qwen3_8b()) == 0
