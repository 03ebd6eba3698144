"""Multi-head latent attention: its shape, and how config.json describes it."""

from dataclasses import dataclass

from rltrain.models.config_file import ConfigReader


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: queries, and keys with values, are made from latents of `q_rank` and `kv_rank`.
    With `q_rank` None queries are made from the hidden state.

    A head's query and key have `plain_head_dim` elements without positions and `rope_head_dim` rotated ones; the
    rotated part of the key is one for all heads. A head's value has `value_head_dim` elements.
    """

    q_rank: int | None
    kv_rank: int
    plain_head_dim: int
    rope_head_dim: int
    value_head_dim: int


def read_mla(config: ConfigReader) -> MLA:
    return MLA(
        q_rank=None if config.values.get("q_lora_rank") is None else config.count("q_lora_rank"),
        kv_rank=config.count("kv_lora_rank"),
        plain_head_dim=config.count("qk_nope_head_dim"),
        rope_head_dim=config.count("qk_rope_head_dim"),
        value_head_dim=config.count("v_head_dim"),
    )
