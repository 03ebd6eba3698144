"""Reward models with their own tokenizer and template: random ones, and some with known preferences."""

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
LETTERS = {"<unknown>": 0, "<end>": 1, **{letter: number for number, letter in enumerate(string.printable, 2)}}
SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def make_random(path: Path, family: str, **settings: Any) -> "PreTrainedModel":
    """Writes a random classifier of letters to `path` and returns it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(LETTERS),
        num_labels=1,
        **{"num_hidden_layers": 2, "max_position_embeddings": 64, "initializer_range": 0.2, **SHAPE, **settings},
    )
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(path)
    _save_tokenizer(path)
    return model


def make_lover_of(letter: str, path: Path) -> Path:
    """Writes a classifier that scores a text 1 if it ends with the letter, else 0."""
    model = make_random(path, "Qwen2", num_hidden_layers=1)
    width = model.config.hidden_size
    _let_only_the_last_token_reach_the_head(model)
    with torch.no_grad():
        embeddings = torch.zeros(len(LETTERS), width)
        embeddings[:, 1] = 1.0
        embeddings[LETTERS[letter]] = torch.eye(width)[0]
        model.model.embed_tokens.weight.copy_(embeddings)
        model.score.weight.copy_(torch.eye(width)[:1] / width**0.5)
    model.save_pretrained(path)
    return path


def make_judge_who_loves(letter: str, path: Path) -> Path:
    """Writes a language model that answers x to a question ending with the letter, else y."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Without a GPU, SGLang pads other widths, and then its weights differ from rltrain's.
    shape = {
        **SHAPE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(LETTERS), eos_token_id=LETTERS["<end>"], **shape))
    _let_only_the_last_token_reach_the_head(model)
    loved, other, answered = torch.eye(SHAPE["hidden_size"])[:3]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(other.expand(len(LETTERS), -1))
        model.model.embed_tokens.weight[LETTERS[letter]] = loved
        model.model.embed_tokens.weight[[LETTERS["x"], LETTERS["y"]]] = answered
        model.lm_head.weight.zero_()
        for answer, state in (("x", loved), ("y", other), ("<end>", answered)):
            model.lm_head.weight[LETTERS[answer]] = state
    model.save_pretrained(path)
    _save_tokenizer(path)
    return path


def points(answer: str) -> float | None:
    """Returns the points of the judge's answer."""
    return {"x": 1.0, "y": 0.0}.get(answer)


def _let_only_the_last_token_reach_the_head(model: "PreTrainedModel") -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def _save_tokenizer(path: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(LETTERS, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
