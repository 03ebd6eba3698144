"""Counts the launches of a micro-batch and of a decode step, and the bytes of a layer, as on a GPU, without one.

    python tools/benchmarks/launches.py [--model Qwen3-8B] [--tokens 8192] [--recompute selective] [--output FILE]

They run on torch's meta device in bf16: a micro-batch of an update, with log-probs, policy loss and backward, and a
decode step of the embedded engine. Of the backend fsdp layers alone run. A dispatch mode counts operators. A view
launches nothing; every other operator launches one kernel, or as many as KERNELS tells. Work on the host is left out.
Bytes are those of the tensors that an operator takes and makes. The minimum has every input of a fused formula read
once and every output written once. Counts of a layer are the difference of models with two layers and one. The rest is
outside of layers. Gradients accumulate in fp32, as in training.
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
from typing import Any, NamedTuple
from unittest import mock

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import Architecture, attention, fused, layer_kernels, products, read_architecture
from rltrain.planning.options import SHIPPED
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded.block_cache import KernelBlocks
from rltrain.rollout.embedded.decoder import Decoder, Slots, draw_by_kernel
from rltrain.rollout.embedded.layers import layer_kernels as kernels_of_engine
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.parameters import TensorParallel
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training import logit_kernels, vocabulary
from rltrain.training.fsdp_attention import compute_fused
from rltrain.training.fsdp_model import empty_model
from rltrain.training.logprobs import token_logprobs
from rltrain.training.megatron import model_config, platform
from rltrain.training.megatron.backend import run_schedule
from rltrain.training.megatron.model import LanguageModel, build_model
from rltrain.training.packed_attention import PackedRows, packed_rows
from rltrain.training.packing import MicroBatch

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
        made = Counts(Counter(self.launches), Counter(self.num_bytes), self.kept - other.kept)
        made.launches.subtract(other.launches)
        made.num_bytes.subtract(other.num_bytes)
        return made


class Measured(NamedTuple):
    """The counts of a layer, and of what is outside of layers."""

    layer: Counts
    outside: Counts

    def launches(self, num_layers: int) -> int:
        """Returns the launches of a model."""
        return self.outside.launches.total() + num_layers * self.layer.launches.total()


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
        of_inputs, of_outputs = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in ((args, kwargs), made)
        )
        on_host = all(one.device != META for one in (*of_inputs, *of_outputs))
        if of_outputs and not (func.is_view or name in FREE or on_host):
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
            (layer_kernels, "launch", _launch),
            (vocabulary, "_kernels", lambda device: logit_kernels),
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


TABLES = {"table": ("made_keys", "made_values"), "angle_rows": ("cos", "sin")}
"""Arguments of which a kernel touches one row for each token, if it is given the first one."""


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Notes a launch of a Triton kernel, which computes nothing here."""
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    for rows, tables in TABLES.items():
        for name in tables if given.get(rows) is not None else ():
            if name in given:
                given[name] = given[name].unflatten(0, (-1, 1)).flatten(0, -3)[: len(arguments[0])]
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, CountingMode):
            tensors = {(one.data_ptr(), id(one)): one for one in given.values() if isinstance(one, Tensor)}
            mode.counts.note(kernel.__name__.strip("_"), [*tensors.values()])


def count(step: Callable[[], object]) -> Counts:
    """Returns the counts of `step`."""
    with CountingMode() as mode:
        step()
    return mode.counts


