"""Triton kernels around the products of a layer: equal to torch in Triton's interpreter, few launches, no spills."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rltrain.models import layer_kernels as formulas
from rltrain.models.attention import halves_of_pairs
from rltrain.models.windows import Windows
from rltrain.rollout.embedded import EmbeddedEngine, block_cache, engine, triton_kernels
from rltrain.rollout.embedded.block_cache import KernelBlocks, difference
from rltrain.rollout.embedded.decoder import Slots, draw, draw_by_kernel, random_streams
from rltrain.rollout.embedded.kv_cache import AttentionShape, Written
from rltrain.rollout.embedded.layers import (
    FusedResidual,
    LayerKernels,
    Norm,
    Residual,
    Rotation,
    choose_kernels,
    kernels_difference,
    layer_kernels,
    normed,
    rotate,
)
from rltrain.rollout.embedded.parameters import PlainMatrix, TensorParallel
from rltrain.rollout.engine import SamplingParams
from tests.support.marks import slow_but
from tests.support.rollout_models import load_engine, ragged_requests, write_checkpoint
from tests.support.triton_interpreter import compiled, interprets
from tests.unit.test_block_attention import attend_blocks

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not interprets(), reason="kernels take CPU tensors in Triton's interpreter alone")

KERNELS, draw_rows = layer_kernels(), triton_kernels.draw_rows

GREEDY = SamplingParams(0.0, 1.0, 0, 3, ())
# The interpreter cuts numbers off where it converts to bfloat16, so rounding shows in float16.
CLOSE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3)}
dtypes = st.sampled_from(list(CLOSE))
few = settings(max_examples=12, deadline=None)


def drawn(dtype: torch.dtype, *sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, rounded_to: torch.dtype | None = None) -> None:
    """Compares tensors, as exactly as their type or `rounded_to`, the type of a term, allows."""
    rtol, atol = CLOSE[rounded_to or expected.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@few
@given(dtypes, dtypes, st.integers(1, 70), st.booleans(), st.booleans(), st.booleans())
def test_addition_and_norm(
    wide: torch.dtype, dtype: torch.dtype, width: int, adds: bool, biased: bool, post: bool
) -> None:
    hidden, made, bias, weight, before = (drawn(of, *sizes, seed=seed) for seed, (of, sizes) in enumerate(
        [(wide, (3, width)), (dtype, (3, width)), (dtype, (width,)), (dtype, (width,)), (dtype, (width,))]
    ))  # fmt: skip
    expected = hidden.clone()
    if adds:
        output = made.float() + bias.float() if biased else made.float()
        if post:
            output = F.rms_norm(output, (width,), before.float() + 1, 1e-6).to(dtype).float()
        expected = (expected.float() + output).to(wide)
    found = KERNELS.add_norm(
        hidden,
        made if adds else None,
        weight,
        eps=1e-6,
        offset=1.0,
        added_bias=bias if adds and biased else None,
        post_weight=before if adds and post else None,
    )
    coarser = max(wide, dtype, key=lambda kind: CLOSE[kind][0])
    close(hidden, expected, coarser)
    close(found, F.rms_norm(expected.float(), (width,), weight.float() + 1, 1e-6).to(dtype), coarser)


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_layer_norms(dtype: torch.dtype) -> None:
    hidden, weight, bias = drawn(dtype, 3, 50) + 2, drawn(dtype, 50, seed=1), drawn(dtype, 50, seed=2)
    found = KERNELS.add_norm(hidden, None, weight, eps=1e-5, bias=bias)
    close(found, F.layer_norm(hidden.float(), (50,), weight.float(), bias.float(), 1e-5).to(dtype))


class TwoAlike(TensorParallel):
    """A group of two ranks that always hold the same."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size = 2

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.mul_(2)


