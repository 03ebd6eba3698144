"""The torch core attention over packed sequences, and the choice of the model's modules."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.models import Architecture, attention
from rltrain.runtime.grid import Grid
from rltrain.training import packed_attention
from rltrain.training.megatron import model
from rltrain.training.megatron.attention import PackedAttention, packed_sequences, thd_sequences
from rltrain.training.megatron.model import layout_of_model
from tests.model_shards import LATENT, tiny_architecture

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
BY_HEADS = {"cp_communication": "all_to_all"}
LENGTHS = {
    "one sequence": [7],
    "short ones share a batch": [3, 40, 1, 17, 40],
    "long ones are sorted by length": [300, 5, 290, 140, 1, 150, 129],
}


def by_sequence(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(output.permute(2, 0, 1, 3).flatten(2))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_packed_attention_equals_attention_sequence_by_sequence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    shapes = [(sum(lengths), 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    packed = packed_sequences(lengths, CPU)
    actual = PackedAttention(softmax_scale=None)(*inputs, None, packed_seq_params=packed)
    expected = by_sequence(*inputs, lengths)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_positions_begin_anew_in_each_sequence_and_slots_are_distinct() -> None:
    lengths = LENGTHS["long ones are sorted by length"]
    packed = packed_sequences(lengths, CPU)
    assert torch.equal(packed.positions, torch.cat([torch.arange(length) for length in lengths]))
    assert len(packed.unpad_index.unique()) == sum(lengths)
    assert torch.equal(packed.pad_index[packed.unpad_index], torch.arange(sum(lengths)))
    assert len(packed.pad_index) == sum(count * width for count, width in packed.batches)
    assert packed.batches == ((2, 300), (3, 150), (2, 5))


def test_transformer_engine_gets_the_boundaries_of_sequences() -> None:
    packed = thd_sequences([3, 5, 2], CPU)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 3, 8, 10]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 5


def model_section(transformer_impl: str, dtype: str = "bfloat16") -> schema.Model:
    return schema.Model.model_validate({"path": "m", "transformer_impl": transformer_impl, "dtype": dtype})


@pytest.mark.parametrize("installed", [True, False])
def test_transformer_engine_is_used_only_where_it_can_be(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "HAVE_TE", installed)
    assert model.uses_transformer_engine(model_section("auto"), CUDA) is installed
    assert model.uses_transformer_engine(model_section("auto"), CPU) is False
    assert model.uses_transformer_engine(model_section("local"), CUDA) is False
    with pytest.raises(ConfigError, match="model.transformer_impl is transformer_engine, but"):
        model.uses_transformer_engine(model_section("transformer_engine"), CPU)


def test_float32_takes_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "HAVE_TE", True)
    assert model.uses_transformer_engine(model_section("auto", "float32"), CUDA) is False
    with pytest.raises(ConfigError, match=r"but model\.dtype is float32, .* or set model\.dtype to bfloat16"):
        model.uses_transformer_engine(model_section("transformer_engine", "float32"), CUDA)


@pytest.mark.parametrize(
    ("architecture", "settings", "problem"),
    [
        (tiny_architecture("qwen3", head_dim=16), {}, None),
        (tiny_architecture("qwen3", head_dim=12), {}, "the model's keys and values have 12 and 12"),
        (tiny_architecture("deepseek_v3", head_dim=192, mla=replace(LATENT, value_head_dim=128)), BY_HEADS, None),
        (tiny_architecture("deepseek_v3", head_dim=24), {}, "the model's keys and values have 24 and 5"),
        (tiny_architecture("qwen3", head_dim=16, num_kv_heads=1), {}, None),
        (tiny_architecture("qwen3", head_dim=16, num_kv_heads=1), BY_HEADS, "it shares out the 1 key-value heads"),
    ],
)
def test_sequences_that_ranks_share_take_local_layers_where_it_has_no_kernel(
    architecture: Architecture, settings: dict[str, str], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "HAVE_TE", True)
    shared, alone = Grid((0, 1), cp=2), Grid((0, 1))
    auto, asked = (model_section(how).model_copy(update=settings) for how in ("auto", "transformer_engine"))
    assert model.uses_transformer_engine(auto, CUDA, architecture, shared) is (problem is None)
    assert model.uses_transformer_engine(asked, CUDA, architecture, alone)
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        model.uses_transformer_engine(asked, CUDA, architecture, shared)


@pytest.mark.parametrize(("given", "refused"), [("1", True), ("0", False), (None, False)])
def test_experts_in_one_parameter_are_refused(
    given: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "HAVE_TE", True)
    if given is not None:
        monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", given)
    for architecture in (tiny_architecture("qwen3"), tiny_architecture("qwen3_moe")):
        context = pytest.raises(ConfigError, match="SINGLE_PARAM is 1: Transformer Engine would keep all experts")
        with context if refused and architecture.moe else nullcontext():
            layout_of_model(architecture, Grid((0,)), model=model_section("auto"), device=CUDA)


def flash_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch.nn.attention.varlen's kernel, as its documentation has it, on the CPU."""
    lengths = cu_seq_q.diff().tolist()
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query) == len(key) == len(value)
    assert max_q == max_k == max(lengths)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert window_size == (-1, 0), "causal"
    assert enable_gqa == (query.size(1) != key.size(1)) and scale is None
    return by_sequence(query[:, None], key[:, None], value[:, None], lengths)[:, 0].view(query.shape)


