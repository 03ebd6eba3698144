"""The weight loader inside SGLang's schedulers, one per tensor-parallel rank. Copies weights staged by a rank.

The server gets it as its custom weight loader. SGLang calls `load(model, [(text, tensor), ...])`. The text is a message
in JSON and the tensor is empty. An exception would end the scheduler, so the outcome of every message is written to the
message's reply file. Needs only torch, because this Python may lack rltrain.

Messages have `op`, `id`, and `reply`, the path of an open file of another process. The operations:

- describe: reply with every parameter's name, dtype, shape, strides and device, and with reasons against updates. With
  `names`, the next sync is one of load_names, and `finish` finds parameters that it has not written.
- load: copy `fields` [name, dtype, shape, offset in bytes, checksum or null] from `memory` into their parameters.
- load_names: give tensors of the checkpoint to the model's own loader. `shares` has the fields of every rank. Those of
  `rank` are in `memory`, and the ranks exchange theirs. The first message of a sync has `begins`. `marks` is as `names`
  above.
- read: copy the parameters of `fields` into `memory`.
- finish: after all loads of a sync, update the values that the model derives from its parameters, and drop the
  features of earlier images. After load_names, parameters that begin with one of `absent` need not be written.
"""

import contextlib
import ctypes
import json
import math
import mmap
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Message = dict[str, Any]
Reply = dict[str, Any]

CHUNK_ELEMENTS = 2**18
RUN, PRESENT, LOW_HALF = 1024, 0xFFA5C3E7, 0xFFFFFFFF
IPC_HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1

_IN_PLACE_BACKENDS = ("auto", "triton", "deep_gemm")
"""MoE backends with experts in the order of SGLang's own loader: gate above up, without permutation."""

_FILLED_HERE = {"Fp8KVCacheMethod": {"k_scale": -1.0, "v_scale": -1.0}}
"""Values of parameters that exist only inside the engine, by the method that makes them. A load format without a
checkpoint leaves noise there. With these values SGLang treats the scales as absent."""

_FUSED_NAME = "fused_qkv_a_proj_with_mqa"
_FUSED = {"q_a_proj": "kv_a_proj_with_mqa", "kv_a_proj_with_mqa": "q_a_proj"}
"""The tensors of the parameter _FUSED_NAME, each with the other one."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MARKS = {torch.int8: -1, torch.int16: 0x7FA5, torch.int32: 0x7FA5C3E7}
"""Bits of unwritten elements: a NaN in every dtype. In FP8 it is the negative one, in others it has digits that no
computation makes."""

_mapped: dict[str, Tensor] = {}
"""Mapped memory of the other process, by the id of its handle."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Executes the messages. Never raises."""
    for text, _ in named_tensors:
        try:
            message = json.loads(text)
            _answer(message, _outcome(model, message))
        except Exception:
            # No reply is possible here. The other side reports the missing reply.
            traceback.print_exc()


