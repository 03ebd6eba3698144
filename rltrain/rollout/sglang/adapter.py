"""Low-rank adapters that a server keeps beside its weights: one set, under one name, which every request asks for.

SGLang is given them once, all zeros. From then on weight syncs write them where SGLang has them, as they write weights,
so that responses under way go on with new ones; another set would hold from the next request on.
"""

from typing import Any

from rltrain.rollout.sglang.spec import AdapterSpec
from rltrain.rollout.sglang.weights.payload import NO_TENSORS

ADAPTER = "rltrain"
"""What requests call them by."""


def first_load(adapter: AdapterSpec, num_ranks: int) -> tuple[str, dict[str, Any]]:
    """The call by which a server of so many ranks gets them, after its start."""
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": [*adapter.targets],
    }
    body = {
        "lora_name": ADAPTER,
        "config_dict": config,
        "serialized_named_tensors": [NO_TENSORS] * num_ranks,
        "pinned": True,
    }
    return "/load_lora_adapter_from_tensors", body
