"""Counts the launches of a decoder layer and the bytes they move, as on a GPU, on a machine without one.

    python tools/benchmarks/launches.py [--model Qwen3-8B] [--tokens 8192] [--recompute selective] [--output FILE]

Layers run on torch's meta device in bf16: forward and backward through the code of a training step, and a decode step
of the embedded engine. A dispatch mode counts their operators. A view launches nothing; every other operator launches
one kernel, or as many as KERNELS tells. Bytes are those of the tensors that an operator takes and makes. The minimum
has every input of a fused formula read once and every output written once. Counts are of one layer among others, so
they are the difference of models with two layers and one. Gradients accumulate in fp32, as in training.
"""

import argparse
import gc
import json
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rltrain.config import schema
from rltrain.models import Architecture, attention, fused, products, read_architecture
from rltrain.planning.options import SHIPPED
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import triton_kernels
from rltrain.rollout.embedded.block_cache import KernelBlocks
from rltrain.rollout.embedded.layers import layer_kernels
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.parameters import TensorParallel
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.fsdp_attention import compute_fused
from rltrain.training.fsdp_model import empty_model
from rltrain.training.megatron import model_config, platform
from rltrain.training.megatron.model import LanguageModel, build_model
from rltrain.training.packed_attention import PackedRows, packed_rows

META = torch.device("meta")
SLOTS, POSITIONS = 64, 1024
"""Samples of a decode step, and tokens of each."""
GRID = Grid((0,), copies=1)
FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"})
"""Operators that launch nothing although they return no view."""
KERNELS = {
    "_varlen_attn_backward": 3,  # flash attention: rows' sums, the gradients, queries' gradients rounded
    "rms_norm_backward": 2,  # the gradients of inputs and of the weight
}
"""Operators with more than one kernel."""


@dataclass
class Counts:
    """Launches and bytes by operator."""

    launches: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    """Bytes of a forward pass that backward needs."""

    def note(self, name: str, tensors: list[Tensor]) -> None:
        self.launches[name] += KERNELS.get(name, 1)
        self.num_bytes[name] += sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def minus(self, other: "Counts") -> "Counts":
        names = self.launches.keys() | other.launches.keys()
        return Counts(
            Counter({name: self.launches[name] - other.launches[name] for name in names}),
            Counter({name: self.num_bytes[name] - other.num_bytes[name] for name in names}),
            self.kept - other.kept,
        )


class CountingMode(TorchDispatchMode):
    """Notes the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._made = list[tuple[StorageWeakRef, int]]()

    def num_alive(self) -> int:
        """Returns the bytes of the memory that operators made and that something holds."""
        gc.collect()
        alive = {made.cdata: num_bytes for made, num_bytes in self._made if not made.expired()}
        return sum(alive.values())

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        storages = [leaf.untyped_storage() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self._made += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages if not func.is_view]
        if isinstance(made, Tensor | tuple | list) and not (func.is_view or name in FREE):
            of_inputs, of_outputs = (
                [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in ((args, kwargs), made)
            )
            written = [one for one in of_outputs if all(one is not given for given in of_inputs)]
            changed = of_inputs[:1] if name.endswith("_") and not name.startswith("_") else []
            if name.rstrip("_") in ("zero", "fill", "copy", "normal"):  # these do not read what they write
                of_inputs = of_inputs[1:]
            self.counts.note(name, [*of_inputs, *written, *changed])
        return made


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Builds models on the meta device and lets them choose a GPU's kernels."""
    platform.adapt_to_platform()
    platform.add_products_by_torch()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: META),
            (attention, "FLASH_DEVICE", META.type),
            (attention, "fused_kernels", lambda device: fused),
            (fused, "launch", _launch),
            (model_config, "accumulates_in_products", lambda device: True),
            (products, "adds_products", lambda device, dtype: True),
            (torch.nn.functional, "rms_norm", _rms_norm),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


# torch's RMS norm is one kernel on GPUs, and in backward two. On other devices it consists of other operators.