def _outcome(model: torch.nn.Module, message: Message) -> Reply:
    try:
        with torch.no_grad():
            return {"error": None, **_OPERATIONS[message["op"]](model, message)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _answer(message: Message, reply: Reply) -> None:
    file = os.open(message["reply"], os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(file, "w") as stream:
        json.dump({"id": message["id"], **reply}, stream)


def _describe(model: torch.nn.Module, message: Message) -> Reply:
    own = _own_parameters(model)
    parameters = [
        [name, _dtype(parameter), list(parameter.shape), list(parameter.stride()), parameter.device.type]
        for name, parameter in parameters_of(model).items()
        if name not in own
    ]
    by_names = message.get("names", False)
    if by_names:
        _mark(model)
    return {"parameters": parameters, "refusals": refusals(model, by_names=by_names)}


def _load(model: torch.nn.Module, message: Message) -> Reply:
    for name, target, staged, checksum in _fields(model, message):
        target.copy_(staged)
        if checksum is not None and checksum_of(target) != checksum:
            raise ValueError(f"parameter {name} differs from what was staged (weight_sync.verify)")
    _synchronize()
    return {}


def _read(model: torch.nn.Module, message: Message) -> Reply:
    for _, target, staged, _ in _fields(model, message):
        staged.copy_(target)
    _synchronize()
    return {}


def _fields(model: torch.nn.Module, message: Message) -> Iterator[tuple[str, Tensor, Tensor, int | None]]:
    """Yields (name, parameter, its place in the other process's memory, checksum) for each field of a message."""
    memory = _memory(message["memory"])
    parameters = parameters_of(model)
    for name, dtype, shape, offset, checksum in message["fields"]:
        target = parameters.get(name)
        if target is None:
            raise ValueError(f"the engine has no parameter {name}")
        if _dtype(target) != dtype or list(target.shape) != shape or not target.is_contiguous():
            raise ValueError(
                f"parameter {name} is {list(target.shape)} of {_dtype(target)} with strides {list(target.stride())} in "
                f"the engine; expected {shape} of {dtype}, contiguous"
            )
        num_bytes = math.prod(shape) * target.dtype.itemsize
        yield name, target.data, memory[offset : offset + num_bytes].view(target.dtype).view(shape), checksum


def _load_names(model: Any, message: Message) -> Reply:
    if message["marks"]:
        _mark(model)
    if message["begins"]:
        model.rltrain_held = {}
    shares, rank, problem = message["shares"], message["rank"], None
    try:
        memory = _memory(message["memory"])
        problem = _damage(shares[rank], memory)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank
        problem = f"{type(error).__name__}: {error}"
    if _is_on_any_rank(problem is not None, len(shares)):
        raise RuntimeError(problem or "another rank of the server cannot read its weights")
    with _without_derived_values(model):
        for fields, held in [(shares[0], memory)] if len(shares) == 1 else _exchanged(shares, memory, rank):
            try:
                _give(model, {name: view for name, view, _ in _views(fields, held)})
            except Exception as error:  # noqa: BLE001 - the other ranks still wait for this rank's share
                problem = problem or f"{type(error).__name__}: {error}"
    if problem:
        raise ValueError(problem)
    _synchronize()
    return {}


def _damage(fields: Sequence[Any], memory: Tensor) -> str | None:
    for name, view, checksum in _views(fields, memory):
        if checksum is not None and checksum_of(view) != checksum:
            return f"tensor {name} differs from what was staged (weight_sync.verify)"
    return None


def _give(model: Any, tensors: dict[str, Tensor]) -> None:
    """Gives tensors to the model's loader. Raises ValueError if it ignores one, while parameters are marked."""
    if not getattr(model, "rltrain_marked", False):
        model.load_weights(_complete(model, tensors))
        return
    watched = {name: tensor.as_subclass(_Watched) for name, tensor in tensors.items()}
    for tensor in watched.values():
        tensor.is_used = False
    model.load_weights(_complete(model, watched))
    if ignored := next((name for name, tensor in watched.items() if not tensor.is_used), None):
        raise ValueError(
            f"the model's loader has left out tensor {ignored}: config.json of the model lacks a key that this version "
            "of SGLang reads, or SGLang's model has no such tensor"
        )


class _Watched(Tensor):
    """A tensor that notes whether an operation has used it. Results are plain tensors."""

    is_used: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") != "__get__":  # a property such as shape
                for one in args:
                    for tensor in one if isinstance(one, list | tuple) else (one,):
                        if isinstance(tensor, cls):
                            tensor.is_used = True
            return func(*args, **kwargs or {})


@contextlib.contextmanager
def _without_derived_values(model: Any) -> Iterator[None]:
    """Makes loaders of single parts leave derived values to `finish`, because some would derive those of all layers."""
    if hasattr(model, "post_load_weights"):
        model.post_load_weights = lambda *_, **__: None
    try:
        yield
    finally:
        vars(model).pop("post_load_weights", None)


def _complete(model: Any, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors. Loaders fuse the two of _FUSED within a call, so the first one waits for the other's part."""
    is_fused = any(_FUSED_NAME in name for name, _ in model.named_parameters())
    for name, tensor in named.items():
        one = next((part for part in _FUSED if f".{part}." in name), None)
        if one is None or not is_fused:
            yield name, tensor
            continue
        other = name.replace(one, _FUSED[one])
        if other in model.rltrain_held:
            yield other, model.rltrain_held.pop(other)
            yield name, tensor
        else:
            model.rltrain_held[name] = tensor.clone()  # its slot is filled again before


def _mark(model: Any) -> None:
    """Fills the parameters with a bit pattern that no weight has, except those of the engine itself."""
    for _, bits in _bits_of(model):
        bits.fill_(_MARKS[bits.dtype])
    _fill_own(model)  # SGLang refuses a NaN there at the end of an update
    model.rltrain_marked = True


def _refuse_marks(model: Any, absent: Sequence[str]) -> None:
    """Raises ValueError if the model's loader has left out elements of a parameter."""
    if not getattr(model, "rltrain_marked", False):
        return
    own = _own_parameters(model)
    for name, bits in _bits_of(model):
        if name in own or name.startswith(tuple(absent)):
            continue
        if missing := int((bits == _MARKS[bits.dtype]).sum()):
            raise ValueError(
                f"the model's loader has not written {missing} of {bits.numel()} elements of parameter {name}: the "
                "tensors of training have other names or shapes than this version of SGLang expects"
            )
    model.rltrain_marked = False


def _bits_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize in _BITS:
            yield name, parameter.data.view(_BITS[parameter.dtype.itemsize])


def _views(fields: Sequence[Any], memory: Tensor) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yields (name, tensor in `memory`, checksum) for each field of a message."""
    for name, dtype, shape, offset, checksum in fields:
        kind: torch.dtype = getattr(torch, dtype)
        yield name, memory[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape), checksum


def _is_on_any_rank(flag: bool, num_ranks: int) -> bool:
    """Collective over: the server's tensor-parallel ranks."""
    if num_ranks == 1:
        return flag
    from sglang.srt.distributed import get_tp_group

    flags = torch.tensor([int(flag)])
    torch.distributed.all_reduce(flags, group=get_tp_group().cpu_group)
    return bool(flags)


def _exchanged(shares: Sequence[Any], memory: Tensor, rank: int) -> Iterator[tuple[Sequence[Any], Tensor]]:
    """Yields (fields, memory) of every rank in turn. Collective over: the server's tensor-parallel ranks."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    for source, fields in enumerate(shares):
        if fields:
            *_, (_, dtype, shape, offset, _) = fields
            num_bytes = offset + math.prod(shape) * getattr(torch, dtype).itemsize
            held = memory[:num_bytes] if source == rank else memory.new_empty(num_bytes)
            yield fields, group.broadcast(held, src=source)


def _finish(model: torch.nn.Module, message: Message) -> Reply:
    # SGLang itself takes this step only if a session loaded nothing.
    post_load: Any = getattr(model, "post_load_weights", None)
    if post_load is not None:
        post_load()
    if message.get("absent") is not None:
        _refuse_marks(model, message["absent"])
    _fill_own(model)
    _forget_images()
    _synchronize()
    return {}


def _forget_images() -> None:
    """Drops the features of earlier images, because SGLang would use them with the new weights of the vision tower."""
    schedule = sys.modules.get("sglang.srt.managers.mm_schedule")
    cache: Any = getattr(schedule, "embedding_cache", None)
    if cache is not None:
        cache.clear()


_OPERATIONS: dict[str, Callable[[torch.nn.Module, Message], Reply]] = {
    "describe": _describe,
    "load": _load,
    "load_names": _load_names,
    "read": _read,
    "finish": _finish,
}


def parameters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the parameters by their names in a model without adapters.

    SGLang wraps layers with adapters in another layer. The A and B of an adapter follow the parameters, each in the
    slot of this server's only adapter.
    """
    parameters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameters[name.replace(".base_layer.", ".")] = parameter
    manager: Any = getattr(model, "rltrain_adapters", None)
    if manager is None:
        return parameters
    (adapter,) = manager.loras
    manager.fetch_new_loras({adapter})  # before a request fetches its zeros
    place = manager.memory_pool.get_buffer_id(adapter)
    for name, layer in model.named_modules():
        for half in ("a", "b"):
            if (stacked := getattr(layer, f"lora_{half}", None)) is not None:
                parameters[f"{name}.weight.lora.{half}"] = stacked[place]
    return parameters


def refusals(model: torch.nn.Module, *, by_names: bool = False) -> list[str]:
    """Returns the reasons against updates in place: one sentence per kind of layer, each with one layer's name.

    With `by_names` the model's own loader writes, which heeds the order of rows and dimensions.
    """
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and (reason := _reason(module, method, by_names)):
            reasons.setdefault(reason, name)
        cached = getattr(module, "_derived_weight_cache_error", None)
        if cached is not None:
            reasons.setdefault(str(cached), name)
    return [f"{layer}: {reason}" for reason, layer in reasons.items()]


def _reason(module: torch.nn.Module, method: object, by_names: bool) -> str | None:
    """Returns the reason against updates of a layer in place, or None.

    Only methods that keep a checkpoint's elements in SGLang 0.5.23 are accepted. Changes that SGLang makes in place at
    the end of an update are allowed, because every update writes all parameters.
    """
    kind = type(method).__name__
    if getattr(module, "use_intel_amx_backend", False):
        return "its weights are packed for AMX after loading; use model.dtype=float32 on the CPU to avoid this"
    if kind in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "PackWeightMethod", *_FILLED_HERE):
        return None
    if kind == "UnquantizedFusedMoEMethod":
        return _moe_reason(module, method, by_names)
    if kind in ("Fp8LinearMethod", "Fp8MoEMethod"):
        return _fp8_reason(module, method)
    return (
        f"{kind} stores weights that cannot be rewritten in place; use no quantisation, or FP8 in blocks of 128 x 128"
    )


def _moe_reason(module: torch.nn.Module, method: object, by_names: bool) -> str | None:
    if getattr(method, "load_up_proj_weight_first", False) and not by_names:
        return "its MoE backend has up above gate; use moe_runner_backend: triton"
    if getattr(module, "use_flashinfer_trtllm_moe", False):
        return "flashinfer_trtllm has up above gate and permutes rows; use moe_runner_backend: triton"
    if getattr(module, "use_triton_kernels", False):
        if by_names:
            return None
        return "triton_kernel has transposed experts; use moe_runner_backend: triton"
    find = getattr(method, "get_moe_runner_backend", None)
    backend = find(module) if find else None
    value = getattr(backend, "value", None)
    if backend is None or value in _IN_PLACE_BACKENDS:
        return None
    return f"MoE backend {value or backend} may reorder experts; use triton or deep_gemm"


def _fp8_reason(module: torch.nn.Module, method: object) -> str | None:
    config = getattr(method, "quant_config", None)
    if not getattr(config, "is_checkpoint_fp8_serialized", False):
        return "the engine quantises by itself (quantization: fp8); weights must be quantised before they are sent"
    if not getattr(method, "block_quant", False):
        return "FP8 with one scale per tensor or channel is transposed after loading; use blocks of 128 x 128"
    if list(getattr(config, "weight_block_size", None) or ()) != [128, 128]:
        return f"FP8 in blocks of {getattr(config, 'weight_block_size', None)}; only 128 x 128 is supported"
    for flag in ("use_mxfp8", "convert_mxfp8_to_block", "use_marlin", "is_fp4_expert"):
        if getattr(method, flag, False):
            return f"{flag} repacks weights after loading"
    if any(getattr(parameter, "format_ue8m0", False) for parameter in module.parameters(recurse=False)):
        return "DeepGEMM requantises to scales of powers of two and does not undo it; use another FP8 backend"
    return _moe_reason(module, method, by_names=False) if type(method).__name__ == "Fp8MoEMethod" else None


def _own_parameters(model: torch.nn.Module) -> dict[str, float]:
    own: dict[str, float] = {}
    for prefix, module in model.named_modules():
        values = _FILLED_HERE.get(type(getattr(module, "quant_method", None)).__name__, {})
        own |= {f"{prefix}.{name}": value for name, value in values.items()}
    return own


def _fill_own(model: torch.nn.Module) -> None:
    parameters = parameters_of(model)
    for name, value in _own_parameters(model).items():
        parameters[name].data.fill_(value)


def checksum_of(tensor: Tensor) -> int:
    """Returns rltrain's checksum (csrc/reshard.h): a sum over elements of a hash of bits and position."""
    bits_type = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    flat = tensor.detach().view(-1).view(bits_type)
    place_keys = _place_keys(torch.arange(RUN, device=flat.device))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), CHUNK_ELEMENTS):  # whole runs except the last
        bits = (flat[first : first + CHUNK_ELEMENTS].to(torch.int64) & ((1 << 8 * flat.itemsize) - 1)) ^ PRESENT
        whole = bits.numel() // RUN
        runs = _run_keys(torch.arange(first // RUN, first // RUN + whole + 1, device=flat.device))
        total += (runs[:whole] * (bits[: whole * RUN].view(whole, RUN) * place_keys).sum(1)).sum()
        rest = bits[whole * RUN :]
        total += runs[whole] * (rest * place_keys[: rest.numel()]).sum()
    return int(total)


def _place_keys(places: Tensor) -> Tensor:
    mixed = (places + 0x9E3779B9) & LOW_HALF
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & LOW_HALF
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & LOW_HALF
    return mixed ^ (mixed >> 16)


def _run_keys(runs: Tensor) -> Tensor:
    mixed = (runs + 1) * -0x61C8864680B583EB
    mixed = (mixed ^ ((mixed >> 32) & LOW_HALF)) * -0x4B47D0C5A0A8B1AD
    return (mixed ^ ((mixed >> 32) & LOW_HALF)) | 1


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _memory(handle: Message) -> Tensor:
    """Returns the memory of a handle, uint8. Maps it once."""
    if handle["id"] not in _mapped:
        maps = {"file": _map_file, "cuda": _map_cuda}[handle["kind"]]
        _mapped[handle["id"]] = maps(handle)
    return _mapped[handle["id"]]


def _map_file(handle: Message) -> Tensor:
    file = os.open(handle["path"], os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise PermissionError(f"{handle['path']} belongs to user {os.fstat(file).st_uid}, not {os.getuid()}")
        return torch.frombuffer(mmap.mmap(file, handle["bytes"]), dtype=torch.uint8)
    finally:
        os.close(file)


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]  # noqa: RUF012


class _Array:
    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _map_cuda(handle: Message) -> Tensor:
    device = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid != handle["device"]:
        raise ValueError(f"weights were staged on device {handle['device']}, but this rank of the engine is on {uuid}")
    torch.cuda.synchronize()  # makes the device's context this thread's
    exported = _IpcHandle.from_buffer_copy(bytes.fromhex(handle["handle"]))
    pointer = ctypes.c_uint64()
    status = ctypes.CDLL("libcuda.so.1").cuIpcOpenMemHandle_v2(
        ctypes.byref(pointer), exported, ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
    )
    if status:
        raise RuntimeError(f"cuIpcOpenMemHandle of the CUDA driver returned error {status}; expected 0")
    return torch.as_tensor(_Array(int(pointer.value), handle["bytes"]), device=f"cuda:{device}")