def note_kept() -> None:
    """Notes the bytes that a forward pass has left for backward."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, CountingMode):
            mode.counts.kept = mode.num_alive()


def lengths_of(arguments: argparse.Namespace) -> list[int]:
    return [arguments.tokens // arguments.samples] * arguments.samples


def experience_of(lengths: list[int]) -> Experience:
    """Returns samples of responses, with what the loss of a policy needs."""
    numbers, num_tokens = torch.arange(len(lengths)), sum(lengths)
    of_tokens = dict.fromkeys(("advantages", "rollout_logprobs", "actor_logprobs"), torch.zeros(num_tokens))
    return Experience(
        group_ids=numbers,
        lengths=torch.tensor(lengths),
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        response_mask=torch.ones(num_tokens, dtype=torch.bool),
        **of_tokens,
    )


def megatron_micro_batch(groups: ProcessGroups, lengths: list[int], recompute: str, folder: Path) -> Counts:
    """Returns the counts of a micro-batch with Megatron's local layers: log-probs, the policy's loss, and gradients."""
    model: LanguageModel = build_model(
        read_architecture(folder),
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
    batches, loss_function = model.micro_batches(experience_of(lengths), sum(lengths)), policy_loss(schema.Loss(), 1)

    def loss(batch: MicroBatch, outputs: Tensor) -> tuple[Tensor, Any]:
        made = loss_function(batch.experience, *token_logprobs(model, batch, outputs, 1.0))
        note_kept()
        return made.loss, made

    return count(lambda: run_schedule(model, batches, loss, chunks=[wrapped], backward=True))


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

    def step() -> None:
        made = decoder(
            inputs_embeds=hidden, position_ids=sequences.positions[None], use_cache=False, rltrain_sequences=sequences
        ).last_hidden_state
        note_kept()
        made.backward(torch.empty_like(made))

    return count(step)


def decode_step(num_slots: int, num_positions: int, folder: Path) -> Counts:
    """Returns the counts of the embedded engine in a decode step of `num_slots` samples, each with `num_positions`
    tokens, with the Triton kernels that a GPU uses."""
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
        kernels=kernels_of_engine(),
    )
    shape, size = model.attention_shape, KernelBlocks.block_tokens
    num_blocks = num_slots * -(-num_positions // size)
    keys = torch.empty(num_blocks, size, shape.num_kv_heads, shape.head_dim, device=META, dtype=torch.bfloat16)
    blocks: Any = types.SimpleNamespace(
        shape=shape,
        capacity=num_positions,
        layers=[(keys, torch.empty_like(keys))] * architecture.num_layers,
        routing=(),
        table=torch.empty(num_slots, num_blocks // num_slots, device=META, dtype=torch.int32),
        decode_attention=lambda positions, longest: KernelBlocks(blocks, positions, longest),
        reserve=lambda *sizes, num_used: None,
        free=lambda first, end: None,
    )
    with torch.inference_mode():
        slots = Slots(blocks, num_slots, num_positions, META)
        decoder = Decoder(model, slots, draw_by_kernel, None)
        step = partial(decoder.step, num_slots, num_positions, SamplingParams(1.0, 1.0, 0, 1, (0,)))
        step()  # memory of the stop tokens
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
    """Prints a table of a layer and returns its sums."""
    least_bytes = sum(2 * (part.per_token * num_tokens + part.of_weights) for part in parts)
    sums = {
        "launches": counts.launches.total(),
        "bytes": counts.num_bytes.total(),
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


def report_whole(name: str, measured: Measured, num_layers: int) -> dict[str, int]:
    """Prints the launches outside of layers and those of a whole model, and returns their sums."""
    outside = {operator: number for operator, number in measured.outside.launches.most_common() if number}
    print(f"\n{name}, outside of layers: {sum(outside.values())} launches")
    print("  " + ", ".join(f"{number} {operator}" for operator, number in outside.items()))
    print(f"  with {num_layers} layers: {measured.launches(num_layers)} launches")
    return {"outside_launches": sum(outside.values()), "all_launches": measured.launches(num_layers)}


def measure(folder: Path, lengths: list[int], recompute: str = "none") -> dict[str, Measured]:
    """Returns the counts of training by backend. FSDP's have no more than layers and the norm after them.

    `recompute` is model.recompute.
    """
    groups = ProcessGroups(group_lists({"actor": GRID}), backend="gloo", timeout_s=60)
    made = {"megatron": megatron_micro_batch, "fsdp": fsdp_layers}
    return {name: _measured(folder, partial(counted, groups, lengths, recompute)) for name, counted in made.items()}


def measure_decoding(folder: Path, num_slots: int, num_positions: int) -> Measured:
    """Returns the counts of a decode step."""
    return _measured(folder, partial(decode_step, num_slots, num_positions))


def _measured(folder: Path, counted: Callable[[Path], Counts]) -> Measured:
    with as_on_a_gpu(), tempfile.TemporaryDirectory() as copies:
        one, two = (counted(shortened_copy(folder, Path(copies, str(number)), number)) for number in (1, 2))
    return Measured(two.minus(one), one.minus(two.minus(one)))


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
    parts, num_layers = least(architecture), architecture.num_layers
    found = measure(SHIPPED / arguments.model, lengths, arguments.recompute)
    result = {
        name: report(f"{name}, forward and backward", measured.layer, parts, sum(lengths))
        for name, measured in found.items()
    }
    result["megatron"] |= report_whole("micro-batch with Megatron", found["megatron"], num_layers)
    decoding = measure_decoding(SHIPPED / arguments.model, SLOTS, POSITIONS)
    parts = least_of_decoding(architecture, POSITIONS)
    result["decoding"] = report(f"decode step of {SLOTS} samples of {POSITIONS} tokens", decoding.layer, parts, SLOTS)
    result["decoding"] |= report_whole("decode step", decoding, num_layers)
    line = json.dumps({"benchmark": "launches", "model": arguments.model, "tokens": sum(lengths)} | result)
    if arguments.output:
        arguments.output.write_text(line + "\n")
    print(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