@torch.library.custom_op("launches::rms_norm", mutates_args=())
def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("launches::rms_norm_backward", mutates_args=())
def _normed_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


_normed.register_fake(lambda x, weight: torch.empty_like(x))
_normed_backward.register_fake(lambda gradient, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
_normed.register_autograd(
    lambda ctx, gradient: torch.ops.launches.rms_norm_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    normed: Tensor = torch.ops.launches.rms_norm(x, weight)
    return normed


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Notes a launch of a Triton kernel, which computes nothing here."""
    name: str = kernel.__name__
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, CountingMode):
            tensors = {(one.data_ptr(), id(one)): one for one in arguments if isinstance(one, Tensor)}
            mode.counts.note(name.strip("_"), [*tensors.values()])


def count(step: Callable[[], object]) -> Counts:
    """Returns the counts of `step`."""
    with CountingMode() as mode:
        step()
    return mode.counts


def count_passes(forward: Callable[[], Tensor]) -> Counts:
    """Returns the counts of a forward pass and its backward pass."""
    with CountingMode() as mode:
        made = forward()
        mode.counts.kept = mode.num_alive()
        made.backward(torch.empty_like(made))
    return mode.counts


def lengths_of(arguments: argparse.Namespace) -> list[int]:
    return [arguments.tokens // arguments.samples] * arguments.samples


def megatron_layers(groups: ProcessGroups, lengths: list[int], recompute: str, folder: Path) -> Counts:
    """Returns the counts of Megatron's local layers and of the norm after them."""
    architecture = read_architecture(folder)
    model: LanguageModel = build_model(
        architecture,
        GRID,
        groups,
        model=schema.Model(path="", dtype="bfloat16", recompute=recompute),  # type: ignore[arg-type]
        parallel=schema.Parallel(),
        device=META,
    )
    chunk: Any = model.chunks[0]
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, chunk, pg_collection=model.pg_collection)
    for parameter in chunk.parameters():
        parameter.main_grad = parameter.main_grad.to(META)
    sequences = model.sequences(lengths)
    hidden = torch.empty(
        sum(lengths), 1, architecture.hidden_size, device=META, dtype=torch.bfloat16, requires_grad=True
    )
    angles = chunk._angles(hidden, sequences)

    def forward() -> Tensor:
        made: Tensor = chunk.decoder(
            hidden_states=hidden, attention_mask=None, packed_seq_params=sequences, rotary_pos_emb=angles
        )
        return made

    counts = count_passes(forward)
    del wrapped  # its hooks, which accumulate gradients, end with it
    return counts


def fsdp_layers(groups: ProcessGroups, lengths: list[int], recompute: str, folder: Path) -> Counts:
    """Returns the counts of transformers' layers and of the norm after them. Shards are not gathered."""
    architecture = read_architecture(folder)
    decoder: Any = empty_model(folder, architecture, torch.bfloat16).language_model.model  # type: ignore[union-attr]
    decoder.rotary_emb.to(META)
    compute_fused(decoder, schema.Recompute(granularity=recompute).chosen(transformer_engine=False))  # type: ignore[arg-type]
    sequences: Any = packed_rows(lengths, META, PackedRows)
    hidden = torch.empty(
        1, sum(lengths), architecture.hidden_size, device=META, dtype=torch.bfloat16, requires_grad=True
    )

    def forward() -> Tensor:
        made: Tensor = decoder(
            inputs_embeds=hidden, position_ids=sequences.positions[None], use_cache=False, rltrain_sequences=sequences
        ).last_hidden_state
        return made

    return count_passes(forward)


class CountedKernel:
    """A replacement for a Triton kernel that is launched as kernel[grid](...). With `num_rows` it touches only so many
    rows of caches [blocks, tokens of a block, ...]."""

    def __init__(self, kernel: Any, num_rows: int | None) -> None:
        self.kernel, self.num_rows = kernel, num_rows

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **constants: Any) -> None:
        is_cache = [isinstance(one, Tensor) and one.dim() == 4 and self.num_rows is not None for one in arguments]
        touched = (
            one.flatten(0, 1)[: self.num_rows] if cached else one
            for one, cached in zip(arguments, is_cache, strict=True)
        )
        _launch(self.kernel, grid, *touched, **constants)