def test_a_gpu_takes_all_sequences_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def kernel(*tensors: Tensor, **settings: Any) -> Tensor:
        calls.append(len(tensors[0]))
        return flash_stand_in(*tensors, **settings)

    monkeypatch.setattr(attention, "packed_kernel", lambda: kernel)
    monkeypatch.setattr(packed_attention, "attends_packed", lambda *rows: True)
    lengths = LENGTHS["long ones are sorted by length"]
    inputs = [torch.randn(sum(lengths), 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    actual = PackedAttention(softmax_scale=None)(*inputs, None, packed_seq_params=packed_sequences(lengths, CPU))
    torch.testing.assert_close(actual, by_sequence(*inputs, lengths))
    assert calls == [sum(lengths)]


@pytest.mark.parametrize(
    ("taken", "dtype", "heads"),
    [
        (True, torch.bfloat16, (128, 128)),
        (True, torch.float16, (64, 64)),
        (False, torch.float32, (128, 128)),
        (False, torch.bfloat16, (192, 128)),  # latent attention
        (False, torch.bfloat16, (20, 20)),
        (False, torch.bfloat16, (512, 512)),
    ],
)
def test_torchs_flash_kernel_takes_what_it_is_given(
    taken: bool, dtype: torch.dtype, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real operator, which checks shapes also of tensors that hold nothing."""
    monkeypatch.setattr(attention, "FLASH_DEVICE", "meta")
    query, key, value = (
        torch.empty(17, 1, count, size, dtype=dtype, device=META, requires_grad=True)
        for count, size in ((8, heads[0]), (2, heads[0]), (2, heads[1]))
    )
    assert attention.attends_packed(query[:, 0], key[:, 0], value[:, 0]) is taken
    packed = packed_sequences([5, 3, 9], META)
    attended = PackedAttention(softmax_scale=None)(query, key, value, None, packed_seq_params=packed)
    attended.sum().backward()
    assert attended.shape == (17, 1, 8 * heads[1]) and attended.dtype == dtype
    assert [x.grad.shape for x in (query, key, value)] == [x.shape for x in (query, key, value)]


def test_kernels_of_other_torches_are_taken_where_they_suffice() -> None:
    """2.11's takes grouped heads without being told, 2.10's has no window."""

    def of_212(query: Tensor, *, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> list[Any]:
        return [query, scale, window_size, enable_gqa]

    def of_211(query: Tensor, *, scale: float, window_size: tuple[int, int]) -> list[Any]:
        return [query, scale, window_size]

    def of_210(query: Tensor, *, is_causal: bool) -> None:
        raise AssertionError("has no window")

    called = []
    for kernel in (of_212, of_211):
        taken = attention._with_grouped_heads(kernel)
        assert taken is not None
        called.append(taken("rows", scale=0.5, window_size=(3, 0), enable_gqa=True))
    assert called == [["rows", 0.5, (3, 0), True], ["rows", 0.5, (3, 0)]]
    assert attention._with_grouped_heads(of_210) is None


def test_rows_on_the_cpu_are_padded() -> None:
    assert not attention.attends_packed(*torch.empty(3, 17, 8, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_left_out_of_our_attention_and_of_nobody_elses(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def sdpa(*tensors: Tensor, **settings: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(seen) == 2:
            raise ValueError("a kernel that fails")
        return scaled_dot_product_attention(*tensors, **settings)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", sdpa)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        attention.attend(*torch.randn(3, 1, 2, 5, 8), causal=True)
        with pytest.raises(ValueError, match="fails"):
            attention.attend(*torch.randn(3, 1, 2, 5, 8), causal=True)
        assert (seen, torch.backends.cuda.cudnn_sdp_enabled()) == ([False, False], enabled)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
