"""Writes the quickstart's files: a tiny model, its tokenizer, and problems of three-digit column addition.

    python tools/make_quickstart.py --output DIR --seed 0

DIR/model is a Qwen3 checkpoint with random weights, DIR/train.jsonl holds prompt, response and label, DIR/eval.jsonl
problems that training never sees. A worked answer adds column by column, from the right, the carry as a third number:

    347+285=   ->   7+5=12,4+8+1=13,3+2+1=6,632

With --experts N it is a Qwen3-MoE checkpoint.

DIR/train_pairs.jsonl and DIR/eval_pairs.jsonl hold, of the same problems, that answer as chosen, and as rejected one
that has its form alone, of random digits.
"""

import argparse
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models

from rltrain.cli.tiny_model import Size, SpecialTokens, write_checkpoint

SMALLEST, LARGEST = 100, 999
HELD_OUT_SHARE = 10
NUM_TRAIN, NUM_EVAL = 20000, 512
EOS, PAD = "<eos>", "<pad>"
CHARACTERS = "0123456789+=,"

Pair = tuple[int, int]


def prompt_of(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def worked_answer(pair: Pair) -> str:
    """Column sums from the right with their carries, and after the last comma the sum."""
    columns, carry = [], 0
    for place in (1, 10, 100):
        digits = [number // place % 10 for number in pair] + [carry] * (carry > 0)
        total = sum(digits)
        columns.append(f"{'+'.join(map(str, digits))}={total}")
        carry = total // 10
    return ",".join([*columns, str(sum(pair))])


def is_held_out(pair: Pair) -> bool:
    """Whether the pair belongs to the tenth of all pairs that training never sees, whatever the seed."""
    return zlib.crc32(prompt_of(pair).encode()) % HELD_OUT_SHARE == 0


def draw_pairs(seed: int, num_train: int = NUM_TRAIN, num_eval: int = NUM_EVAL) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, held-out pairs) without repetition, in random order."""
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
    """One token per character; the texts of the task and nothing else can be written with it."""
    vocab = {token: index for index, token in enumerate((EOS, PAD, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS, PAD])
    return tokenizer


def write_problems(path: Path, pairs: Iterable[Pair]) -> None:
    """One JSON object with prompt, response and label per line."""
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            row = {"prompt": prompt_of(pair), "response": worked_answer(pair), "label": str(sum(pair))}
            file.write(json.dumps(row) + "\n")


def wrong_answer(pair: Pair, random: np.random.Generator) -> str:
    """Of a worked answer's form, with digits that are random."""
    right = worked_answer(pair)
    while True:
        wrong = "".join(str(random.integers(10)) if character.isdigit() else character for character in right)
        if wrong != right:
            return wrong


def write_pairs(path: Path, pairs: Iterable[Pair], random: np.random.Generator) -> None:
    """One JSON object with prompt, chosen and rejected per line."""
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            row = {"prompt": prompt_of(pair), "chosen": worked_answer(pair), "rejected": wrong_answer(pair, random)}
            file.write(json.dumps(row) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives the parser the description and the arguments of the command."""
    parser.description = __doc__
    parser.add_argument("--output", type=Path, required=True, help="folder for model/ and the data")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the choice of problems")
    parser.add_argument("--train-rows", type=int, default=NUM_TRAIN)
    parser.add_argument("--eval-rows", type=int, default=NUM_EVAL)
    parser.add_argument("--experts", type=int, default=0, help="in every layer of a Qwen3-MoE model; 0: a dense one")


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 done."""
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
