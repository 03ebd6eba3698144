"""A model for tests that calls a tool or gives an answer: what it draws depends on the last token alone."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.talking_engine import byte_tokenizer

CALL = ('<tool_call>\n{"name": "calculate", "arguments": {"expression": "', '"}}', "\n</tool_call>")
EXPRESSIONS = {"6*7": "42", "2+2": "4", "1/0": "error: division by zero"}
ANSWER = "42"
PROMPTS = ("What is six times seven?", "And two and two?")
HIDDEN = 64
CERTAINTY = 3.0
"""Times HIDDEN ** 0.5: by how much the logits of what may follow a token stand out."""


def write_tool_caller(folder: Path) -> None:
    """The model's files, and tasks.jsonl. A turn is ANSWER, or as likely a call with one of EXPRESSIONS."""
    byte_tokenizer().save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([*CALL, *EXPRESSIONS, ANSWER])
    tokenizer.save_pretrained(folder)
    (first,) = tokenizer("\n")["input_ids"]
    opening, closing, end_of_call, *expressions, answer = tokenizer.convert_tokens_to_ids([*CALL, *EXPRESSIONS, ANSWER])
    follow = {first: (opening, answer), opening: expressions, closing: (end_of_call,)}
    follow |= dict.fromkeys(expressions, (closing,)) | dict.fromkeys((end_of_call, answer), (tokenizer.eos_token_id,))
    _write_model(folder, len(tokenizer), tokenizer.eos_token_id, follow)
    tasks = [json.dumps({"prompt": [{"role": "user", "content": text}], "label": "42"}) for text in PROMPTS]
    (folder / "tasks.jsonl").write_text("\n".join(tasks))


def _write_model(folder: Path, vocab_size: int, end: int, follow: dict[int, Any]) -> None:
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(vocab_size, HIDDEN), dim=-1)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, following in follow.items():
            for other in following:
                model.lm_head.weight[other] += CERTAINTY * embeddings[token]
    model.save_pretrained(folder)
