"""Writes a tiny vision-language model, its tokenizer, and rows with images: how many of 16 coloured squares are red?

    python tools/make_counting.py --output DIR --seed 0

DIR/model is a Qwen2.5-VL checkpoint with random weights. An image has 56 x 56 pixels, and each of its squares is one
token. DIR/warm_up.jsonl, DIR/train.jsonl and DIR/eval.jsonl have rows with a prompt, the path of an image, and the
number of red squares, from 0 to 4, as response and label. Half of the responses in warm_up.jsonl are random numbers, so
that the warmed-up model tries every number and rewards can teach it the right ones.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PAD, START, END, IMAGE, VISION_START, VISION_END, VIDEO = SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
)
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?"
CHAT_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}
"""
HIDDEN, PATCH, MERGE = 64, 7, 2
MATRIX_STD = 0.15
"""Standard deviation of the random matrices."""
SIDE, CELL = 4, PATCH * MERGE
"""Squares in a row of an image, and the pixels of a square."""
RED, OTHERS = (220, 30, 30), [(30, 60, 220), (40, 180, 60), (230, 230, 230), (20, 20, 20)]
MOST = 4
PROMPT = "<image>red?"
NUM_WARM_UP, NUM_TRAIN, NUM_EVAL = 512, 2048, 100
RANDOM_RESPONSES = 0.5
"""Share of the demonstrations with a random number as response."""


def model_config() -> Qwen2_5_VLConfig:
    """Returns transformers' configuration of the model."""
    place = {token: SPECIAL.index(token) for token in SPECIAL}
    text = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "bos_token_id": None,
        "eos_token_id": place[END],
        "pad_token_id": place[PAD],
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 2 * CELL,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=place[IMAGE],
        video_token_id=place[VIDEO],
        vision_start_token_id=place[VISION_START],
        vision_end_token_id=place[VISION_END],
        tie_word_embeddings=False,
    )


def write_model(folder: Path, seed: int) -> None:
    """Writes the checkpoint with its tokenizer and image processor."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(model_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=MATRIX_STD)
    model.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, min_pixels=(2 * CELL) ** 2, max_pixels=(8 * CELL) ** 2
    )
    processor.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate((*SPECIAL, *CHARACTERS))}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def draw(choice: random.Random, num_red: int) -> Image.Image:
    """Returns an image with `num_red` red squares at random places."""
    squares = [RED] * num_red + [choice.choice(OTHERS) for _ in range(SIDE**2 - num_red)]
    choice.shuffle(squares)
    image = Image.new("RGB", (SIDE, SIDE))
    image.putdata(squares)
    return image.resize((SIDE * CELL, SIDE * CELL), Image.Resampling.NEAREST)


def write_rows(folder: Path, name: str, num_rows: int, choice: random.Random, share_of_random: float = 0.0) -> None:
    """Writes the file of rows <name>.jsonl, and their images to the folder <name>. A share has random responses."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            path, count = f"{name}/{number}.png", str(number % (MOST + 1))
            draw(choice, int(count)).save(folder / path)
            response = str(choice.randint(0, MOST)) if choice.random() < share_of_random else count
            row = {"prompt": PROMPT, "images": [path], "response": response, "label": count}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for model/, rows and images")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and images")
    arguments = parser.parse_args()
    choice = random.Random(arguments.seed)
    write_model(arguments.output / "model", arguments.seed)
    write_rows(arguments.output, "warm_up", NUM_WARM_UP, choice, RANDOM_RESPONSES)
    write_rows(arguments.output, "train", NUM_TRAIN, choice)
    write_rows(arguments.output, "eval", NUM_EVAL, choice)
    print(f"wrote {arguments.output}: model, {NUM_WARM_UP} rows for the warm-up, {NUM_TRAIN} for training")


if __name__ == "__main__":
    main()