@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [TensorParallel(None), TwoAlike()], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(("has_bias", "has_norm"), [(False, False), (True, False), (False, True)])
def test_streams_with_late_additions(wide: torch.dtype, group: TensorParallel, has_bias: bool, has_norm: bool) -> None:
    """Outputs follow each other without a norm between, before a norm, and last."""
    dtype, terms = torch.float16, SimpleNamespace(norm_eps=1e-6, norm_offset=0.5)
    norm, post = (Norm(drawn(dtype, 48, seed=seed), terms) for seed in (1, 2))  # type: ignore[arg-type]
    matrix, bias = PlainMatrix(drawn(dtype, 48, 24, seed=3) / 5), drawn(dtype, 48, seed=4) if has_bias else None
    hidden = drawn(wide, 3, 48)
    read = []
    for stream in (Residual(hidden.clone()), FusedResidual(hidden.clone(), KERNELS)):
        normed = []
        for number in range(4):
            inner = drawn(dtype, 3, 24, seed=5 + number)
            stream.add_product(inner, matrix, group, bias=bias, norm=post if has_norm else None)
            if number != 1:
                normed.append(stream.normed(norm))
        stream.add(drawn(dtype, 3, 48, seed=9))
        read.append((*normed, stream.settled(), len(stream)))
    for found, expected in zip(*read, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@few
@given(
    dtypes,
    st.sampled_from([(1, 1), (6, 2), (5, 5), (8, 1)]),
    st.sampled_from([64, 80, 128, 256]),
    st.sampled_from([2, 4]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_norms_rotation_and_storing_of_heads(
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    parts: int,
    norms: bool,
    pairs: bool,
    gated: bool,
    stores: bool,
) -> None:
    """The rotated part is all of a head, or half of it with four `parts`. Keys and values go into blocks.

    The norm and the rotation are rounded together, as in training.
    """
    (num_heads, num_kv_heads), size, num_tokens = heads, head_dim * 2 // parts, 3
    fused = drawn(dtype, num_tokens, num_heads * (2 if gated else 1) + 2 * num_kv_heads, head_dim)
    q, k, v = fused.split([fused.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)
    q = q[:, ::2] if gated else q
    angles = drawn(torch.float32, 40, size // 2, seed=1)
    cos, sin = 1.2 * angles.cos(), 1.2 * angles.sin()
    rotation = Rotation(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), torch.tensor([7, 0, 39]))
    gains = (drawn(dtype, head_dim, seed=2), drawn(dtype, head_dim, seed=3)) if norms else None
    stored = drawn(dtype, 2, 5, 4, num_kv_heads, head_dim, seed=4)
    table, positions = torch.tensor([[2, 4], [3, 1], [1, 0]], dtype=torch.int32), torch.tensor([1, 6, 0])
    rows = torch.tensor([9, 6, 4])
    keys, values = stored.clone().unbind()
    written = Written(keys, values, table, positions, 4, num_kv_heads * head_dim, head_dim) if stores else None
    turn = rotation.turn(pairs=pairs, norms=gains, eps=1e-6, offset=1.0)
    queries, made = KERNELS.turn_heads(q[:, :, None], k, turn, v, written)
    q, k = q.float(), k.float()
    if gains is not None:
        q, k = (normed(x, gain.float() + 1, 1e-6) for x, gain in ((q, gains[0]), (k, gains[1])))
    q, k = (rotate(halves_of_pairs(x, size) if pairs else x, rotation).to(dtype) for x in (q, k))
    close(queries, q)
    if written is None:
        close(made, k)
        return
    assert made is None
    before, after = (both.flatten(1, 2) for both in (stored, torch.stack([keys, values])))
    close(after[0], before[0].index_copy(0, rows, k))
    assert torch.equal(after[1], before[1].index_copy(0, rows, v)), "values are copied, and no other row changes"


@few
@given(dtypes, st.integers(1, 1500), st.sampled_from(["silu", "gelu_tanh"]), st.booleans())
def test_gates_of_mlps(dtype: torch.dtype, width: int, activation: str, weighs: bool) -> None:
    gates, ups = drawn(dtype, 2, 2 * width).chunk(2, -1)
    weights = drawn(torch.float32, 2, 1, seed=1) if weighs else None
    wide = gates.float()
    activated = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")
    expected = (activated * ups).to(dtype)
    close(KERNELS.gate_rows(gates, ups, activation, weights), expected if weights is None else expected.mul_(weights))


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_gates_of_attention(dtype: torch.dtype) -> None:
    gates, attended = drawn(dtype, 3, 8, 16)[:, 1::2], drawn(dtype, 3, 64, seed=1)
    expected = (attended.float() * gates.reshape(3, 64).float().sigmoid()).to(dtype)
    close(KERNELS.gate_rows(gates, attended, "sigmoid"), expected)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([(4, 4, 16), (8, 2, 80)]),
    st.sampled_from([None, 1, 5, 64, 100]),
    st.sampled_from([None, 0.5, 30.0]),
    st.booleans(),
)
def test_attention_over_blocks(
    heads: tuple[int, int, int], window: int | None, softcap: float | None, sinks: bool
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    windows = None if window is None else Windows(window, (True, False))
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, 0.3, windows=windows, softcap=softcap, sinks=sinks
    )
    assert difference(KernelBlocks, shape, torch.zeros(())) < 1e-5


@pytest.mark.parametrize("shape", [{"windows": Windows(8, (True,))}, {"softcap": 5.0}, {"sinks": True}])
def test_attention_with_other_scores_takes_the_kernel(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True

    tried = block_cache.difference
    monkeypatch.setattr(block_cache, "difference", lambda *args: tried(*args[:-1], torch.zeros(())))
    kind, _ = block_cache.choose_attention(AttentionShape(4, 2, 16, 16, 0.3, **shape), OnGpu())  # type: ignore[arg-type]
    assert kind is KernelBlocks


def slots_of(num_slots: int) -> Slots:
    """Returns slots with some state, of which the first ones run."""
    made = Slots(Mock(), num_slots, 9, torch.device("cpu"))
    numbers = [*range(num_slots * 3 // 4)]
    running = len(numbers)
    rows = [[1] * running, [number % 5 for number in numbers], numbers, [4] * running, [0] * running, numbers]
    made.fill(0, rows)
    return made


@few
@given(st.integers(1, 300), st.sampled_from([(), (3,), (7, 2, 5)]))
def test_the_end_of_a_step(num_slots: int, stop_tokens: tuple[int, ...]) -> None:
    tokens = torch.randint(9, (num_slots,), generator=torch.Generator().manual_seed(num_slots))
    logprobs = -drawn(torch.float32, num_slots).abs()
    logprobs[::4], logprobs[1::5] = torch.nan, -torch.inf
    found, expected = slots_of(num_slots), slots_of(num_slots)
    count = max(1, num_slots * 3 // 4)
    for slots, kernels in ((found, KERNELS), (expected, None)):
        slots.take(tokens[:count], logprobs[:count], torch.tensor(stop_tokens, dtype=torch.int64), kernels)
    assert torch.equal(found.state, expected.state)
    for name in ("tokens", "logprobs", "flags"):
        one, other = getattr(found.results, name), getattr(expected.results, name)
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)


@few
@given(st.sampled_from([1, 20, 129, 5000]), st.sampled_from([0.0, 0.7]))
def test_draws_from_narrow_logits(vocab: int, temperature: float) -> None:
    logits = 3 * drawn(torch.float16, 3, vocab)
    arguments = (random_streams([1, 2, 3], torch.device("cpu")), torch.arange(3))
    sampling = SamplingParams(temperature, 1.0, 0, 1, ())
    found, expected = (function(logits, *arguments, sampling) for function in (draw_by_kernel, draw))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-5)


def wrong(kernels: LayerKernels, **replaced: Callable[..., Any]) -> float:
    return kernels_difference(kernels._replace(**replaced), torch.device("cpu"), torch.float32)


def test_kernels_that_compute_something_else_are_seen() -> None:
    assert wrong(KERNELS) < 1e-5
    assert wrong(KERNELS, gate_rows=lambda gates, ups, activation: gates * ups) > 0.05
    assert wrong(KERNELS, add_norm=lambda hidden, made, gain, eps: normed(hidden, gain, eps)) > 0.05

    def unwritten(*arguments: Any) -> tuple[Tensor, Any]:
        *given, written = arguments
        return KERNELS.turn_heads(*given, written._replace(keys=written.keys.clone()))

    assert wrong(KERNELS, turn_heads=unwritten) > 0.05


def test_cpus_keep_torch() -> None:
    assert choose_kernels(torch.device("cpu"), torch.float32) == (None, "")


# Whole engines.


@contextmanager
def chosen(kernels: LayerKernels) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "choose_kernels", lambda device, dtype: (kernels, ""))
        yield


def pair(folder: Path, family: str, kernels: LayerKernels = KERNELS, **options: Any) -> list[EmbeddedEngine]:
    """Returns an engine without and one with kernels, on equal weights."""
    checkpoint = write_checkpoint(folder, family)
    with chosen(kernels):
        fused, _ = load_engine(checkpoint, **options)
    return [load_engine(checkpoint, **options)[0], fused]


FAMILIES = {
    "qwen3": "head norms",
    "qwen2": "biases",
    "gemma2": "norms after sub-layers, offsets, soft caps",
    "gemma3": "two rotary embeddings, windows",
    "glm4": "pairs, partly rotated, norms after sub-layers",
    "phi3": "no norms of heads",
    "minimax_m2": "norms over all heads",
    "nemotron": "layer norms, no gates",
    "gpt_oss": "sinks, biases",
    "qwen3_5": "gated attention, delta nets",
    "deepseek_v3": "latent attention, shared experts",
    "qwen3_moe": "experts",
}


@pytest.mark.parametrize("kv_tokens", slow_but([None, 2000], 2000))
@pytest.mark.parametrize("family", slow_but(list(FAMILIES), "qwen3"))
def test_engines_generate_the_same_tokens(
    tmp_path: Path, family: str, kv_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kv_tokens and family != "deepseek_v3":  # as on a GPU
        monkeypatch.setattr(engine, "choose_attention", lambda shape, like: (KernelBlocks, ""))
    plain, fused = (each.generate(ragged_requests(2), GREEDY) for each in pair(tmp_path, family, kv_tokens=kv_tokens))
    for found, expected in zip(fused, plain, strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


class Launches(TorchDispatchMode):
    """Counts operators that a GPU would run. Views and new memory launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        is_new = operator.overloadpacket.__name__ in ("empty", "new_empty", "empty_like")
        if not operator.is_view and not is_new and result.numel():
            self.counts[operator.overloadpacket.__name__] += 1
        return result

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` as one launch, without counting what the interpreter does in it."""

        def launched(*arguments: Any, **options: Any) -> Any:
            self.counts[function.__name__] += 1
            before = self.counts.copy()
            result = function(*arguments, **options)
            self.counts = before
            return result

        return launched


def launches_of_step(folder: Path, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Returns the launches of a decode step of a dense Qwen3 over blocks, as on a GPU without recorded steps."""
    counted = Launches()
    kernels = LayerKernels(*(counted.kernel(function) for function in KERNELS))
    monkeypatch.setattr(triton_kernels, "attend_blocks", counted.kernel(attend_blocks))
    monkeypatch.setattr(triton_kernels, "draw_rows", counted.kernel(draw_rows))
    monkeypatch.setattr(engine, "choose_draw", lambda device: (draw_by_kernel, ""))
    monkeypatch.setattr(engine, "choose_attention", lambda shape, like: (KernelBlocks, ""))
    checkpoint = write_checkpoint(folder, "qwen3", num_hidden_layers=num_layers)
    with chosen(kernels):
        fused, _ = load_engine(checkpoint, kv_tokens=2000)
    decoder, run = fused._decoder, fused._decoder._run

    def step(*arguments: Any) -> None:
        counted.counts.clear()
        with counted:
            run(*arguments)

    monkeypatch.setattr(decoder, "_run", step)
    fused.generate(ragged_requests(1), GREEDY)
    return counted.counts


def test_a_dense_layer_decodes_in_nine_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (launches_of_step(tmp_path / str(layers), layers, monkeypatch) for layers in (1, 2))
    of_layer = two - one
    assert of_layer == {
        "add_norm": 2, "linear": 2, "addmm_": 2, "turn_heads": 1, "attend_blocks": 1, "gate_rows": 1,
    }  # fmt: skip
    assert of_layer.total() == 9
    outside = one - of_layer
    assert outside == {"embedding": 1, "add_norm": 1, "linear": 1, "fill_": 1, "draw_rows": 1, "finish_step": 1}


INTEGERS = {
    "_norm_forward": "num_rows x_stride added_stride size",
    "_turn_forward": "num_tokens num_queries num_keys group query_token_stride query_group_stride key_token_stride "
    "key_group_stride angle_stride table_stride block_tokens place_stride head_stride",
    "_gate_forward": "num_rows size group_size gate_stride group_stride up_stride",
    "_finish_step": "num_slots state_stride",
    "_draw": "vocab row_stride",
    "_attend": "slot_stride head_stride table_stride num_kv_heads group_size head_dim window",
}
TYPES = {
    **dict.fromkeys(("eps", "offset", "temperature", "scale", "softcap"), "fp32"),
    **dict.fromkeys(("cos", "sin", "weights", "logprobs", "all_logprobs"), "*fp32"),
    **dict.fromkeys(("streams", "positions", "tokens", "stops", "state", "increments", "all_tokens"), "*i64"),
    "angle_rows": "*i64",
    **dict.fromkeys(("stopped", "failed", "finished"), "*i1"),
    "table": "*i32",
}
ROWS, SCORES = {"rows": 1, "block": 8192}, {"group_rows": 16, "block_tokens": 64, "dim_columns": 128}
HEADS = {"head_dim": 128, "half": 64, "is_pairs": True, "rows": 4, "half_block": 64, "rest_block": 1, "head_block": 128}
WIDE_HEADS = HEADS | {"head_dim": 256, "half": 128, "is_pairs": False, "half_block": 128, "head_block": 256}
GATES = {"activation": "silu", "rows": 1, "block": 1024}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constants", "num_warps"),
    [
        ("_norm_forward", {**ROWS, "bias": None}, 16),
        ("_norm_forward", {**ROWS, "added_bias": None, "post_weight": None}, 16),
        ("_turn_forward", HEADS, 4),
        ("_turn_forward", WIDE_HEADS, 4),
        ("_gate_forward", GATES, 4),
        ("_gate_forward", {**GATES, "activation": "sigmoid", "weights": None}, 4),
        ("_finish_step", {"num_stops": 2, "slots_at_once": 128}, 4),
        ("_draw", {"blocks_at_once": 32, "block_tokens": 128, "is_greedy": False}, 8),
        ("_attend", {**SCORES, "window": None, "softcap": None, "sinks": None}, 4),
        ("_attend", SCORES, 4),
    ],
)
def test_kernels_compile_for_every_gpu_and_spill_nothing(name: str, constants: dict[str, Any], num_warps: int) -> None:
    """Sizes are those of models of 0.6 to 32 billion parameters in bfloat16. What is None is left out of a kernel."""
    module = formulas if hasattr(formulas, name) else triton_kernels
    signature = {argument: TYPES.get(argument, "*bf16") for argument in getattr(module, name).arg_names}
    signature |= dict.fromkeys(INTEGERS[name].split(), "i32")
    found = compiled(module.__name__, {name: (signature, constants)}, num_warps=num_warps)
    most_bytes = 64 if name == "_attend" else 0  # a query and a result per thread, in all registers
    assert all(figures["spills"] <= most_bytes for figures in found[name].values()), found