DECODING = ("_add_norm", "_rotate_heads", "_gate_rows", "_attend")
"""Kernels of a layer in a decode step. Attention alone reads all of a cache."""


def decoding_layers(num_slots: int, num_positions: int, folder: Path) -> Counts:
    """Returns the counts of the embedded engine's layers in a decode step of `num_slots` samples, each with
    `num_positions` tokens, with the Triton kernels that a GPU uses."""
    architecture = read_architecture(folder)
    parameters = allocate_parameters(engine_layout(architecture, Grid((0,)), dtype="bfloat16"), 0, device=META)
    model = EngineModel(
        architecture,
        parameters,
        {},
        TensorParallel(None),
        architecture.max_positions,
        torch.bfloat16,
        META,
        kernels=layer_kernels(),
    )
    shape, size = model.attention_shape, KernelBlocks.block_tokens
    num_blocks = num_slots * -(-num_positions // size)
    cache = torch.empty(num_blocks, size, shape.num_kv_heads, shape.head_dim, device=META, dtype=torch.bfloat16)
    blocks = types.SimpleNamespace(
        shape=shape,
        block_tokens=size,
        capacity=num_positions,
        layers=[(cache, torch.empty_like(cache))] * architecture.num_layers,
        routing=(),
        table=torch.empty(num_slots, num_blocks // num_slots, device=META, dtype=torch.int32),
    )
    tokens, positions = (torch.empty(num_slots, device=META, dtype=torch.int64) for _ in range(2))

    def step() -> None:
        model.forward(tokens, positions, KernelBlocks(cast(Any, blocks), positions, num_positions))

    with ExitStack() as stack:
        for name in DECODING:
            counted = CountedKernel(getattr(triton_kernels, name), None if name == "_attend" else num_slots)
            stack.enter_context(mock.patch.object(triton_kernels, name, counted))
        stack.enter_context(torch.inference_mode())
        return count(step)


@dataclass(frozen=True)
class Part:
    """A kernel of a layer in which every formula is fused: what it reads and writes, in elements per token and in
    elements of weights."""

    name: str
    per_token: int
    of_weights: int = 0
    launches: int = 1


def least(architecture: Architecture) -> list[Part]:
    """Returns the kernels of a dense layer's forward and backward, if every formula is one kernel.

    Weights' gradients are added to fp32 sums, which are read and written: four elements of bf16 for each.
    """
    hidden, inner = architecture.hidden_size, architecture.ffn_hidden_size
    queries, keys = (count * architecture.head_dim for count in (architecture.num_heads, architecture.num_kv_heads))
    turned, fused = queries + keys, queries + 2 * keys
    products = [(hidden, fused), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]
    weights = sum(rows * columns for rows, columns in products)
    ends = sum(rows + columns for rows, columns in products)
    return [
        Part("norms with residual", 2 * 4 * hidden, 2 * hidden, 2),
        Part("head norms and rotation", 2 * turned),
        Part("attention", fused + queries),
        Part("SwiGLU", 3 * inner),
        Part("products", ends, weights, 4),
        Part("norms, backward", 2 * 4 * hidden, 2 * 5 * hidden, 2),
        Part("head norms and rotation, backward", 3 * turned + 2 * keys),
        Part("attention, backward", 2 * fused + 2 * queries, launches=KERNELS["_varlen_attn_backward"]),
        Part("SwiGLU, backward", 5 * inner),
        Part("products, backward", 2 * ends, weights + 4 * weights, 8),
    ]


def least_of_decoding(architecture: Architecture, num_positions: int) -> list[Part]:
    """Returns the kernels of a dense layer in a decode step, if every formula is one kernel. A token is a sample here,
    with `num_positions` keys and values to read."""
    forward = {part.name: part for part in least(architecture)[:5]}
    keys = architecture.num_kv_heads * architecture.head_dim
    queries = architecture.num_heads * architecture.head_dim
    return [
        *(forward[name] for name in ("norms with residual", "SwiGLU", "products")),
        Part("head norms, rotation and storing", 2 * (queries + 2 * keys)),
        Part("attention", 2 * queries + 2 * keys * num_positions),
    ]


def report(name: str, counts: Counts, parts: list[Part], num_tokens: int) -> dict[str, Any]:
    """Prints a table and returns its sums."""
    least_bytes = sum(2 * (part.per_token * num_tokens + part.of_weights) for part in parts)
    sums = {
        "launches": sum(counts.launches.values()),
        "bytes": sum(counts.num_bytes.values()),
        "least_launches": sum(part.launches for part in parts),
        "least_bytes": least_bytes,
        "kept_bytes_per_token": counts.kept / num_tokens,
    }
    print(f"\n{name}: a layer, {num_tokens} tokens")
    for operator, number in sorted(counts.launches.items(), key=lambda pair: -counts.num_bytes[pair[0]]):
        if number:
            print(f"  {operator:34s} {number:4d} launches {counts.num_bytes[operator] / 1e6:10.1f} MB")
    print(f"  {'sum':34s} {sums['launches']:4d} launches {sums['bytes'] / 1e6:10.1f} MB")
    print(f"  {'minimum':34s} {sums['least_launches']:4d} launches {least_bytes / 1e6:10.1f} MB")
    if counts.kept:
        print(f"  kept for backward: {counts.kept / num_tokens:,.0f} bytes per token")
    return sums


def measure(folder: Path, lengths: list[int], recompute: str = "none") -> dict[str, Counts]:
    """Returns the counts of a layer in training, by backend. `recompute` is model.recompute."""
    groups = ProcessGroups(group_lists({"actor": GRID}), backend="gloo", timeout_s=60)
    made = {"megatron": megatron_layers, "fsdp": fsdp_layers}
    return {name: _of_a_layer(folder, partial(layers, groups, lengths, recompute)) for name, layers in made.items()}


def measure_decoding(folder: Path, num_slots: int, num_positions: int) -> Counts:
    """Returns the counts of a layer in a decode step."""
    return _of_a_layer(folder, partial(decoding_layers, num_slots, num_positions))


def _of_a_layer(folder: Path, layers: Callable[[Path], Counts]) -> Counts:
    with as_on_a_gpu(), tempfile.TemporaryDirectory() as copies:
        one, two = (layers(shortened_copy(folder, Path(copies, str(number)), number)) for number in (1, 2))
    return two.minus(one)


def shortened_copy(folder: Path, copy: Path, num_layers: int) -> Path:
    """Writes the config.json of a model with fewer layers."""
    values = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(values))
    return copy


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--model", default="Qwen3-8B", help="a model whose config.json is in rltrain/planning")
    made.add_argument("--tokens", type=int, default=8192)
    made.add_argument("--samples", type=int, default=16)
    made.add_argument("--recompute", choices=("none", "selective"), default="none")
    made.add_argument("--output", type=Path)
    arguments = made.parse_args()
    architecture, lengths = read_architecture(SHIPPED / arguments.model), lengths_of(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parts = least(architecture)
    found = measure(SHIPPED / arguments.model, lengths, arguments.recompute)
    result = {
        name: report(f"{name}, forward and backward", counts, parts, sum(lengths)) for name, counts in found.items()
    }
    decoding = measure_decoding(SHIPPED / arguments.model, SLOTS, POSITIONS)
    parts = least_of_decoding(architecture, POSITIONS)
    result["decoding"] = report(f"decode step of {SLOTS} samples of {POSITIONS} tokens", decoding, parts, SLOTS)
    line = json.dumps({"benchmark": "launches", "model": arguments.model, "tokens": sum(lengths)} | result)
    if arguments.output:
        arguments.output.write_text(line + "\n")
    print(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
