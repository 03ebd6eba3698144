"""Reward models of which it is known what they like, with a tokenizer and template that no policy has."""

import string
from pathlib import Path

import torch

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def make_reward_model(path: Path, liked: str) -> Path:
    """A classifier of letters that scores a text 1 if it ends with the letter `liked`, and else 0."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

    letters = {"<unknown>": 0, **{letter: number for number, letter in enumerate(string.printable, 1)}}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(letters),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        num_labels=1,
    )
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        for layer in model.model.layers:  # so that nothing but the last token reaches the head
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.zeros(len(letters), config.hidden_size)
        embeddings[:, 1] = 1.0
        embeddings[letters[liked]] = torch.eye(config.hidden_size)[0]
        model.model.embed_tokens.weight.copy_(embeddings)
        model.score.weight.copy_(torch.eye(config.hidden_size)[:1] / config.hidden_size**0.5)
    model.save_pretrained(path)
    return path
