"""Writes the quickstart's files: a tiny model, its tokenizer, and addition problems with three digits.

    python tools/make_quickstart.py --output DIR --seed 0

DIR/model is a Qwen3 checkpoint with random weights, or a Qwen3-MoE one with --experts N. DIR/train.jsonl has rows with
prompt, response and label. DIR/eval.jsonl has held-out problems. A worked answer adds the columns from right to left,
with the carry as a third number:

    347+285=   ->   7+5=12,4+8+1=13,3+2+1=6,632

DIR/train_pairs.jsonl and DIR/eval_pairs.jsonl have pairs of answers for the same problems. The chosen answer is the
worked one. The rejected answer has the same form with random digits.
"""

import argparse
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

SMALLEST, LARGEST = 100, 999
HELD_OUT_SHARE = 10
NUM_TRAIN, NUM_EVAL = 20000, 512
INIT_STD = 0.02
EOS, PAD = "<eos>", "<pad>"
CHARACTERS = "0123456789+=,"

Pair = tuple[int, int]


# The checkpoint.


@dataclass(frozen=True)
class Size:
    """Dimensions of a Qwen3 model with untied embeddings. With `experts` it is a Qwen3-MoE model, and every token uses
    `top_k` of them."""

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
    """The tokenizer's names of its end-of-sequence and padding tokens."""

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
    """Writes config.json, model.safetensors and the tokenizer's files to `folder`. No model is built.

    Matrices are normal with deviation 0.02 and norms are ones, as in the initialisation of Qwen3 by transformers.
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
    """Returns the contents of config.json."""
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
    """Returns every tensor of the checkpoint by its Hugging Face name. Random numbers are drawn in a fixed order."""
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


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return int(token_id)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The problems.


def prompt_of(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def worked_answer(pair: Pair) -> str:
    """Returns the column sums from the right with their carries, followed by the sum of the pair."""
    columns, carry = [], 0
    for place in (1, 10, 100):
        digits = [number // place % 10 for number in pair] + [carry] * (carry > 0)
        total = sum(digits)
        columns.append(f"{'+'.join(map(str, digits))}={total}")
        carry = total // 10
    return ",".join([*columns, str(sum(pair))])


def is_held_out(pair: Pair) -> bool:
    """Returns whether the pair is held out from training. This tenth of all pairs does not depend on the seed."""
    return zlib.crc32(prompt_of(pair).encode()) % HELD_OUT_SHARE == 0


def draw_pairs(seed: int, num_train: int = NUM_TRAIN, num_eval: int = NUM_EVAL) -> tuple[list[Pair], list[Pair]]:
    """Returns (training pairs, held-out pairs) in random order, without repetition."""
    numbers = LARGEST - SMALLEST + 1
    train: list[Pair] = []
    held_out: list[Pair] = []
    for index in np.random.default_rng(seed).permutation(numbers**2).tolist():
        pair = (SMALLEST + index // numbers, SMALLEST + index % numbers)
        chosen, limit = (held_out, num_eval) if is_held_out(pair) else (train, num_train)
        if len(chosen) < limit:
            chosen.append(pair)
        elif len(train) == num_train and len(held_out) == num_eval:
            return train, held_out
    raise ValueError(f"there are not enough pairs for {num_train} training and {num_eval} held-out problems")


def character_tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token per character. It encodes only texts of the task."""
    vocab = {token: index for index, token in enumerate((EOS, PAD, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS, PAD])
    return tokenizer


def write_problems(path: Path, pairs: Iterable[Pair]) -> None:
    """Writes one JSON object with prompt, response and label per line."""
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            row = {"prompt": prompt_of(pair), "response": worked_answer(pair), "label": str(sum(pair))}
            file.write(json.dumps(row) + "\n")


def wrong_answer(pair: Pair, random: np.random.Generator) -> str:
    """Returns an answer in the form of the worked one, with random digits."""
    right = worked_answer(pair)
    while True:
        wrong = "".join(str(random.integers(10)) if character.isdigit() else character for character in right)
        if wrong != right:
            return wrong


def write_pairs(path: Path, pairs: Iterable[Pair], random: np.random.Generator) -> None:
    """Writes one JSON object with prompt, chosen and rejected per line."""
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            row = {"prompt": prompt_of(pair), "chosen": worked_answer(pair), "rejected": wrong_answer(pair, random)}
            file.write(json.dumps(row) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = __doc__
    parser.add_argument("--output", type=Path, required=True, help="folder for model/ and the data")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the problems")
    parser.add_argument("--train-rows", type=int, default=NUM_TRAIN)
    parser.add_argument("--eval-rows", type=int, default=NUM_EVAL)
    parser.add_argument("--experts", type=int, default=0, help="experts in every layer (Qwen3-MoE); 0: a dense model")


def run(arguments: argparse.Namespace) -> int:
    """Writes the files. Returns the exit status, always 0."""
    special = SpecialTokens(eos=EOS, pad=PAD)
    size = Size(max_positions=128, experts=arguments.experts)
    write_checkpoint(arguments.output / "model", size, character_tokenizer(), special, seed=arguments.seed)
    train, held_out = draw_pairs(arguments.seed, arguments.train_rows, arguments.eval_rows)
    write_problems(arguments.output / "train.jsonl", train)
    write_problems(arguments.output / "eval.jsonl", held_out)
    random = np.random.default_rng(arguments.seed)
    write_pairs(arguments.output / "train_pairs.jsonl", train, random)
    write_pairs(arguments.output / "eval_pairs.jsonl", held_out, random)
    print(f"wrote {arguments.output}: model, {len(train)} training and {len(held_out)} held-out problems")
    return 0
