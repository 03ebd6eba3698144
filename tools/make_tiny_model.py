"""Writes a small, randomly initialised Qwen3 checkpoint in Hugging Face format, with a byte-level BPE tokenizer.

    python tools/make_tiny_model.py --output DIR --corpus FILE.jsonl --vocab 1024 --chat-template

The tokenizer is trained on every text in the corpus. The files are written without building a model, in a second.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rltrain.cli.quickstart import Size, SpecialTokens, write_checkpoint

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of at most `vocab_size` tokens, trained on `texts`. It can encode any text."""
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
    """Yields every text value of every row of a JSONL file."""
    with path.open(encoding="utf-8") as rows:
        for row in rows:
            yield from (value for value in json.loads(row).values() if isinstance(value, str))


def main(argv: Sequence[str]) -> int:
    """Writes the checkpoint. Returns the exit status, always 0."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
