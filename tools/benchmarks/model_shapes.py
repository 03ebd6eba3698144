"""Shapes of well-known models, for benchmarks that need no weights: the values of their published config.json."""

from rltrain.models import MLA, Architecture, ExpertLayers, YarnScaling


def qwen3_8b() -> Architecture:
    return _qwen3(num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=12288)


def qwen3_32b() -> Architecture:
    return _qwen3(num_layers=64, hidden_size=5120, num_heads=64, num_kv_heads=8, ffn_hidden_size=25600)


def qwen3_30b_a3b() -> Architecture:
    return _qwen3(
        family="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        ffn_hidden_size=6144,
        moe=ExpertLayers(num_experts=128, top_k=8, ffn_hidden_size=768),
    )


def qwen3_235b_a22b() -> Architecture:
    return _qwen3(
        family="qwen3_moe",
        num_layers=94,
        hidden_size=4096,
        num_heads=64,
        num_kv_heads=4,
        ffn_hidden_size=12288,
        moe=ExpertLayers(num_experts=128, top_k=8, ffn_hidden_size=1536),
    )


def deepseek_v3() -> Architecture:
    """671B parameters, without the layer for multi-token prediction."""
    return Architecture(
        family="deepseek_v3",
        num_layers=61,
        hidden_size=7168,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        ffn_hidden_size=18432,
        vocab_size=129280,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=YarnScaling(
            factor=40.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_positions=4096,
        ),
        max_positions=163840,
        eos_token_ids=(1,),
        moe=ExpertLayers(
            num_experts=256, top_k=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048, dense_layers=(0, 1, 2)
        ),
        mla=MLA(q_rank=1536, kv_rank=512, plain_head_dim=128, rope_head_dim=64, value_head_dim=128),
    )


def _qwen3(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_hidden_size: int,
    family: str = "qwen3",
    moe: ExpertLayers | None = None,
) -> Architecture:
    return Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=151936,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_positions=40960,
        eos_token_ids=(151645, 151643),
        moe=moe,
    )
