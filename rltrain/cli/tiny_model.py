"""Writes a small, randomly initialised Qwen3 checkpoint in Hugging Face format, with a byte-level BPE tokenizer.

    python tools/make_tiny_model.py --output DIR --corpus FILE.jsonl --vocab 1024 --chat-template

The tokenizer is trained on every text in the corpus. The files are written without building a model, in a second.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

INIT_STD = 0.02
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Dimensions of a Qwen3 model with untied embeddings; with experts, of which every token visits `top_k`, a
    Qwen3-MoE one."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 256
    max_positions: int = 2048
    experts: int = 0
    top_k: int = 2
    expert_intermediate: int = 64


@dataclass(frozen=True)
class SpecialTokens:
    """The tokenizer's own names for its end-of-sequence and padding tokens."""

    eos: str
    pad: str


def write_checkpoint(
    folder: Path,
    size: Size,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    *,
    seed: int,
    chat_template: str | None = None,
) -> None:
    """Fill `folder` with config.json, model.safetensors and the tokenizer's files.

    Matrices are normal with deviation 0.02 and norms are ones, as transformers initialises Qwen3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer.get_vocab_size()
    eos_id, pad_id = _token_id(tokenizer, special.eos), _token_id(tokenizer, special.pad)
    _write_json(folder / "config.json", qwen3_config(size, vocab_size, eos_id, pad_id))
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_id, "pad_token_id": pad_id})
    save_file(qwen3_weights(size, vocab_size, seed), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special.eos, "pad_token": special.pad}
    template = {} if chat_template is None else {"chat_template": chat_template}
    limits = {"model_max_length": size.max_positions, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", names | limits | template)


def qwen3_config(size: Size, vocab_size: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """The contents of config.json."""
    of_experts = {
        "num_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "moe_intermediate_size": size.expert_intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return {
        "architectures": ["Qwen3MoeForCausalLM" if size.experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if size.experts else "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": INIT_STD,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": "float32",
        **(of_experts if size.experts else {}),
    }


def qwen3_weights(size: Size, vocab_size: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the checkpoint by its Hugging Face name, drawn in a fixed order."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return generator.normal(0, INIT_STD, (rows, columns)).astype(np.float32)

    def norm(width: int) -> NDArray[np.float32]:
        return np.ones(width, dtype=np.float32)

    def mlp_weights(size: Size) -> dict[str, NDArray[np.float32]]:
        blocks = {"mlp": size.intermediate}
        if size.experts:
            blocks = {f"mlp.experts.{number}": size.expert_intermediate for number in range(size.experts)}
        router = {"mlp.gate": matrix(size.experts, size.hidden)} if size.experts else {}
        return router | {
            f"{block}.{name}": matrix(*(shape if name != "down_proj" else shape[::-1]))
            for block, width in blocks.items()
            for shape in ((width, size.hidden),)
            for name in ("gate_proj", "up_proj", "down_proj")
        }

    query, key = size.heads * size.head_dim, size.kv_heads * size.head_dim
    weights = {"model.embed_tokens.weight": matrix(vocab_size, size.hidden)}
    for layer in range(size.layers):
        block = {
            "self_attn.q_proj": matrix(query, size.hidden),
            "self_attn.k_proj": matrix(key, size.hidden),
            "self_attn.v_proj": matrix(key, size.hidden),
            "self_attn.o_proj": matrix(size.hidden, query),
            "self_attn.q_norm": norm(size.head_dim),
            "self_attn.k_norm": norm(size.head_dim),
            **mlp_weights(size),
            "input_layernorm": norm(size.hidden),
            "post_attention_layernorm": norm(size.hidden),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in block.items()}
    return weights | {"model.norm.weight": norm(size.hidden), "lm_head.weight": matrix(vocab_size, size.hidden)}


def byte_level_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, trained on `texts`; it can write any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, TURN_START, TURN_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def corpus_texts(path: Path) -> Iterator[str]:
    """Every text value of every row of a JSONL file."""
    with path.open(encoding="utf-8") as rows:
        for row in rows:
            yield from (value for value in json.loads(row).values() if isinstance(value, str))


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return int(token_id)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--corpus", type=Path, required=True, help="JSONL file with texts for the tokenizer")
    parser.add_argument("--vocab", type=int, default=1024, help="tokens, at least 259: 256 bytes and 3 special ones")
    parser.add_argument("--chat-template", action="store_true", help="give the tokenizer a chat template")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    arguments = parser.parse_args(argv)
    if not arguments.corpus.is_file():
        sys.exit(f"--corpus: there is no file {arguments.corpus}")
    tokenizer = byte_level_tokenizer(corpus_texts(arguments.corpus), arguments.vocab)
    write_checkpoint(
        arguments.output,
        Size(**{name: getattr(arguments, name) for name in vars(Size())}),
        tokenizer,
        SpecialTokens(eos=TURN_END, pad=PAD),
        seed=arguments.seed,
        chat_template=CHAT_TEMPLATE if arguments.chat_template else None,
    )
    print(f"wrote {arguments.output} ({tokenizer.get_vocab_size()} tokens)")
    return 0
