"""Tiny vision-language models of transformers with random weights, their checkpoints, and transformers' results."""

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rltrain.models.vision import Tower, Vision

IMAGE_TOKEN, VISION_START, VISION_END = 5, 7, 8
VOCAB_SIZE = 128
HIDDEN = 64
PATCH, MERGE = 7, 2
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": ROPE,
}
INTERLEAVED = {**TEXT, "head_dim": 16, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 1.0,
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
WINDOWED = {**TOWER, "window_size": 28, "fullatt_block_indexes": [1]}
POSITIONED = {**TOWER, "num_position_embeddings": 16}
DEEP = {**POSITIONED, "deepstack_visual_indexes": [0, 1]}
CONFIGS: dict[Tower, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, TEXT, WINDOWED),
    "qwen3_vl": (Qwen3VLConfig, INTERLEAVED, DEEP),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, {**INTERLEAVED, **EXPERTS, "moe_intermediate_size": 96}, DEEP),
    "qwen3_5": (Qwen3_5Config, {**INTERLEAVED, **DELTA}, POSITIONED),
    "qwen3_5_moe": (Qwen3_5MoeConfig, {**INTERLEAVED, **DELTA, **EXPERTS}, POSITIONED),
}
"""The class, the language model and the tower of each kind of model."""


def tiny_config(kind: Tower, patch: int = PATCH) -> Any:
    """Returns transformers' configuration of a tiny model."""
    config, text, tower = CONFIGS[kind]
    tokens = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    untied = {"tie_word_embeddings": False}
    return config(
        text_config=dict(text) | untied, vision_config=dict(tower) | {"patch_size": patch}, **tokens, **untied
    )


def tiny_vision(kind: Tower) -> Vision:
    """Returns the shape of the tower of `tiny_config`."""
    tower = CONFIGS[kind][2]
    return Vision(
        kind=kind,
        depth=tower["depth"],
        hidden=tower["hidden_size"],
        heads=tower["num_heads"],
        ffn=tower["intermediate_size"],
        patch=tower["patch_size"],
        temporal_patch=tower["temporal_patch_size"],
        merge=tower["spatial_merge_size"],
        out_hidden=tower["out_hidden_size"],
        window=tower.get("window_size"),
        full_attention=tuple(tower.get("fullatt_block_indexes", ())),
        num_positions=tower.get("num_position_embeddings"),
        deepstack=tuple(tower.get("deepstack_visual_indexes", ())),
        image_token=IMAGE_TOKEN,
        prefix="visual." if kind == "qwen2_5_vl" else "model.visual.",
    )


# Checkpoints.

PAD, BOS, EOS, VIDEO_TOKEN = 0, 1, 2, 6
SPECIAL_TOKENS = {
    PAD: "<|endoftext|>",
    BOS: "<|im_start|>",
    EOS: "<|im_end|>",
    IMAGE_TOKEN: "<|image_pad|>",
    VIDEO_TOKEN: "<|video_pad|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
}
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + "ĠĊ" + "".join(map(chr, range(0xC0, 0x100)))
"""Texts of one byte each in byte-level tokenizers. Ġ means a space and Ċ a line break."""
CHAT_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role + '\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}
"""
MATRIX_STD, VECTOR_STD = 0.15, 0.3
FIXED = ("A_log", "dt_bias")
"""Parameters of gated delta nets that keep transformers' initial values."""


def write_checkpoint(
    folder: Path,
    kind: Tower,
    *,
    seed: int = 0,
    patch: int = PATCH,
    text: Mapping[str, Any] = MappingProxyType({}),
    **tower: int,
) -> None:
    """Writes the checkpoint of `tiny_config` with random weights, its tokenizer and its image processor. `tower` are
    further sizes in vision_config, and `text` in text_config, as far as it has them.

    The tokenizer has a token for each of CHARACTERS, as far as the vocabulary reaches. An image of 56 x 56 pixels keeps
    its size, and has 16 tokens with patches of 7 pixels.
    """
    torch.manual_seed(seed)
    config = tiny_config(kind, patch)
    for key, value in tower.items():
        setattr(config.vision_config, key, value)
    for key in text.keys() & vars(config.text_config).keys():
        setattr(config.text_config, key, text[key])
    config.video_token_id = VIDEO_TOKEN
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=MATRIX_STD)
            elif not name.endswith(FIXED):
                parameter.add_(VECTOR_STD * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        turn_experts(folder / "model.safetensors")
    Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=MERGE, min_pixels=28 * 28, max_pixels=112 * 112
    ).save_pretrained(folder)
    _write_tokenizer(folder)


def turn_experts(file: Path) -> None:
    """Transposes the matrices of experts, as in published files. transformers 5 saves them as it holds them."""
    turned = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in load_file(file).items()
    }
    save_file(turned, file, metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    places = [place for place in range(VOCAB_SIZE) if place not in SPECIAL_TOKENS]
    vocab = {text: place for place, text in SPECIAL_TOKENS.items()} | dict(zip(CHARACTERS, places, strict=False))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "model_max_length": TEXT["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def load_model(folder: Path, **settings: Any) -> Any:
    """Returns transformers' model of a checkpoint in fp32, in eval mode."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager", **settings
    )
    return model.eval()


def model_inputs(folder: Path, ids: Sequence[int], images: Sequence[NDArray[np.uint8]]) -> dict[str, Tensor]:
    """Returns the arguments of transformers' model for one sequence.

    `ids` have the placeholders of all tokens of images. `images` are [frames, height, width, 3] or [height, width, 3].
    """
    tokens = torch.tensor([ids])
    shown = (tokens == IMAGE_TOKEN).int()
    if not images:
        return {"input_ids": tokens, "mm_token_type_ids": shown}
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found = processor([image.reshape(image.shape[-3:]) for image in images], do_resize=False, return_tensors="pt")
    return {
        "input_ids": tokens,
        "mm_token_type_ids": shown,
        "pixel_values": found["pixel_values"],
        "image_grid_thw": found["image_grid_thw"],
    }


Sequences = Sequence[tuple[Sequence[int], Sequence[NDArray[np.uint8]]]]
"""Token ids and images of each sequence."""


def transformers_results(folder: Path, sequences: Sequences) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the log-probs of each sequence, and the gradients of the sum of all of them.

    The log-prob of a sequence's first token is 0. Gradients have the names and shapes of the checkpoint's files, so a
    reader of checkpoints can read them too (`write_gradients`).
    """
    with TemporaryDirectory() as written:
        logprobs = write_gradients(folder, Path(written), sequences)
        return logprobs, load_file(Path(written) / "model.safetensors")


def write_gradients(folder: Path, written: Path, sequences: Sequences) -> list[Tensor]:
    """Writes a checkpoint with the gradients in the place of weights, and returns the log-probs.

    It is that of `transformers_results`.
    """
    model = load_model(folder)
    logprobs = []
    for ids, images in sequences:
        logits = model(**model_inputs(folder, ids, images)).logits[0]
        chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
        logprobs.append(torch.cat([torch.zeros(1), chosen]))
    torch.cat(logprobs).sum().backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(written)
    return [values.detach() for values in logprobs]
